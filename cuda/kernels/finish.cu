// finish: partials to norms, a block a segment or some; the last block to end adds up the segments,
// and advances the scalars.
#include "core/prologue.h"
#include "core/reduction.h"
#include "kernels/launch.h"
#include "kernels/preload.cuh"
#include "kernels/state_copy.cuh"
#include "kernels/tuning.h"

namespace jaxrenaissance {
namespace {

constexpr int kWarps = kThreads / 32;
static_assert(kThreads >= kCopyThreads);

// The sum of get(0 … n - 1), pairwise in order, in thread 0.
template <typename F>
__device__ double BlockSum(int64_t n, const F& get) {
  // Each thread has a stretch of a power of two, so that its sum is a node of the tree.
  int64_t stretch = 1;
  while (stretch * kThreads < n) stretch *= 2;
  const int64_t low = threadIdx.x * stretch;
  const int64_t high = low + stretch < n ? low + stretch : n;
  const auto sum_of_eight = [&](int64_t i) {  // loads in flight together
    double x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = i + j < high ? get(i + j) : 0.0;
    return SumOfEight(x);
  };
  double sum = 0.0;
  if (stretch <= 8) {
    sum = sum_of_eight(low);
  } else {
    PairwiseSum pairwise;
    for (int64_t i = low; i < high; i += 8) pairwise.Push(sum_of_eight(i));
    sum = pairwise.Total();
  }
#pragma unroll
  for (int h = 1; h < 32; h *= 2) sum += __shfl_down_sync(~0u, sum, h);
  __shared__ double warps[kWarps];
  __syncthreads();  // the sum before has been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  static_assert(kWarps == 8);
  return SumOfEight(warps);
}

// A segment, of those of all workspaces in order.
struct SegmentPlace {
  int workspace;
  int64_t segment;
};

__device__ __forceinline__ SegmentPlace FindSegment(const Workspaces& all, int64_t number) {
  int k = 0;
  while (number >= all.each[k].num_segments) number -= all.each[k++].num_segments;
  return {k, number};
}

// Where a segment's sum is kept: its first partial, once these have been added up.
__device__ __forceinline__ double* SumOfSegment(const Workspaces& all, SegmentPlace place,
                                                int64_t member) {
  const Workspace& own = all.each[place.workspace];
  int32_t* data = own.data + member * own.stride;
  return PartialsOf(data, own.num_segments) + data[place.segment];
}

// The blocks of a member, each with as many segments: one, unless there are very many.
struct Share {
  int64_t blocks;
  int64_t segments;
};

__host__ __device__ __forceinline__ Share ShareOf(int64_t total) {
  const int64_t segments = total > kFinishBlocks ? (total + kFinishBlocks - 1) / kFinishBlocks : 1;
  const int64_t blocks = (total + segments - 1) / segments;
  return {blocks > 0 ? blocks : 1, segments};
}

// Adds up the block's segments. Whether this was the last block of its member to do so.
template <typename S>
__device__ bool FinishSegments(const Workspaces& all, int64_t total, int64_t block, int64_t member,
                               S* floats) {
  const Share share = ShareOf(total);
  const int64_t low = block * share.segments;
  for (int64_t number = low; number < low + share.segments && number < total; ++number) {
    const SegmentPlace place = FindSegment(all, number);
    const Workspace& own = all.each[place.workspace];
    const int32_t* first = own.data + member * own.stride + place.segment;
    double* partials = SumOfSegment(all, place, member);
    const int64_t count = first[1] - first[0];
    if (count > 1) {
      const double sum = BlockSum(count, [&](int64_t i) { return partials[i]; });
      __syncthreads();  // all partials have been read before the first is overwritten
      if (threadIdx.x == 0) *partials = sum;
    }
  }
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    __threadfence();
    // In the state's own scalars, which are never uninitialised, unlike a workspace of XLA's.
    auto* blocks = reinterpret_cast<uint32_t*>(floats + kBlocks);
    is_last = atomicAdd(blocks, 1u) + 1 == static_cast<uint32_t>(share.blocks);
    if (is_last) *blocks = 0;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// The sum over segments [low, high) of all workspaces, in thread 0.
__device__ double SumOfSegments(const Workspaces& all, int64_t low, int64_t high, int64_t member) {
  return BlockSum(high - low, [&](int64_t i) {
    // Written by other blocks: past the first-level cache.
    return __ldcg(SumOfSegment(all, FindSegment(all, low + i), member));
  });
}

// What is by segment of the gradients' arenas; null where nobody asked.
template <typename S>
struct BySegment {
  S* norms[kMaxArenas];
  S* ratios[kMaxArenas];
  const int32_t* groups[kMaxArenas];
};

// The trust ratio of each segment of the gradients' arenas. Workspaces of weights, and of products,
// follow those of the gradients in the same order.
template <typename S>
__device__ void WriteRatios(const Workspaces& all, TrustRule rule, int64_t segments, int64_t member,
                            const S* header, const S* floats, const BySegment<S>& by) {
  for (int64_t i = threadIdx.x; i < segments; i += kThreads) {
    const SegmentPlace place = FindSegment(all, i);
    const auto sum = [&](int series) {
      const SegmentPlace own = {place.workspace + series * all.gradients, place.segment};
      return __ldcg(SumOfSegment(all, own, member));
    };
    const TrustSums sums = {sum(1), sum(0), rule == TrustRule::kLarsAsOptax ? sum(2) : 0.0};
    const S* row = floats + RowStart(by.groups[place.workspace][place.segment]);
    by.ratios[place.workspace][member * all.each[place.workspace].num_segments + place.segment] =
        static_cast<S>(TrustRatio(rule, sums, header, row));
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads)
    FinishKernel(S* floats, int32_t* ints, int64_t num_groups, const Workspaces all,
                 const int64_t gradient_segments, const int64_t weight_segments, int64_t total,
                 TrustRule rule, const BySegment<S> by) {
  const int64_t blocks = ShareOf(total).blocks;
  const int64_t member = blockIdx.x / blocks, block = blockIdx.x % blocks;
  floats += member * RowStart(num_groups);
  ints += member * kInts;
  __shared__ StateCopy<S> state;
  LoadState(floats, ints, state);
  if (block == 0) {
    // They follow from the counters alone, so that the last block need not do it at the end.
    __syncthreads();
    DeriveGroups(DecideStep(state.ints), threadIdx.x, kThreads, num_groups, floats);
    __syncthreads();
  }
  if (!FinishSegments(all, total, block, member, floats)) return;

  const double gradients = SumOfSegments(all, 0, gradient_segments, member);
  const int64_t end = gradient_segments + weight_segments;
  const bool has_weights = all.count > all.gradients;
  const double weights = has_weights ? SumOfSegments(all, gradient_segments, end, member) : 0.0;
  __shared__ double divisor;
  if (threadIdx.x == 0) {
    divisor = AdvanceState(DecideStep(state.ints), gradients, state.header, state.ints);
    if (has_weights) state.header[kParamNorm] = static_cast<S>(SquareRoot(weights));
    state.header[kBlocks] = S(0);  // blocks may have been counted when it was loaded
  }
  __syncthreads();
  StoreState(state, floats, ints);
  if (by.norms[0] != nullptr) {
    for (int64_t i = threadIdx.x; i < gradient_segments; i += kThreads) {
      const SegmentPlace place = FindSegment(all, i);
      const double sum = __ldcg(SumOfSegment(all, place, member));
      by.norms[place.workspace][member * all.each[place.workspace].num_segments + place.segment] =
          static_cast<S>(SquareRoot(sum) / divisor);
    }
  }
  if (rule != TrustRule::kNone)
    WriteRatios(all, rule, gradient_segments, member, state.header, floats, by);
}

template <typename S>
__global__ void __launch_bounds__(kThreads)
    FinishUpdateKernel(S* floats, int64_t num_groups, const Workspaces all, int64_t total) {
  const int64_t blocks = ShareOf(total).blocks;
  const int64_t member = blockIdx.x / blocks, block = blockIdx.x % blocks;
  floats += member * RowStart(num_groups);
  if (!FinishSegments(all, total, block, member, floats)) return;
  const double sum = SumOfSegments(all, 0, total, member);
  if (threadIdx.x == 0)
    floats[kUpdateNorm] = floats[kApply] == S(0) ? S(0) : static_cast<S>(SquareRoot(sum));
}

template <typename S>
__global__ void __launch_bounds__(kThreads)
    FinishRatiosKernel(S* floats, int64_t num_groups, const Workspaces all, int64_t segments,
                       int64_t total, const BySegment<S> by) {
  const int64_t blocks = ShareOf(total).blocks;
  const int64_t member = blockIdx.x / blocks, block = blockIdx.x % blocks;
  floats += member * RowStart(num_groups);
  if (!FinishSegments(all, total, block, member, floats)) return;
  WriteRatios(all, TrustRule::kLamb, segments, member, floats, floats, by);
}

int64_t SegmentsOf(const Workspaces& all, int low, int high) {
  int64_t sum = 0;
  for (int k = low; k < high; ++k) sum += all.each[k].num_segments;
  return sum;
}

template <typename S>
cudaError_t Launch(const FinishOperands& operands, cudaStream_t stream) {
  const Workspaces& all = operands.workspaces;
  const int64_t total = SegmentsOf(all, 0, all.count);
  const int64_t segments = SegmentsOf(all, 0, all.gradients);
  const int64_t blocks = ShareOf(total).blocks * operands.members;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks));
  S* floats = static_cast<S*>(operands.floats);
  BySegment<S> by{};
  for (int k = 0; k < kMaxArenas; ++k) {
    by.norms[k] = static_cast<S*>(operands.norms[k]);
    by.ratios[k] = static_cast<S*>(operands.ratios[k]);
    by.groups[k] = operands.groups[k];
  }
  switch (operands.kind) {
    case FinishKind::kGradients: {
      const auto [low, high] = WeightsOf(all);
      FinishKernel<<<grid, kThreads, 0, stream>>>(floats, operands.ints, operands.num_groups, all,
                                                  segments, SegmentsOf(all, low, high), total,
                                                  operands.trust, by);
      break;
    }
    case FinishKind::kUpdateNorm:
      FinishUpdateKernel<<<grid, kThreads, 0, stream>>>(floats, operands.num_groups, all, total);
      break;
    case FinishKind::kRatios:
      FinishRatiosKernel<<<grid, kThreads, 0, stream>>>(floats, operands.num_groups, all, segments,
                                                        total, by);
      break;
  }
  return cudaPeekAtLastError();
}

}  // namespace

cudaError_t LaunchFinish(const FinishOperands& operands, cudaStream_t stream) {
  return (operands.is_double ? Launch<double> : Launch<float>)(operands, stream);
}

cudaError_t PreloadFinish() {
  return PreloadKernels(FinishKernel<float>, FinishKernel<double>, FinishUpdateKernel<float>,
                        FinishUpdateKernel<double>, FinishRatiosKernel<float>,
                        FinishRatiosKernel<double>);
}

}  // namespace jaxrenaissance
