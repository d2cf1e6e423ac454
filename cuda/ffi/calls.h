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
  UpdateOperands operands;
};

// Arenas that are only read come in the same order as those that an update writes.
inline UpdateCall DecodeUpdate(Decoder& decoder, int moments) {
  UpdateCall call{};
  call.layout = decoder.ReadLayout();
  call.floats = decoder.ReadFloats();
  UpdateOperands& operands = call.operands;
  operands.weights = decoder.ReadInPlaceArena(call.layout, 0, "the weights");
  for (int i = 0; i < moments; ++i)
    operands.moments[i] = decoder.ReadInPlaceArena(call.layout, 1 + i, "a moment");
  if (decoder.Attribute<int64_t>("ema") != 0)
    operands.ema = decoder.ReadInPlaceArena(call.layout, 1 + moments, "the average");
  operands.gated = decoder.Attribute<int64_t>("gated") != 0;
  operands.gradients = decoder.Gradients(call.layout);
  decoder.Require(call.floats.is_double || !call.layout.is_double,
                  "float32 scalars beside a float64 arena");
  decoder.CheckSegments(call.layout, LeavesOf(operands.gradients), call.floats.num_groups);
  return call;
}

struct UpdateNormsCall {
  Layout layout;
  Floats floats;
  UpdateOperands operands;
  Workspace workspace;
};

inline UpdateNormsCall DecodeUpdateNorms(Decoder& decoder, int moments) {
  UpdateNormsCall call{};
  call.layout = decoder.ReadLayout();
  call.floats = decoder.ReadFloats();
  UpdateOperands& operands = call.operands;
  operands.weights = decoder.ReadWholeArena(call.layout, "the weights");
  for (int i = 0; i < moments; ++i)
    operands.moments[i] = decoder.ReadWholeArena(call.layout, "a moment");
  operands.gradients = decoder.Gradients(call.layout);
  call.workspace = decoder.ResultWorkspace(call.layout, 0);
  decoder.Require(call.floats.is_double || !call.layout.is_double,
                  "float32 scalars beside a float64 arena");
  decoder.CheckSegments(call.layout, LeavesOf(operands.gradients), call.floats.num_groups);
  return call;
}

struct NormsCall {
  Layout layout;
  NormsOperands operands;
};

inline NormsCall DecodeNorms(Decoder& decoder) {
  NormsCall call{};
  call.layout = decoder.ReadLayout();
  NormsOperands& operands = call.operands;
  operands.ints = decoder.ReadInPlaceInts(0);
  operands.gradients = decoder.Gradients(call.layout);
  operands.first_leaf = static_cast<int32_t>(decoder.Attribute<int64_t>("first_leaf"));
  operands.flag = decoder.Attribute<int64_t>("flag") != 0;
  operands.workspace = decoder.ResultWorkspace(call.layout, 1);
  decoder.CheckSegments(call.layout, LeavesOf(operands.gradients));
  return call;
}

inline NormsCall DecodeAccumulate(Decoder& decoder) {
  NormsCall call{};
  call.layout = decoder.ReadLayout();
  NormsOperands& operands = call.operands;
  operands.ints = decoder.ReadInPlaceInts(0);
  operands.accumulator = decoder.ReadInPlaceArena(call.layout, 1, "the accumulator");
  operands.gradients = decoder.Gradients(call.layout);
  operands.first_leaf = static_cast<int32_t>(decoder.Attribute<int64_t>("first_leaf"));
  operands.flag = decoder.Attribute<int64_t>("flag") != 0;
  if (decoder.Attribute<int64_t>("norms") != 0)
    operands.workspace = decoder.ResultWorkspace(call.layout, 2);
  decoder.CheckSegments(call.layout, LeavesOf(operands.gradients));
  return call;
}

// The workspaces from result `first` on.
inline Workspaces DecodeWorkspaces(Decoder& decoder, int64_t first) {
  Workspaces workspaces{};
  const Words segments = decoder.Attribute<Words>("segments");
  decoder.Require(segments.size() <= 2 * kMaxArenas, "more workspaces than arenas");
  for (size_t k = 0; decoder.ok() && k < segments.size(); ++k) {
    workspaces.each[k] =
        decoder.ReadInPlaceWorkspace(segments.begin()[k], first + static_cast<int64_t>(k));
    ++workspaces.count;
  }
  return workspaces;
}

inline FinishOperands DecodeFinish(Decoder& decoder) {
  FinishOperands operands{};
  const Floats floats = decoder.ReadFloats();
  decoder.CheckInPlace(0, floats.data, "floats");
  operands.floats = const_cast<void*>(floats.data);
  operands.is_double = floats.is_double;
  operands.num_groups = floats.num_groups;
  operands.members = decoder.members();
  operands.ints = decoder.ReadInPlaceInts(1);
  operands.workspaces = DecodeWorkspaces(decoder, 2);
  const int64_t gradients = decoder.Attribute<int64_t>("gradients");
  decoder.Require(
      gradients >= 0 && gradients <= kMaxArenas && gradients <= operands.workspaces.count,
      "more gradients than workspaces");
  operands.workspaces.gradients = static_cast<int>(gradients);
  if (decoder.Attribute<int64_t>("by_segment") == 0) return operands;
  for (int k = 0; decoder.ok() && k < operands.workspaces.gradients; ++k) {
    operands.norms[k] = decoder.ResultNorms(operands.workspaces.each[k].num_segments,
                                            operands.is_double, 2 + operands.workspaces.count + k);
  }
  return operands;
}

inline FinishOperands DecodeFinishUpdate(Decoder& decoder) {
  FinishOperands operands{};
  const Floats floats = decoder.ReadFloats();
  decoder.CheckInPlace(0, floats.data, "floats");
  operands.floats = const_cast<void*>(floats.data);
  operands.is_double = floats.is_double;
  operands.num_groups = floats.num_groups;
  operands.members = decoder.members();
  operands.workspaces = DecodeWorkspaces(decoder, 1);
  return operands;
}

struct LerpCall {
  Layout layout;
  LerpOperands operands;
};

inline LerpCall DecodeLerp(Decoder& decoder) {
  LerpCall call{};
  call.layout = decoder.ReadLayout();
  LerpOperands& operands = call.operands;
  const Decoder::Taus taus = decoder.ReadTaus(call.layout);
  operands.taus = taus.data;
  operands.taus_stride = taus.stride;
  const int64_t targets = decoder.Attribute<int64_t>("targets");
  decoder.Require(targets >= 1 && targets <= kMaxTargets, "too many or no targets");
  for (int64_t k = 0; decoder.ok() && k < targets; ++k)
    operands.targets.push_back(decoder.ReadInPlaceArena(call.layout, k, "a target"));
  operands.source = static_cast<LerpSource>(decoder.Attribute<int64_t>("source"));
  if (operands.source == LerpSource::kLeaves) {
    operands.leaves = decoder.RemainingLeaves(call.layout);
  } else if (operands.source == LerpSource::kArena) {
    const Decoder::Arena arena = decoder.ReadArena(call.layout, "the source");
    operands.arena = arena.data;
    operands.arena_stride = arena.stride;
  }
  decoder.CheckSegments(
      call.layout, operands.source == LerpSource::kLeaves ? &operands.leaves : nullptr, taus.count);
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
