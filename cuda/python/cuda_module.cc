// The module _jaxrenaissance_cuda. jaxrenaissance/native is the only place that imports it. The
// CUDA runtime is linked statically and opens the driver's library when it is first called, so the
// module imports on a machine without one.
#include <cuda_runtime_api.h>

#include "ffi/scalar_slots.h"
#include "python/module.h"

namespace jaxrenaissance {

pybind11::dict CudaBuildInfo() {
  pybind11::dict info = CommonBuildInfo();
  info["cuda"] = pybind11::make_tuple(CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  info["architectures"] = JR_CUDA_ARCHITECTURES;
  return info;
}

// The newest CUDA version that the installed driver supports, (0, 0) where there is no driver.
pybind11::tuple DriverCuda() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess) version = 0;
  return pybind11::make_tuple(version / 1000, version % 1000 / 10);
}

PYBIND11_MODULE(_jaxrenaissance_cuda, module) {
  module.doc() = "XLA FFI handlers of jaxrenaissance for CUDA";
  module.def("handlers", [] { return Capsules(CudaHandlers()); });
  module.def("state_types", [] { return Capsules(CudaState()); });
  module.def("build_info", &CudaBuildInfo);
  module.def("scalar_slots", [] { return Numbers(ScalarSlots()); });
  module.def("driver_cuda", &DriverCuda);
  module.def("executions", &CudaExecutions);
}

}  // namespace jaxrenaissance
