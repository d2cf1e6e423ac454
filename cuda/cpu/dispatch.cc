// Which compiled copy of the loops this processor gets.
#include "cpu/kernels.h"

namespace jaxrenaissance {

const CpuKernels& CpuKernels_baseline();
#if defined(__x86_64__)
const CpuKernels& CpuKernels_avx2();
const CpuKernels& CpuKernels_avx512();
#endif

const CpuKernels& BestCpuKernels() {
#if defined(__x86_64__)
  static const CpuKernels& best =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
          ? CpuKernels_avx512()
      : __builtin_cpu_supports("avx2") ? CpuKernels_avx2()
                                       : CpuKernels_baseline();
  return best;
#else
  return CpuKernels_baseline();
#endif
}

}  // namespace jaxrenaissance
