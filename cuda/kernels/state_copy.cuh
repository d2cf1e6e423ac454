// A state's header and counters in shared memory. In device memory, each load of the prologue's
// steps would wait for the store before it.
#pragma once

#include "core/prologue.h"
#include "kernels/vector.cuh"

namespace jaxrenaissance {

template <typename S>
struct StateCopy {
  S header[kHeader];
  int32_t ints[kInts];
};

// Threads that a block needs to copy a state.
constexpr int kCopyThreads = kHeader > kInts ? kHeader : kInts;

// By the block's first threads; a barrier must follow.
template <typename S>
__device__ __forceinline__ void LoadState(const S* floats, const int32_t* ints,
                                          StateCopy<S>& copy) {
  if (threadIdx.x < kHeader) copy.header[threadIdx.x] = floats[threadIdx.x];
  if (threadIdx.x < kInts) copy.ints[threadIdx.x] = ints[threadIdx.x];
}

// Likewise; a barrier must come before it.
template <typename S>
__device__ __forceinline__ void StoreState(const StateCopy<S>& copy, S* floats, int32_t* ints) {
  if (threadIdx.x < kHeader) floats[threadIdx.x] = copy.header[threadIdx.x];
  if (threadIdx.x < kInts) ints[threadIdx.x] = copy.ints[threadIdx.x];
}

// Derives the groups first, first + stride, ...: each a thread's, whose row is loaded at once.
template <typename S>
__device__ __forceinline__ void DeriveGroups(const StepDecision& decision, int64_t first,
                                             int64_t stride, int64_t num_groups, S* floats) {
  for (int64_t group = first; group < num_groups; group += stride) {
    auto* own = reinterpret_cast<Vector<S>*>(floats + RowStart(group));
    S row[kRow];
#pragma unroll
    for (int i = 0; i < kRow; ++i) row[i] = own[i / kVector].x[i % kVector];
    DeriveGroup(decision, row);
#pragma unroll
    for (int i = 0; i < kRow; ++i) floats[RowStart(group) + i] = row[i];
  }
}

}  // namespace jaxrenaissance
