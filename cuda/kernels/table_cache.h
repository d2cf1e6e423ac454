// What a compiled program keeps of the tables of its launches: all but the leaves' addresses.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/operands.h"

namespace jaxrenaissance {

// Where a segment begins: so many bytes into a leaf.
struct SegmentSource {
  int64_t leaf;
  int64_t offset;
};

inline std::vector<SegmentSource> SourcesOf(const Layout& layout, const Leaves& leaves) {
  std::vector<SegmentSource> sources;
  if (leaves.empty()) return sources;
  sources.reserve(static_cast<size_t>(layout.num_segments));
  for (int64_t i = 0; i < layout.num_segments; ++i) {
    const Segment& segment = layout.segments[i];
    const LeafType type = leaves.forms[segment.leaf].type;
    sources.push_back({segment.leaf, segment.leaf_offset * LeafTypeSize(type)});
  }
  return sources;
}

// What an execution adds to a table: the addresses of segments [first, first + count).
inline void FillData(const std::vector<SegmentSource>& sources, const Leaves& leaves, int64_t first,
                     int64_t count, void** data) {
  for (int64_t i = 0; i < count; ++i) {
    const SegmentSource& source = sources[static_cast<size_t>(first + i)];
    data[i] = static_cast<char*>(leaves.data[static_cast<size_t>(source.leaf)]) + source.offset;
  }
}

// Tables of different types and sizes, in the order of the launches. Made by the program's first
// execution, since only then the leaves' types are known; several devices may execute it at once.
class TableCache {
 public:
  struct Tables {
    std::vector<std::shared_ptr<const void>> launches;  // empty where they cannot be made
    std::vector<std::vector<SegmentSource>> sources;    // of each list of leaves
  };

  // What make() returned the first time.
  template <typename F>
  const Tables& Once(const F& make) const {
    std::call_once(once_, [&] { tables_ = make(); });
    return tables_;
  }

 private:
  mutable std::once_flag once_;
  mutable Tables tables_;
};

// Calls f(capacity, first, count) for each launch, with the smallest capacity that fits, until one
// fails. Only where `large` is true, the largest is among them.
template <int kSmall, int kMedium, int kLarge, typename F>
cudaError_t ForEachCapacity(int64_t num_segments, bool large, const F& f) {
  const int64_t most = large ? kLarge : kMedium;
  // A layout without segments still has padding to look after: one launch with an empty table.
  for (int64_t first = 0; first == 0 || first < num_segments; first += most) {
    const int64_t count = std::min(num_segments - first, most);
    cudaError_t error;
    if (count <= kSmall) {
      error = f(std::integral_constant<int, kSmall>{}, first, count);
    } else if (count <= kMedium) {
      error = f(std::integral_constant<int, kMedium>{}, first, count);
    } else {
      error = f(std::integral_constant<int, kLarge>{}, first, count);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Calls launch(table) for each launch. What fill(first, count, table) leaves in a table is kept;
// addresses are added each time: those of lists[k] in the table's column k. An empty list adds
// none. Whether fill could say it all is what it returns.
template <template <int> class Table, int kSmall, int kMedium, int kLarge, typename Fill,
          typename Launch>
cudaError_t LaunchTables(const Layout& layout, std::initializer_list<const Leaves*> lists,
                         const TableCache& cache, const Fill& fill, const Launch& launch) {
  const bool large = layout.members <= 1 || Table<kLarge>::kServesBatches;
  const TableCache::Tables& tables = cache.Once([&] {
    TableCache::Tables made;
    const cudaError_t error = ForEachCapacity<kSmall, kMedium, kLarge>(
        layout.num_segments, large, [&](auto capacity, int64_t first, int64_t count) {
          auto table = std::make_shared<Table<decltype(capacity)::value>>();
          if (!fill(first, count, *table)) return cudaErrorInvalidValue;
          made.launches.push_back(std::move(table));
          return cudaSuccess;
        });
    if (error != cudaSuccess) made.launches.clear();
    for (const Leaves* leaves : lists) made.sources.push_back(SourcesOf(layout, *leaves));
    return made;
  });
  if (tables.launches.empty()) return cudaErrorInvalidValue;
  size_t number = 0;
  return ForEachCapacity<kSmall, kMedium, kLarge>(
      layout.num_segments, large, [&](auto capacity, int64_t first, int64_t count) {
        using Own = Table<decltype(capacity)::value>;
        Own table = *static_cast<const Own*>(tables.launches[number++].get());
        int column = 0;
        for (const Leaves* leaves : lists) {
          if (!leaves->empty()) {
            FillData(tables.sources[static_cast<size_t>(column)], *leaves, first, count,
                     table.Column(column));
          }
          ++column;
        }
        launch(table);
        return cudaPeekAtLastError();
      });
}

}  // namespace jaxrenaissance
