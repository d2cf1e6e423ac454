// The list of the CPU's handlers, and the type of what they keep.
#include "cpu/kernels.h"
#include "ffi/cpu_program.h"
#include "ffi/handlers.h"

namespace jaxrenaissance {

ffi::TypeId CpuProgram::id = XLA_FFI_UNKNOWN_TYPE_ID;

namespace {

constexpr ffi::TypeInfo kProgramInfo = ffi::MakeTypeInfo<CpuProgram>();

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate<CpuProgram>, BindInstantiate());

}  // namespace

std::vector<HandlerEntry> CpuHandlers() {
  std::vector<HandlerEntry> entries;
  for (const auto targets :
       {CpuUpdateTargets, CpuNormsTargets, CpuPackingTargets, CpuScalarsTargets}) {
    for (const CpuTarget& target : targets()) {
      entries.push_back({target.name, "instantiate", kInstantiate});
      entries.push_back({target.name, "execute", target.execute});
    }
  }
  return entries;
}

StateType CpuState() { return {"jaxrenaissance_cpu_program", &CpuProgram::id, &kProgramInfo}; }

const char* CpuInstructionSet() { return BestCpuKernels().name; }

}  // namespace jaxrenaissance
