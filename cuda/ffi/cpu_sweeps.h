// A handler's work on XLA's thread pool: in chunks of the arena, or in tasks of a few partials of a
// reduction. The program outlives its executions, so that the work may refer to it.
#pragma once

#include <algorithm>
#include <array>

#include "cpu/parallel.h"
#include "ffi/calls.h"
#include "ffi/cpu_program.h"

namespace jaxrenaissance {

inline ffi::Future Failed(const ffi::Error& error) {
  ffi::Promise promise;
  promise.SetError(error);
  return ffi::Future(promise);
}

// Calls f(member, segment, low, high) for each stretch [low, high) of a segment within the chunk.
template <typename F>
void ForEachStretch(const CpuProgram& program, int64_t chunk, const F& f) {
  const Layout& layout = program.layout;
  const int64_t chunks = program.chunks_of_member();
  const int64_t member = chunk / chunks;
  const int64_t low = (chunk % chunks) * kChunk;
  const int64_t high = std::min(low + kChunk, layout.size);
  for (int64_t i = program.chunk_segments[static_cast<size_t>(chunk % chunks)];
       i < layout.num_segments; ++i) {
    const Segment& segment = layout.segments[i];
    if (segment.start >= high) return;
    const int64_t from = std::max(low, segment.start);
    const int64_t to = std::min(high, segment.start + segment.size);
    if (from < to) f(member, segment, from, to);
  }
}

// The sums of one chunk, for each workspace.
using ChunkSums = std::array<double, kMaxSums>;

// Calls sum(member, segment, low, high) for each chunk of core/reduction.h, adds up what it returns
// to partials, and writes these to the workspaces that are there.
template <typename F>
ffi::Future ForEachPartial(ffi::ThreadPool pool, const CpuProgram& program,
                           const std::array<Workspace, kMaxSums>& workspaces, const F& sum) {
  const int64_t tasks = program.tasks_of_member();
  const Sweep sweep{pool, tasks * program.layout.members, Work::kHeavy};
  return ForEachChunk(sweep, [&program, workspaces, sum, tasks](int64_t task) {
    const Layout& layout = program.layout;
    const std::vector<int64_t>& firsts = program.first_partials;
    const int64_t partials = firsts.back();
    const int64_t member = task / tasks;
    int64_t partial = task % tasks * kPartialsATask;
    const int64_t end = std::min(partial + kPartialsATask, partials);
    auto i = static_cast<size_t>(program.task_segments[static_cast<size_t>(task % tasks)]);
    for (; partial < end; ++partial) {
      while (firsts[i + 1] <= partial) ++i;
      const Segment& segment = layout.segments[i];
      double sums[kMaxSums][kPartialChunks] = {};
      const int64_t first = (partial - firsts[i]) * kPartialElements;
      for (int64_t c = 0; c < kPartialChunks; ++c) {
        const int64_t low = first + c * kChunkElements;
        const int64_t high = std::min(low + kChunkElements, segment.size);
        if (low >= high) break;
        const ChunkSums own = sum(member, segment, segment.start + low, segment.start + high);
        for (int k = 0; k < kMaxSums; ++k) sums[k][c] = own[static_cast<size_t>(k)];
      }
      for (int k = 0; k < kMaxSums; ++k) {
        const Workspace& workspace = workspaces[static_cast<size_t>(k)];
        if (workspace.data == nullptr) continue;
        int32_t* words = workspace.data + member * workspace.stride;
        PartialsOf(words, layout.num_segments)[partial] = SumOfEight(sums[k]);
        if (partial == firsts[i]) words[i] = static_cast<int32_t>(partial);
        if (partial + 1 == partials) words[layout.num_segments] = static_cast<int32_t>(partials);
      }
    }
  });
}

}  // namespace jaxrenaissance
