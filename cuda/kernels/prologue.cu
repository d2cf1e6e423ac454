// prologue: one block a state. A warp advances its counters and header; another derives the groups.
#include "core/prologue.h"
#include "kernels/launch.h"
#include "kernels/preload.cuh"
#include "kernels/state_copy.cuh"

namespace jaxrenaissance {
namespace {

constexpr int kWarp = 32;
constexpr int kPrologueThreads = 2 * kWarp;
static_assert(kPrologueThreads >= kCopyThreads);

template <typename S>
__global__ void __launch_bounds__(kPrologueThreads)
    PrologueKernel(S* floats, int32_t* ints, int64_t num_groups) {
  floats += blockIdx.x * RowStart(num_groups);
  ints += static_cast<int64_t>(blockIdx.x) * kInts;
  __shared__ StateCopy<S> state;
  LoadState(floats, ints, state);
  __syncthreads();
  const StepDecision decision = DecideStep(state.ints);
  __syncthreads();  // every thread has read the counters before one advances them
  if (threadIdx.x == 0) AdvanceState(decision, kNoNorm, state.header, state.ints);
  if (threadIdx.x >= kWarp)
    DeriveGroups(decision, threadIdx.x - kWarp, kPrologueThreads - kWarp, num_groups, floats);
  __syncthreads();
  StoreState(state, floats, ints);
}

}  // namespace

cudaError_t LaunchPrologue(bool is_double, void* floats, int32_t* ints, int64_t num_groups,
                           int64_t members, cudaStream_t stream) {
  if (members == 0) return cudaSuccess;
  if (members > INT32_MAX) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(members));
  if (is_double) {
    PrologueKernel<<<grid, kPrologueThreads, 0, stream>>>(static_cast<double*>(floats), ints,
                                                          num_groups);
  } else {
    PrologueKernel<<<grid, kPrologueThreads, 0, stream>>>(static_cast<float*>(floats), ints,
                                                          num_groups);
  }
  return cudaPeekAtLastError();
}

cudaError_t PreloadPrologue() {
  return PreloadKernels(PrologueKernel<float>, PrologueKernel<double>);
}

}  // namespace jaxrenaissance
