// statistics: the first leaf with a non-finite gradient.
#include "core/scalars.h"
#include "kernels/launch.h"
#include "kernels/preload.cuh"
#include "kernels/segment_table.cuh"
#include "kernels/vector.cuh"

namespace jaxrenaissance {
namespace {

// The flag lies in the state's own counters, which are never uninitialised, unlike a workspace of
// XLA's.
template <typename T, bool kFromArena, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    StatisticsKernel(const T* gradient, int64_t gradient_stride, int64_t size, int64_t members,
                     int32_t first_leaf, int32_t* ints,
                     const __grid_constant__ SegmentTable<kCapacity> table) {
  const BlockPlace block = FindBlock(table, members);
  const int64_t position = VectorStart(block.tile);
  if (position >= size) return;
  const Place place = FindPlace<T>(table, block.tile, position);
  if (place.count == 0) return;
  bool bad = false;
  const auto check = [&](const auto* data) {
    Vector<std::decay_t<decltype(*data)>> raw{};
    LoadVector(data, place.count, raw);
#pragma unroll
    for (int i = 0; i < kVector; ++i) bad |= IsNonFinite(raw.x[i]);
  };
  if constexpr (kFromArena) {
    check(gradient + block.member * gradient_stride + position);
  } else {
    WithLeaf<T>(table, place, block.member, check);
  }
  if (bad) {
    atomicMin(ints + block.member * kInts + kFirstBad,
              first_leaf + static_cast<int32_t>(place.tag()));
  }
}

template <typename T>
cudaError_t Launch(const Layout& layout, const GradientOperands& gradients, int32_t first_leaf,
                   int32_t* ints, cudaStream_t stream) {
  const T* arena = static_cast<const T*>(gradients.arena);
  return ForEachLaunch<T>(layout, gradients.leaves, Tag::kLeaf, [&](dim3 grid, const auto& table) {
    if (gradients.from_arena) {
      StatisticsKernel<T, true><<<grid, kThreads, 0, stream>>>(
          arena, gradients.arena_stride, layout.size, layout.members, first_leaf, ints, table);
    } else {
      StatisticsKernel<T, false><<<grid, kThreads, 0, stream>>>(
          nullptr, 0, layout.size, layout.members, first_leaf, ints, table);
    }
  });
}

template <typename T>
cudaError_t Preload() {
  return PreloadKernels(
      StatisticsKernel<T, true, kSmallTable>, StatisticsKernel<T, true, kMediumTable>,
      StatisticsKernel<T, true, kLargeTable>, StatisticsKernel<T, false, kSmallTable>,
      StatisticsKernel<T, false, kMediumTable>, StatisticsKernel<T, false, kLargeTable>);
}

}  // namespace

cudaError_t LaunchStatistics(const Layout& layout, const GradientOperands& gradients,
                             int32_t first_leaf, int32_t* ints, cudaStream_t stream) {
  return (layout.is_double ? Launch<double> : Launch<float>)(layout, gradients, first_leaf, ints,
                                                             stream);
}

cudaError_t PreloadStatistics() {
  const cudaError_t error = Preload<float>();
  return error != cudaSuccess ? error : Preload<double>();
}

}  // namespace jaxrenaissance
