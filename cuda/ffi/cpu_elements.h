// Where the CPU's handlers find the elements of a stretch of a segment.
#pragma once

#include <optional>
#include <type_traits>

#include "cpu/kernels.h"
#include "ffi/calls.h"

namespace jaxrenaissance {

template <typename T>
T* Offset(T* data, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return data == nullptr ? nullptr : static_cast<T*>(static_cast<Byte*>(data) + bytes);
}

inline int64_t ArenaItem(bool is_double) { return is_double ? 8 : 4; }

inline ConvertFn ConverterOf(LeafType from, LeafType to) {
  return BestCpuKernels().convert[static_cast<int>(from)][static_cast<int>(to)];
}

// The address of the leaf's element behind arena position `position` of a segment.
inline void* LeafElement(const Leaf& leaf, int64_t member, const Segment& segment,
                         int64_t position) {
  const int64_t element = member * leaf.stride + segment.leaf_offset + (position - segment.start);
  return Offset(leaf.data, element * LeafTypeSize(leaf.type));
}

inline const void* GradientElement(const GradientOperands& gradients, bool is_double,
                                   int64_t member, const Segment& segment, int64_t position,
                                   LeafType& type) {
  if (gradients.from_arena) {
    type = is_double ? LeafType::kF64 : LeafType::kF32;
    return Offset(gradients.arena,
                  (member * gradients.arena_stride + position) * ArenaItem(is_double));
  }
  const Leaf& leaf = gradients.leaves[segment.leaf];
  type = leaf.type;
  return LeafElement(leaf, member, segment, position);
}

inline double FloatAt(const Floats& floats, int64_t index) {
  return floats.is_double ? static_cast<const double*>(floats.data)[index]
                          : static_cast<const float*>(floats.data)[index];
}

// The part [low, high) of a segment of member `member`, and its gradient's type.
struct TypedStretch {
  UpdateStretch stretch;
  LeafType type;
};

// The trust ratio of a segment, where there are any.
template <typename Call>
std::optional<double> RatioOf(const Call& call, int64_t member, const Segment& segment) {
  const UpdateOperands& operands = call.operands;
  if (operands.ratios == nullptr) return std::nullopt;
  const int64_t number = &segment - call.layout.segments;
  return FloatAt({operands.ratios, 0, call.floats.is_double, 0},
                 member * operands.ratios_stride + number);
}

inline TypedStretch StretchOf(const Layout& layout, const Floats& floats,
                              const UpdateOperands& operands, int64_t member,
                              const Segment& segment, int64_t low, int64_t high) {
  const int64_t item = ArenaItem(layout.is_double);
  const int64_t offset = (member * layout.size + low) * item;
  LeafType type;
  const void* gradient =
      GradientElement(operands.gradients, layout.is_double, member, segment, low, type);
  return {{Offset(operands.weights, offset),
           nullptr,
           {Offset(operands.moments[0], offset), Offset(operands.moments[1], offset)},
           Offset(operands.ema, offset),
           nullptr,
           gradient,
           high - low,
           Offset(floats.data, member * floats.stride * ArenaItem(floats.is_double)),
           segment.group},
          type};
}

}  // namespace jaxrenaissance
