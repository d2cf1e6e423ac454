// Which compiled copy of the loops this processor gets.
#include <cstdlib>
#include <cstring>

#include "cpu/kernels.h"

namespace jaxrenaissance {

const CpuKernels& CpuKernels_baseline();
#if defined(__x86_64__)
const CpuKernels& CpuKernels_avx2();
const CpuKernels& CpuKernels_avx512();
#endif

namespace {

// JAXRENAISSANCE_CPU_ISA names a narrower set than the best, so that tests reach each copy.
bool IsWanted(const char* name) {
  const char* wanted = std::getenv("JAXRENAISSANCE_CPU_ISA");
  return wanted == nullptr || std::strcmp(wanted, name) == 0;
}

const CpuKernels& Choose() {
#if defined(__x86_64__)
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && IsWanted("avx512")) return CpuKernels_avx512();
  if (__builtin_cpu_supports("avx2") && IsWanted("avx2")) return CpuKernels_avx2();
#endif
  return CpuKernels_baseline();
}

}  // namespace

const CpuKernels& BestCpuKernels() {
  static const CpuKernels& best = Choose();
  return best;
}

}  // namespace jaxrenaissance
