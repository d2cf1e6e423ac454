// What kernels that run an update rule share: the arenas, a group's scalars, and the choice of the
// rule.
#pragma once

#include "core/operands.h"
#include "core/update.h"
#include "kernels/vector.cuh"

namespace jaxrenaissance {

// The arenas of a batch. `gradient` is null where the gradients are leaves, `ema` where there is
// none.
template <typename T>
struct Arenas {
  T* weights;
  T* moments[2];
  T* ema;
  const T* gradient;
  int64_t gradient_stride;  // between members; 0 where they share it
  int64_t size;             // of one member
  int64_t members;
};

template <typename T>
Arenas<T> MakeArenas(const Layout& layout, const UpdateOperands& operands) {
  return {static_cast<T*>(operands.weights),
          {static_cast<T*>(operands.moments[0]), static_cast<T*>(operands.moments[1])},
          static_cast<T*>(operands.ema),
          static_cast<const T*>(operands.gradients.arena),
          operands.gradients.arena_stride,
          layout.size,
          layout.members};
}

// Trust ratios, one a segment, or null. S is the type of the scalar arena.
template <typename S>
struct Ratios {
  const S* data;
  int64_t stride;  // between members
};

// A group's scalars, loaded as whole vectors: a row is 16 aligned slots.
template <typename T, typename S>
__device__ __forceinline__ GroupScalars<T> LoadRow(const S* row) {
  S slots[kRow];
#pragma unroll
  for (int i = 0; i < kRow; i += kVector) {
    const Vector<S> part = *reinterpret_cast<const Vector<S>*>(row + i);
#pragma unroll
    for (int j = 0; j < kVector; ++j) slots[i + j] = part.x[j];
  }
  return LoadGroup<T>(slots);
}

// The call's scalars lie in the header's first vector.
template <typename S>
__device__ __forceinline__ Vector<S> LoadHeader(const S* floats) {
  static_assert(kApply == 0 && kGradFactor == 1 && kMaxValue == 2 && kOneMinusEma == 3);
  return *reinterpret_cast<const Vector<S>*>(floats);
}

template <typename F>
cudaError_t WithRule(UpdateKind kind, const F& f) {
  switch (kind) {
    case UpdateKind::kSgd:
      return f(Sgd{});
    case UpdateKind::kMomentum:
      return f(Momentum{});
    case UpdateKind::kNesterov:
      return f(Nesterov{});
    case UpdateKind::kAdam:
      return f(Adam{});
    case UpdateKind::kLion:
      return f(Lion{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxrenaissance
