// statistics: the first leaf with a non-finite gradient.
#include "core/scalars.h"
#include "kernels/preload.cuh"
#include "kernels/tiles.cuh"

namespace jaxrenaissance {
namespace {

// kCapacity == 0: the gradient is an arena. The flag lies in the state's own counters, which are
// never uninitialised.
template <typename T, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    StatisticsKernel(const Sweep sweep, const T* gradient, int64_t gradient_stride,
                     int32_t first_leaf, int32_t* ints,
                     const __grid_constant__ LeafTable<kCapacity> leaves) {
  const BlockPlace block = FindBlock(sweep);
  const Tile tile = LoadTile(sweep.table, block.tile);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t position = VectorStart(block.tile, u);
    if (position >= sweep.size) continue;
    const Place place = FindPlace(tile, sweep.segments, position, block.tile * kTile);
    if (place.count == 0) continue;
    bool bad = false;
    const auto check = [&](const auto* data) {
      Vector<std::decay_t<decltype(*data)>> raw{};
      LoadVector(data, place.count, raw);
#pragma unroll
      for (int i = 0; i < kVector; ++i) bad |= IsNonFinite(raw.x[i]);
    };
    if constexpr (kCapacity == 0) {
      check(gradient + block.member * gradient_stride + position);
    } else {
      WithLeaf<T>(leaves, place.leaf, block.member, place.offset, check);
    }
    if (bad) atomicMin(ints + block.member * kInts + kFirstBad, first_leaf + place.leaf);
  }
}

template <typename T>
cudaError_t Launch(const Sweep& sweep, const Gradients& gradients, int32_t first_leaf,
                   int32_t* ints, cudaStream_t stream) {
  const T* arena = static_cast<const T*>(gradients.arena);
  if (gradients.leaves == nullptr) {
    if (sweep.tiles * sweep.members == 0) return cudaSuccess;
    StatisticsKernel<T, 0><<<GridOf(sweep), kThreads, 0, stream>>>(
        sweep, arena, gradients.arena_stride, first_leaf, ints, {});
    return cudaPeekAtLastError();
  }
  return ForEachLaunch(sweep, *gradients.leaves, [&](const Sweep& part, const auto& table) {
    StatisticsKernel<T>
        <<<GridOf(part), kThreads, 0, stream>>>(part, nullptr, 0, first_leaf, ints, table);
  });
}

template <typename T>
cudaError_t Preload() {
  return PreloadKernels(StatisticsKernel<T, 0>, StatisticsKernel<T, kSmallTable>,
                        StatisticsKernel<T, kMediumTable>, StatisticsKernel<T, kLargeTable>);
}

}  // namespace

cudaError_t LaunchStatistics(bool is_double, const Sweep& sweep, const Gradients& gradients,
                             int32_t first_leaf, int32_t* ints, cudaStream_t stream) {
  return is_double ? Launch<double>(sweep, gradients, first_leaf, ints, stream)
                   : Launch<float>(sweep, gradients, first_leaf, ints, stream);
}

cudaError_t PreloadStatistics() {
  const cudaError_t error = Preload<float>();
  return error != cudaSuccess ? error : Preload<double>();
}

}  // namespace jaxrenaissance
