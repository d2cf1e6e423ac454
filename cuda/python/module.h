// What the two modules have in common: handing XLA's handlers and the facts of the build to Python.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "ffi/handlers.h"
#include "source_hash.h"
#include "xla/ffi/api/c_api.h"

namespace jaxrenaissance {

// {target name: {stage: capsule}}, as jax.ffi.register_ffi_target takes it.
inline pybind11::dict Capsules(const std::vector<HandlerEntry>& entries) {
  pybind11::dict targets;
  for (const HandlerEntry& entry : entries) {
    pybind11::str target(entry.target);
    if (!targets.contains(target)) targets[target] = pybind11::dict();
    pybind11::dict stages = targets[target];
    stages[entry.stage] = pybind11::capsule(reinterpret_cast<void*>(entry.handler));
  }
  return targets;
}

// {type name: {field: capsule}}, as jax.ffi.register_ffi_type takes them.
inline pybind11::dict Capsules(const StateType& type) {
  pybind11::dict fields, types;
  fields["type_id"] = pybind11::capsule(static_cast<void*>(type.id));
  fields["type_info"] = pybind11::capsule(static_cast<const void*>(type.info));
  types[type.name] = fields;
  return types;
}

inline pybind11::dict Numbers(const std::vector<std::pair<const char*, int>>& entries) {
  pybind11::dict numbers;
  for (const auto& [name, value] : entries) numbers[name] = value;
  return numbers;
}

inline pybind11::dict CommonBuildInfo() {
  pybind11::dict info;
  info["source_hash"] = JR_SOURCE_HASH;
  info["jaxlib"] = JR_JAXLIB_VERSION;
  info["ffi_api"] = pybind11::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "gcc " __VERSION__;
#endif
  return info;
}

}  // namespace jaxrenaissance
