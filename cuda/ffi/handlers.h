// What a module has for Python to register with XLA: its FFI handlers, and the type of their state.
#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jaxrenaissance {

struct HandlerEntry {
  const char* target;
  const char* stage;  // "instantiate" or "execute"
  XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*);
};

// The type of what a module's instantiate handlers hand to the others.
struct StateType {
  const char* name;
  XLA_FFI_TypeId* id;  // XLA fills it in when the type is registered
  const XLA_FFI_TypeInfo* info;
};

std::vector<HandlerEntry> CpuHandlers();
std::vector<HandlerEntry> CudaHandlers();
// How often a handler has launched its kernels. XLA replays what it has captured without handlers.
int64_t CudaExecutions();

StateType CpuState();
StateType CudaState();

// The instruction set that the CPU loops use here.
const char* CpuInstructionSet();

}  // namespace jaxrenaissance
