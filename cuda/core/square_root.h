// IEEE square roots, the same bits on host and device.
#pragma once

#include "core/config.h"

namespace jaxrenaissance {

JR_HD float SquareRoot(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

JR_HD double SquareRoot(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

}  // namespace jaxrenaissance
