// prologue: one block a state, one thread a group.
#include "core/prologue.h"
#include "kernels/launch.h"
#include "kernels/preload.cuh"

namespace jaxrenaissance {
namespace {

constexpr int kPrologueThreads = 32;

template <typename S>
__global__ void PrologueKernel(S* floats, int32_t* ints, int64_t num_groups) {
  floats += blockIdx.x * RowStart(num_groups);
  ints += static_cast<int64_t>(blockIdx.x) * kInts;
  const StepDecision decision = DecideStep(ints);
  __syncthreads();  // every thread has read the counters before one advances them
  if (threadIdx.x == 0) AdvanceState(decision, kNoNorm, floats, ints);
  for (int64_t group = threadIdx.x; group < num_groups; group += kPrologueThreads)
    DeriveGroup(decision, floats + RowStart(group));
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
