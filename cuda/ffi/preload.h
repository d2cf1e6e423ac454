// Loading an op's kernels on the devices of this process before any of them is launched, so that
// lazy loading never falls into a stream capture.
//
// It is done when XLA makes a program. FFI has a stage of its own for it, which knows the device;
// but for a handler of that stage XLA collects the addresses of all operands on every execution,
// also of a captured step: on an H200, 0.2 ms of the host's time with 2000 leaves.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace jaxrenaissance {

constexpr int kMostDevices = 64;

// The devices on which this process has a context already, a bit each. To ask the runtime would
// make contexts on all others.
inline uint64_t DevicesInUse() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return 0;  // XLA compiles for devices of another machine
  const auto count = reinterpret_cast<int (*)(int* count)>(dlsym(driver, "cuDeviceGetCount"));
  const auto state = reinterpret_cast<int (*)(int device, unsigned* flags, int* active)>(
      dlsym(driver, "cuDevicePrimaryCtxGetState"));
  int num_devices = 0;
  uint64_t devices = 0;
  if (count != nullptr && state != nullptr && count(&num_devices) == 0) {
    for (int device = 0; device < std::min(num_devices, kMostDevices); ++device) {
      unsigned flags = 0;
      int active = 0;
      if (state(device, &flags, &active) == 0 && active != 0) devices |= uint64_t{1} << device;
    }
  }
  dlclose(driver);
  return devices;
}

// What cannot be loaded now is loaded by its first launch, which says so where it fails.
template <cudaError_t (*kPreload)()>
void PreloadOnDevices() {
  static std::mutex mutex;
  static uint64_t loaded = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const uint64_t wanted = DevicesInUse() & ~loaded;
  if (wanted == 0) return;
  const auto load = [wanted] {
    for (int device = 0; device < kMostDevices; ++device) {
      const uint64_t bit = uint64_t{1} << device;
      if ((wanted & bit) == 0 || cudaSetDevice(device) != cudaSuccess) continue;
      if (kPreload() == cudaSuccess) loaded |= bit;
    }
  };
  try {
    // The current device is a thread's, and here it must stay what it is.
    std::thread(load).join();
  } catch (const std::system_error&) {  // no thread is to be had
  }
}

}  // namespace jaxrenaissance
