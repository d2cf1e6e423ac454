// Vectors of kVector elements, and how a thread loads and stores all or some of them.
#pragma once

#include <cstdint>

#include "kernels/tuning.h"

namespace jaxrenaissance {

template <typename T>
struct alignas(sizeof(T) * kVector > 16 ? 16 : sizeof(T) * kVector) Vector {
  T x[kVector];
};

template <typename T>
__device__ __forceinline__ bool IsVectorAligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Vector<T>) == 0;
}

// Loads `count` elements; the others stay as they were. Leaves may start anywhere, so the way is
// chosen per thread.
template <typename T>
__device__ __forceinline__ void LoadVector(const T* p, int count, Vector<T>& out) {
  if (count == kVector && IsVectorAligned(p)) {
    out = *reinterpret_cast<const Vector<T>*>(p);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) out.x[i] = p[i];
  }
}

template <typename T>
__device__ __forceinline__ void StoreVector(T* p, int count, const Vector<T>& value) {
  if (count == kVector && IsVectorAligned(p)) {
    *reinterpret_cast<Vector<T>*>(p) = value;
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) p[i] = value.x[i];
  }
}

}  // namespace jaxrenaissance
