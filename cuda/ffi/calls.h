// What each op's call consists of, decoded the same way for both backends.
#pragma once

#include "ffi/decode.h"

namespace jaxrenaissance {

inline const Leaves* LeavesOf(const GradientOperands& gradients) {
  return gradients.from_arena ? nullptr : &gradients.leaves;
}

struct UpdateCall {
  Layout layout;
  Floats floats;
  UpdateOperands operands;
};

inline void DecodeRatios(Decoder& decoder, const Layout& layout, const Floats& floats,
                         UpdateOperands& operands) {
  if (decoder.Attribute(&Attributes::ratios) == 0) return;
  const Floats ratios = decoder.ReadBySegment(layout, floats.is_double);
  operands.ratios = ratios.data;
  operands.ratios_stride = ratios.stride;
}

inline UpdateCall DecodeUpdate(Decoder& decoder, int moments) {
  UpdateCall call{};
  call.layout = decoder.ReadLayout();
  call.floats = decoder.ReadFloats();
  UpdateOperands& operands = call.operands;
  operands.weights = decoder.ReadInPlaceArena(call.layout, 0, "the weights");
  for (int i = 0; i < moments; ++i)
    operands.moments[i] = decoder.ReadInPlaceArena(call.layout, 1 + i, "a moment");
  if (decoder.Attribute(&Attributes::ema) != 0)
    operands.ema = decoder.ReadInPlaceArena(call.layout, 1 + moments, "the average");
  DecodeRatios(decoder, call.layout, call.floats, operands);
  operands.gated = decoder.Attribute(&Attributes::gated) != 0;
  operands.gradients = decoder.Gradients(call.layout);
  decoder.Require(call.floats.is_double || !call.layout.is_double,
                  "float32 scalars beside a float64 arena");
  decoder.CheckSegments(LeavesOf(operands.gradients), call.floats.num_groups);
  return call;
}

// An update whose weights are leaves, and which hands out what is to be added to them.
struct ChangesCall {
  Layout layout;
  Floats floats;
  UpdateOperands operands;
  Leaves weights;  // empty where they play no part
  Leaves changes;
};

// The moments are the first results, the changes the others. Gradients come before weights.
inline ChangesCall DecodeChanges(Decoder& decoder, int moments) {
  ChangesCall call{};
  call.layout = decoder.ReadLayout();
  call.floats = decoder.ReadFloats();
  UpdateOperands& operands = call.operands;
  for (int i = 0; i < moments; ++i)
    operands.moments[i] = decoder.ReadInPlaceArena(call.layout, i, "a moment");
  DecodeRatios(decoder, call.layout, call.floats, operands);
  call.changes = decoder.ResultLeaves(call.layout, moments);
  Leaves& gradients = operands.gradients.leaves;
  gradients = decoder.RemainingLeaves(call.layout);
  if (!decoder.ok()) return call;  // leaves that were not read have no forms
  if (decoder.Attribute(&Attributes::weights) != 0) {
    const int64_t half = gradients.size() / 2;
    const auto middle = gradients.data.begin() + half;
    call.weights = {{middle, gradients.data.end()}, gradients.forms + half};
    gradients.data.erase(middle, gradients.data.end());
    decoder.Require(call.weights.size() == call.changes.size(),
                    "there are not as many weights as changes");
  }
  decoder.Require(gradients.size() == call.changes.size(),
                  "there are not as many gradients as changes");
  decoder.Require(call.floats.is_double || !call.layout.is_double,
                  "float32 scalars beside a float64 arena");
  decoder.CheckSegments(&call.changes, call.floats.num_groups);
  return call;
}

struct UpdateNormsCall {
  Layout layout;
  Floats floats;
  UpdateOperands operands;
  Workspace workspace;
  int32_t* of_weights;  // null where it is not the update before its learning rate
};

// The arenas are only read, and come in the order of those that an update writes.
inline UpdateNormsCall DecodeUpdateNorms(Decoder& decoder, int moments) {
  UpdateNormsCall call{};
  call.layout = decoder.ReadLayout();
  call.floats = decoder.ReadFloats();
  UpdateOperands& operands = call.operands;
  operands.weights = decoder.ReadWholeArena(call.layout, "the weights");
  for (int i = 0; i < moments; ++i)
    operands.moments[i] = decoder.ReadWholeArena(call.layout, "a moment");
  DecodeRatios(decoder, call.layout, call.floats, operands);
  operands.gradients = decoder.Gradients(call.layout);
  call.workspace = decoder.ResultWorkspace(call.layout, 0);
  if (decoder.Attribute(&Attributes::direction) != 0)
    call.of_weights = decoder.ResultWorkspace(call.layout, 1).data;
  decoder.Require(call.floats.is_double || !call.layout.is_double,
                  "float32 scalars beside a float64 arena");
  decoder.CheckSegments(LeavesOf(operands.gradients), call.floats.num_groups);
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
  const int64_t sums = 1 + decoder.Attribute(&Attributes::weights);
  decoder.Require(sums >= 1 && sums <= kMaxSums, "weights is none of 0, 1 and 2");
  if (sums > 1) {
    const Decoder::Arena weights = decoder.ReadArena(call.layout, "the weights");
    operands.weights = weights.data;
    operands.weights_stride = weights.stride;
  }
  operands.gradients = decoder.Gradients(call.layout);
  operands.first_leaf = static_cast<int32_t>(decoder.Attribute(&Attributes::first_leaf));
  operands.flag = decoder.Attribute(&Attributes::flag) != 0;
  for (int64_t k = 0; decoder.ok() && k < sums; ++k)
    operands.workspaces[k] = decoder.ResultWorkspace(call.layout, 1 + k);
  decoder.CheckSegments(LeavesOf(operands.gradients));
  return call;
}

inline NormsCall DecodeAccumulate(Decoder& decoder) {
  NormsCall call{};
  call.layout = decoder.ReadLayout();
  NormsOperands& operands = call.operands;
  operands.ints = decoder.ReadInPlaceInts(0);
  operands.accumulator = decoder.ReadInPlaceArena(call.layout, 1, "the accumulator");
  operands.gradients = decoder.Gradients(call.layout);
  operands.first_leaf = static_cast<int32_t>(decoder.Attribute(&Attributes::first_leaf));
  operands.flag = decoder.Attribute(&Attributes::flag) != 0;
  if (decoder.Attribute(&Attributes::norms) != 0)
    operands.workspaces[0] = decoder.ResultWorkspace(call.layout, 2);
  decoder.CheckSegments(LeavesOf(operands.gradients));
  return call;
}

// The workspaces from result `first` on.
inline Workspaces DecodeWorkspaces(Decoder& decoder, int64_t first) {
  Workspaces workspaces{};
  decoder.Require(decoder.program().has_workspaces, "attribute segments is missing");
  const std::vector<int64_t>& segments = decoder.program().workspace_segments;
  decoder.Require(segments.size() <= kMaxSums * kMaxArenas, "more workspaces than arenas");
  for (size_t k = 0; decoder.ok() && k < segments.size(); ++k) {
    workspaces.each[k] = decoder.ReadInPlaceWorkspace(segments[k], first + static_cast<int64_t>(k));
    ++workspaces.count;
  }
  return workspaces;
}

inline FinishOperands DecodeFinishOf(Decoder& decoder, FinishKind kind) {
  FinishOperands operands{};
  operands.kind = kind;
  const Floats floats = decoder.ReadFloats();
  decoder.CheckInPlace(0, floats.data, "floats");
  operands.floats = const_cast<void*>(floats.data);
  operands.is_double = floats.is_double;
  operands.num_groups = floats.num_groups;
  operands.members = decoder.members();
  return operands;
}

// Workspaces from result `first` on, and the groups of trust ratios where there are any.
inline void DecodeSums(Decoder& decoder, int64_t first, FinishOperands& operands) {
  Workspaces& workspaces = operands.workspaces;
  workspaces = DecodeWorkspaces(decoder, first);
  const int64_t gradients = decoder.Attribute(&Attributes::gradients);
  decoder.Require(gradients >= 0 && gradients <= kMaxArenas && gradients <= workspaces.count,
                  "more gradients than workspaces");
  workspaces.gradients = static_cast<int>(gradients);
  if (operands.trust == TrustRule::kNone) return;
  const int series = operands.trust == TrustRule::kLarsAsOptax ? 3 : 2;
  decoder.Require(workspaces.count == series * workspaces.gradients,
                  "trust ratios want other workspaces");
  for (int k = 0; decoder.ok() && k < workspaces.gradients; ++k)
    operands.groups[k] = decoder.ReadGroups(workspaces.each[k].num_segments);
}

inline FinishOperands DecodeFinish(Decoder& decoder) {
  FinishOperands operands = DecodeFinishOf(decoder, FinishKind::kGradients);
  operands.ints = decoder.ReadInPlaceInts(1);
  operands.trust = static_cast<TrustRule>(decoder.Attribute(&Attributes::trust));
  DecodeSums(decoder, 2, operands);
  int64_t result = 2 + operands.workspaces.count;
  const auto by_segment = [&](void*(&into)[kMaxArenas]) {
    for (int k = 0; decoder.ok() && k < operands.workspaces.gradients; ++k) {
      into[k] = decoder.ResultBySegment(operands.workspaces.each[k].num_segments,
                                        operands.is_double, result++);
    }
  };
  if (decoder.Attribute(&Attributes::by_segment) != 0) by_segment(operands.norms);
  if (operands.trust != TrustRule::kNone) by_segment(operands.ratios);
  return operands;
}

inline FinishOperands DecodeFinishUpdate(Decoder& decoder) {
  FinishOperands operands = DecodeFinishOf(decoder, FinishKind::kUpdateNorm);
  operands.workspaces = DecodeWorkspaces(decoder, 1);
  return operands;
}

inline FinishOperands DecodeFinishRatios(Decoder& decoder) {
  FinishOperands operands = DecodeFinishOf(decoder, FinishKind::kRatios);
  operands.trust = TrustRule::kLamb;
  DecodeSums(decoder, 1, operands);
  for (int k = 0; decoder.ok() && k < operands.workspaces.gradients; ++k) {
    operands.ratios[k] =
        decoder.ResultBySegment(operands.workspaces.each[k].num_segments, operands.is_double,
                                1 + operands.workspaces.count + k);
  }
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
  const int64_t targets = decoder.Attribute(&Attributes::targets);
  decoder.Require(targets >= 1 && targets <= kMaxTargets, "too many or no targets");
  for (int64_t k = 0; decoder.ok() && k < targets; ++k)
    operands.targets.push_back(decoder.ReadInPlaceArena(call.layout, k, "a target"));
  operands.source = static_cast<LerpSource>(decoder.Attribute(&Attributes::source));
  if (operands.source == LerpSource::kLeaves) {
    operands.leaves = decoder.RemainingLeaves(call.layout);
  } else if (operands.source == LerpSource::kArena) {
    const Decoder::Arena arena = decoder.ReadArena(call.layout, "the source");
    operands.arena = arena.data;
    operands.arena_stride = arena.stride;
  }
  decoder.CheckSegments(operands.source == LerpSource::kLeaves ? &operands.leaves : nullptr,
                        taus.count);
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
  decoder.CheckSegments(LeavesOf(call.gradients));
  return call;
}

struct UnpackCall {
  Layout layout;
  const void* arena;
  int64_t arena_stride;
  Leaves leaves;
};

inline UnpackCall DecodeUnpack(Decoder& decoder) {
  UnpackCall call{};
  call.layout = decoder.ReadLayoutOfAnyType();
  const Decoder::Arena arena = decoder.ReadArena(call.layout, "the arena");
  call.arena = arena.data;
  call.arena_stride = arena.stride;
  call.leaves = decoder.ResultLeaves(call.layout);
  decoder.CheckSegments(&call.leaves);
  return call;
}

struct PackCall {
  Layout layout;
  void* arena;
  Leaves leaves;
  PieceIndex piece;
};

inline PackCall DecodePack(Decoder& decoder) {
  PackCall call{};
  call.layout = decoder.ReadLayoutOfAnyType();
  call.arena = decoder.ResultArena(call.layout, "the arena");
  call.leaves = decoder.RemainingLeaves(call.layout);
  decoder.CheckSegments(&call.leaves);
  return call;
}

inline PackCall DecodePackPiece(Decoder& decoder) {
  const PieceIndex piece = decoder.ReadPieceIndex();
  PackCall call = DecodePack(decoder);
  call.piece = piece;
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
