// What the CPU's handlers keep with a compiled program, and how they are bound to it.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/handlers.h"
#include "ffi/program.h"

namespace jaxrenaissance {

// Elements a chunk: large enough that taking one costs nothing, small enough that threads end
// together.
constexpr int64_t kChunk = 1 << 14;
// A task of a reduction is as many partials as a chunk has, at most.
constexpr int64_t kPartialsATask = kChunk / kPartialElements;

struct CpuProgram : Program {
  static ffi::TypeId id;

  std::vector<int64_t> chunk_segments;  // where each chunk of a member's arena begins
  std::vector<int64_t> task_segments;   // and each task of a reduction

  int64_t chunks_of_member() const { return static_cast<int64_t>(chunk_segments.size()); }
  int64_t tasks_of_member() const { return static_cast<int64_t>(task_segments.size()); }
  int64_t NumChunks() const { return layout.members * chunks_of_member(); }

  void Prepare() {
    if (!has_layout) return;
    for (int64_t low = 0; low < layout.size; low += kChunk)
      chunk_segments.push_back(FindSegment(layout.segments, 0, layout.num_segments, low));
    int64_t segment = 0;
    for (int64_t partial = 0; partial < first_partials.back(); partial += kPartialsATask) {
      while (first_partials[static_cast<size_t>(segment) + 1] <= partial) ++segment;
      task_segments.push_back(segment);
    }
  }
};

inline auto BindCpu() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Ctx<ffi::State<CpuProgram>>()
      .RemainingArgs()
      .RemainingRets();
}

// For what is too little work for a pool.
inline auto BindCpuInline() {
  return ffi::Ffi::Bind().Ctx<ffi::State<CpuProgram>>().RemainingArgs().RemainingRets();
}

// A target and the handler that executes it.
struct CpuTarget {
  const char* name;
  XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*);
};

std::vector<CpuTarget> CpuUpdateTargets();
std::vector<CpuTarget> CpuNormsTargets();
std::vector<CpuTarget> CpuPackingTargets();
std::vector<CpuTarget> CpuScalarsTargets();

}  // namespace jaxrenaissance
