// What each op's call consists of, decoded the same way for both backends.
#pragma once

#include "ffi/decode.h"

namespace jaxrenaissance {

struct UpdateCall {
  Layout layout{nullptr, 0, -1, 0};
  bool is_double = false;
  Floats floats{};
  void* weights = nullptr;
  void* moments[2] = {nullptr, nullptr};
  GradientOperands gradients{};
};

inline UpdateCall DecodeUpdate(Decoder& decoder, int moments, bool from_arena) {
  UpdateCall call;
  decoder.Segments(call.layout);
  call.floats = decoder.ReadFloats();
  call.weights = decoder.Arena(call.layout, call.is_double, "the weights");
  decoder.CheckInPlace(0, call.weights, "the weights");
  for (int i = 0; i < moments; ++i) {
    call.moments[i] = decoder.Arena(call.layout, call.is_double, "a moment");
    decoder.CheckInPlace(1 + i, call.moments[i], "a moment");
  }
  call.gradients = decoder.Gradients(from_arena, call.layout, call.is_double);
  return call;
}

struct StatisticsCall {
  Layout layout{nullptr, 0, -1, 0};
  bool is_double = false;
  int32_t* ints = nullptr;
  GradientOperands gradients{};
};

inline StatisticsCall DecodeStatistics(Decoder& decoder, bool from_arena, int64_t size,
                                       bool is_double) {
  StatisticsCall call;
  call.layout.size = size;
  call.is_double = is_double;
  decoder.Segments(call.layout);
  call.ints = decoder.Ints();
  decoder.CheckInPlace(0, call.ints, "ints");
  call.gradients = decoder.Gradients(from_arena, call.layout, call.is_double);
  return call;
}

struct PackingCall {
  Layout layout{nullptr, 0, -1, 0};
  bool is_double = false;
  void* arena = nullptr;
  std::vector<Leaf> leaves;
};

inline PackingCall DecodeUnpack(Decoder& decoder) {
  PackingCall call;
  decoder.Segments(call.layout);
  call.arena = decoder.Arena(call.layout, call.is_double, "the arena");
  call.leaves = decoder.ResultLeaves();
  return call;
}

inline PackingCall DecodePack(Decoder& decoder) {
  PackingCall call;
  decoder.Segments(call.layout);
  call.arena = decoder.ResultArena(0, call.layout, call.is_double, "the arena");
  call.leaves = decoder.RemainingLeaves();
  return call;
}

struct PrologueCall {
  void* floats = nullptr;
  int32_t* ints = nullptr;
  bool is_double = false;
  int64_t num_groups = 0;
};

inline PrologueCall DecodePrologue(Decoder& decoder, int64_t num_floats) {
  const Floats floats = decoder.ReadFloats();
  decoder.CheckInPlace(0, floats.data, "floats");
  int32_t* ints = decoder.Ints();
  decoder.CheckInPlace(1, ints, "ints");
  return {const_cast<void*>(floats.data), ints, floats.is_double, num_floats / kRow - 1};
}

}  // namespace jaxrenaissance
