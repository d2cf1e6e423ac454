// Loading kernels ahead of their first launch.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

namespace jaxrenaissance {

// Loads the kernels on the current device.
template <typename... Kernels>
cudaError_t PreloadKernels(Kernels... kernels) {
  const void* functions[] = {reinterpret_cast<const void*>(kernels)...};
  for (const void* function : functions) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, function);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Calls each until one fails.
inline cudaError_t FirstError(std::initializer_list<cudaError_t (*)()> preloads) {
  for (const auto preload : preloads) {
    if (const cudaError_t error = preload(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jaxrenaissance
