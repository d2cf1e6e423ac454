// What each op's call consists of, decoded the same way for both backends.
#pragma once

#include "ffi/decode.h"

namespace jaxrenaissance {

inline const std::vector<Leaf>* LeavesOf(const GradientOperands& gradients) {
  return gradients.from_arena ? nullptr : &gradients.leaves;
}

struct UpdateCall {
  Layout layout;
  Floats floats;
  void* weights;
  void* moments[2];
  GradientOperands gradients;
};

inline UpdateCall DecodeUpdate(Decoder& decoder, int moments) {
  UpdateCall call{};
  call.layout = decoder.ReadLayout();
  call.floats = decoder.ReadFloats();
  call.weights = decoder.ReadInPlaceArena(call.layout, 0, "the weights");
  for (int i = 0; i < moments; ++i)
    call.moments[i] = decoder.ReadInPlaceArena(call.layout, 1 + i, "a moment");
  call.gradients = decoder.Gradients(call.layout);
  decoder.Require(call.floats.is_double || !call.layout.is_double,
                  "float32 scalars beside a float64 arena");
  decoder.CheckSegments(call.layout, LeavesOf(call.gradients), call.floats.num_groups);
  return call;
}

struct StatisticsCall {
  Layout layout;
  int32_t* ints;
  GradientOperands gradients;
};

inline StatisticsCall DecodeStatistics(Decoder& decoder) {
  StatisticsCall call{};
  call.layout = decoder.ReadLayout();
  call.ints = decoder.ReadInPlaceInts(0);
  call.gradients = decoder.Gradients(call.layout);
  decoder.CheckSegments(call.layout, LeavesOf(call.gradients));
  return call;
}

struct UnpackCall {
  Layout layout;
  const void* arena;
  int64_t arena_stride;
  std::vector<Leaf> leaves;
};

inline UnpackCall DecodeUnpack(Decoder& decoder) {
  UnpackCall call{};
  call.layout = decoder.ReadLayout();
  const Decoder::Arena arena = decoder.ReadArena(call.layout, "the arena");
  call.arena = arena.data;
  call.arena_stride = arena.stride;
  call.leaves = decoder.ResultLeaves(call.layout);
  decoder.CheckSegments(call.layout, &call.leaves);
  return call;
}

struct PackCall {
  Layout layout;
  void* arena;
  std::vector<Leaf> leaves;
};

inline PackCall DecodePack(Decoder& decoder) {
  PackCall call{};
  call.layout = decoder.ReadLayout();
  call.arena = decoder.ResultArena(call.layout, "the arena");
  call.leaves = decoder.RemainingLeaves(call.layout);
  decoder.CheckSegments(call.layout, &call.leaves);
  return call;
}

struct PrologueCall {
  void* floats;
  bool is_double;
  int32_t* ints;
  int64_t num_groups;
};

inline PrologueCall DecodePrologue(Decoder& decoder) {
  const Floats floats = decoder.ReadFloats();
  decoder.CheckInPlace(0, floats.data, "floats");
  int32_t* ints = decoder.ReadInPlaceInts(1);
  return {const_cast<void*>(floats.data), floats.is_double, ints, floats.num_groups};
}

}  // namespace jaxrenaissance
