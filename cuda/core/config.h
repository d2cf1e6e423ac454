// What both backends share: the qualifier of functions that run on the host and on the device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JR_HD __host__ __device__ __forceinline__
#else
// Always inlined: the CPU kernels are compiled once per instruction set, and the linker must not
// replace the copy of one set by that of another.
#define JR_HD __attribute__((always_inline)) inline
#endif
