// Every FFI handler of a module, for Python to register.
#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jaxrenaissance {

struct HandlerEntry {
  const char* target;
  const char* stage;  // "initialize" or "execute"
  XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*);
};

std::vector<HandlerEntry> CpuHandlers();
std::vector<HandlerEntry> CudaHandlers();

// The instruction set that the CPU loops use here.
const char* CpuInstructionSet();

}  // namespace jaxrenaissance
