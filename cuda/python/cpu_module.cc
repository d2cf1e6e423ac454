// The module _jaxrenaissance_cpu. jaxrenaissance/native is the only place that imports it.
#include "ffi/scalar_slots.h"
#include "python/module.h"

namespace jaxrenaissance {

pybind11::dict CpuBuildInfo() {
  pybind11::dict info = CommonBuildInfo();
  info["instruction_set"] = CpuInstructionSet();
  return info;
}

PYBIND11_MODULE(_jaxrenaissance_cpu, module) {
  module.doc() = "XLA FFI handlers of jaxrenaissance for the CPU";
  module.def("handlers", [] { return Capsules(CpuHandlers()); });
  module.def("state_types", [] { return Capsules(CpuState()); });
  module.def("build_info", &CpuBuildInfo);
  module.def("scalar_slots", [] { return Numbers(ScalarSlots()); });
}

}  // namespace jaxrenaissance
