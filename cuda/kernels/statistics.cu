// statistics: the first leaf with a non-finite gradient.
#include <type_traits>

#include "core/scalars.h"
#include "kernels/launch.h"
#include "kernels/preload.cuh"
#include "kernels/segment_table.cuh"
#include "kernels/vector.cuh"

namespace jaxrenaissance {
namespace {

// The flag lies in the state's own counters, which are never uninitialised, unlike a workspace of
// XLA's.
template <typename T, int kVectors, bool kFromArena, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    StatisticsKernel(const T* gradient, int64_t gradient_stride, int64_t size, int64_t members,
                     int32_t first_leaf, int32_t* ints,
                     const __grid_constant__ SegmentTable<kCapacity> table) {
  const BlockPlace block = FindBlock(table, members);
  bool bad = false;
  // Looks at vectors of one segment, kTile apart: all loads go out before the first is used.
  const auto check = [&](const Place& place, int64_t position, auto vectors) {
    constexpr int kCount = decltype(vectors)::value;
    const auto look = [&](const auto* data) {
      Vector<std::decay_t<decltype(*data)>> raw[kCount]{};
#pragma unroll
      for (int u = 0; u < kCount; ++u) LoadVector(data + u * kTile, place.count, raw[u]);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) bad |= IsNonFinite(raw[u].x[i]);
      }
    };
    if constexpr (kFromArena) {
      look(gradient + block.member * gradient_stride + position);
    } else {
      WithLeaf<T>(table, place, block.member, look);
    }
    // Where every gradient is NaN, most threads see that the flag is down already: no queue of
    // atomics.
    int32_t* first_bad = ints + block.member * kInts + kFirstBad;
    const int32_t leaf = first_leaf + static_cast<int32_t>(place.tag());
    if (bad && *static_cast<volatile int32_t*>(first_bad) > leaf) atomicMin(first_bad, leaf);
  };

  const int64_t first = VectorStart<kVectors>(block.tile);
  const int64_t last = VectorStart<kVectors>(block.tile, kVectors - 1);
  if (first >= size) return;
  const Place place = FindPlace<T>(table, block.tile, first);
  if (last < size) {
    const Place end = FindPlace<T>(table, block.tile, last);
    if (place.count == kVector && end.count == kVector && place.segment == end.segment) {
      check(place, first, std::integral_constant<int, kVectors>{});
      return;
    }
  }
  for (int u = 0; u < kVectors; ++u) {
    const int64_t position = VectorStart<kVectors>(block.tile, u);
    if (position >= size) return;
    const Place own = FindPlace<T>(table, block.tile, position);
    bad = false;
    if (own.count > 0) check(own, position, std::integral_constant<int, 1>{});
  }
}

template <typename T, int kVectors>
cudaError_t LaunchVectors(const Layout& layout, const GradientOperands& gradients,
                          int32_t first_leaf, int32_t* ints, const TableCache& tables,
                          cudaStream_t stream) {
  const T* arena = static_cast<const T*>(gradients.arena);
  return ForEachLaunch<T, kVectors>(
      layout, gradients.leaves, Tag::kLeaf, tables, [&](dim3 grid, const auto& table) {
        if (gradients.from_arena) {
          StatisticsKernel<T, kVectors, true><<<grid, kThreads, 0, stream>>>(
              arena, gradients.arena_stride, layout.size, layout.members, first_leaf, ints, table);
        } else {
          StatisticsKernel<T, kVectors, false><<<grid, kThreads, 0, stream>>>(
              nullptr, 0, layout.size, layout.members, first_leaf, ints, table);
        }
      });
}

template <typename T>
cudaError_t Launch(const Layout& layout, const GradientOperands& gradients, int32_t first_leaf,
                   int32_t* ints, const TableCache& tables, cudaStream_t stream) {
  const bool small = layout.size < layout.num_segments * kStatisticsVectors * kTile;
  return (small ? LaunchVectors<T, kSmallStatisticsVectors>
                : LaunchVectors<T, kStatisticsVectors>)(layout, gradients, first_leaf, ints, tables,
                                                        stream);
}

template <typename T, int kVectors, bool kFromArena>
cudaError_t PreloadOf() {
  return PreloadKernels(StatisticsKernel<T, kVectors, kFromArena, kSmallTable>,
                        StatisticsKernel<T, kVectors, kFromArena, kMediumTable>,
                        StatisticsKernel<T, kVectors, kFromArena, kLargeTable>);
}

template <typename T>
cudaError_t Preload() {
  return FirstError(
      {PreloadOf<T, kStatisticsVectors, true>, PreloadOf<T, kStatisticsVectors, false>,
       PreloadOf<T, kSmallStatisticsVectors, true>, PreloadOf<T, kSmallStatisticsVectors, false>});
}

}  // namespace

cudaError_t LaunchStatistics(const Layout& layout, const GradientOperands& gradients,
                             int32_t first_leaf, int32_t* ints, const TableCache& tables,
                             cudaStream_t stream) {
  return (layout.is_double ? Launch<double> : Launch<float>)(layout, gradients, first_leaf, ints,
                                                             tables, stream);
}

cudaError_t PreloadStatistics() {
  const cudaError_t error = Preload<float>();
  return error != cudaSuccess ? error : Preload<double>();
}

}  // namespace jaxrenaissance
