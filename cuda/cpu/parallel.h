// Work in chunks on XLA's own thread pool. The calling thread takes part and returns a future:
// nothing ever blocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "cpu/denormals.h"
#include "xla/ffi/api/ffi.h"

namespace jaxrenaissance {

namespace internal {

template <typename Body>
struct Chunks {
  Chunks(Body body, int64_t count, xla::ffi::CountDownPromise done)
      : body(std::move(body)), count(count), done(std::move(done)) {}

  void Work() {
    int64_t finished = 0;
    {
      // Ours alone: counting down may run what XLA does next, on this thread.
      KeepSubnormals keep;
      for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1), ++finished) body(i);
    }
    if (finished > 0) done.CountDown(static_cast<size_t>(finished));
  }

  const Body body;
  const int64_t count;
  std::atomic<int64_t> next{0};
  xla::ffi::CountDownPromise done;
};

}  // namespace internal

// Calls body(chunk) for every chunk of [0, count). The future becomes available when all are done.
// `body` must hold all it uses by value: it outlives the caller's frame.
template <typename Body>
xla::ffi::Future ForEachChunk(xla::ffi::ThreadPool& pool, int64_t count, Body body) {
  xla::ffi::CountDownPromise done(std::max<int64_t>(count, 1));
  xla::ffi::Future future(done);
  if (count == 0) {
    done.CountDown(1);
    return future;
  }
  auto chunks = std::make_shared<internal::Chunks<Body>>(std::move(body), count, std::move(done));
  const int64_t helpers = std::min<int64_t>(count, pool.num_threads()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([chunks] { chunks->Work(); });
  chunks->Work();
  return future;
}

}  // namespace jaxrenaissance
