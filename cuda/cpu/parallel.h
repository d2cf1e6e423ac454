// Work in chunks on XLA's own thread pool. The calling thread takes part and returns a future:
// nothing ever blocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/denormals.h"
#include "xla/ffi/api/ffi.h"

namespace jaxrenaissance {

// How many chunks there must be for each thread that takes part: waking one costs about as much as
// these take. Light work only reads, or has a few operations an element.
enum class Work : int64_t { kLight = 8, kHeavy = 4 };

// The order in which a thread takes the chunks of its share.
enum class Order { kForwards, kBackwards };

struct Sweep {
  xla::ffi::ThreadPool& pool;
  int64_t count;  // of chunks
  Work work;
  Order order = Order::kForwards;
};

namespace internal {

// Chunks in as many shares as there are threads. A thread takes those of its own share, and then
// what the others have left, so that one that starts late delays nobody.
template <typename Body>
struct Chunks {
  Chunks(Body body, int64_t count, int64_t threads, Order order, xla::ffi::CountDownPromise done)
      : body(std::move(body)),
        count(count),
        order(order),
        taken(static_cast<size_t>(threads)),
        done(std::move(done)) {}

  void Run(int64_t own) {
    int64_t finished = 0;
    {
      // Ours alone: counting down may run what XLA does next, on this thread.
      KeepSubnormals keep;
      const auto threads = static_cast<int64_t>(taken.size());
      for (int64_t k = 0; k < threads; ++k) finished += Take((own + k) % threads);
    }
    if (finished > 0) done.CountDown(static_cast<size_t>(finished));
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  // Works on what is left of a share; how many chunks that were.
  int64_t Take(int64_t share) {
    const auto threads = static_cast<int64_t>(taken.size());
    const int64_t low = count * share / threads, high = count * (share + 1) / threads;
    std::atomic<int64_t>& next = taken[static_cast<size_t>(share)].value;
    int64_t finished = 0;
    for (int64_t i = next.fetch_add(1); i < high - low; i = next.fetch_add(1), ++finished)
      body(order == Order::kForwards ? low + i : high - 1 - i);
    return finished;
  }

  const Body body;
  const int64_t count;
  const Order order;
  std::vector<Counter> taken;
  xla::ffi::CountDownPromise done;
};

}  // namespace internal

// Calls body(chunk) for every chunk of [0, count). The future becomes available when all are done.
// `body` must hold all it uses by value: it outlives the caller's frame.
template <typename Body>
xla::ffi::Future ForEachChunk(const Sweep& sweep, Body body) {
  xla::ffi::CountDownPromise done(std::max<int64_t>(sweep.count, 1));
  xla::ffi::Future future(done);
  if (sweep.count == 0) {
    done.CountDown(1);
    return future;
  }
  const int64_t threads = std::clamp<int64_t>(sweep.count / static_cast<int64_t>(sweep.work), 1,
                                              std::max<int64_t>(sweep.pool.num_threads(), 1));
  auto chunks = std::make_shared<internal::Chunks<Body>>(std::move(body), sweep.count, threads,
                                                         sweep.order, std::move(done));
  for (int64_t i = 1; i < threads; ++i) sweep.pool.Schedule([chunks, i] { chunks->Run(i); });
  chunks->Run(0);
  return future;
}

}  // namespace jaxrenaissance
