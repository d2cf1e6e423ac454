// The module _jaxrenaissance_cpu. jaxrenaissance/native is the only place that imports it.
#include "python/module.h"

namespace jaxrenaissance {

PYBIND11_MODULE(_jaxrenaissance_cpu, module) {
  module.doc() = "XLA FFI handlers of jaxrenaissance for the CPU";
  module.def("handlers", [] { return Capsules(CpuHandlers()); });
  module.def("build_info", &CommonBuildInfo);
  module.def("scalar_slots", [] { return Numbers(ScalarSlots()); });
}

}  // namespace jaxrenaissance
