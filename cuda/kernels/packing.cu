// unpack and pack: an arena to its leaves and back.
#include "kernels/preload.cuh"
#include "kernels/tiles.cuh"

namespace jaxrenaissance {
namespace {

template <typename T, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    UnpackKernel(const Sweep sweep, const T* arena,
                 const __grid_constant__ LeafTable<kCapacity> leaves) {
  const BlockPlace block = FindBlock(sweep);
  Vector<T> x[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t position = VectorStart(block.tile, u);
    if (position >= sweep.size) continue;
    x[u] = *reinterpret_cast<const Vector<T>*>(arena + block.member * sweep.size + position);
  }
  const Tile tile = LoadTile(sweep.table, block.tile);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t position = VectorStart(block.tile, u);
    if (position >= sweep.size) continue;
    const Place place = FindPlace(tile, sweep.segments, position, block.tile * kTile);
    if (place.count == 0 || !Holds(leaves, place.leaf)) continue;
    WithLeaf<T>(leaves, place.leaf, block.member, place.offset, [&](auto* leaf) {
      using Element = std::decay_t<decltype(*leaf)>;
      Vector<Element> narrow;
#pragma unroll
      for (int i = 0; i < kVector; ++i) narrow.x[i] = Narrow<Element>(x[u].x[i]);
      StoreVector(leaf, place.count, narrow);
    });
  }
}

template <typename T, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    PackKernel(const Sweep sweep, const __grid_constant__ LeafTable<kCapacity> leaves, T* arena) {
  const BlockPlace block = FindBlock(sweep);
  const Tile tile = LoadTile(sweep.table, block.tile);
  Vector<T> x[kUnroll];
  bool mine[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t position = VectorStart(block.tile, u);
    mine[u] = false;
    if (position >= sweep.size) continue;
    x[u] = Vector<T>{};
    const Place place = FindPlace(tile, sweep.segments, position, block.tile * kTile);
    // Padding belongs to the leaf before it, or to leaf 0: each vector is written by exactly one
    // launch.
    mine[u] = Holds(leaves, place.leaf);
    if (place.count == 0 || !mine[u]) continue;
    WithLeaf<T>(leaves, place.leaf, block.member, place.offset, [&](const auto* leaf) {
      Vector<std::decay_t<decltype(*leaf)>> raw{};
      LoadVector(leaf, place.count, raw);
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        x[u].x[i] = i < place.count ? static_cast<T>(Widen(raw.x[i])) : T(0);
    });
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (!mine[u]) continue;
    *reinterpret_cast<Vector<T>*>(arena + block.member * sweep.size + VectorStart(block.tile, u)) =
        x[u];
  }
}

template <typename T>
cudaError_t Unpack(const Sweep& sweep, const void* arena, const Leaves& leaves,
                   cudaStream_t stream) {
  return ForEachLaunch(sweep, leaves, [&](const Sweep& part, const auto& table) {
    UnpackKernel<T>
        <<<GridOf(part), kThreads, 0, stream>>>(part, static_cast<const T*>(arena), table);
  });
}

template <typename T>
cudaError_t Pack(const Sweep& sweep, const Leaves& leaves, void* arena, cudaStream_t stream) {
  return ForEachLaunch(sweep, leaves, [&](const Sweep& part, const auto& table) {
    PackKernel<T><<<GridOf(part), kThreads, 0, stream>>>(part, table, static_cast<T*>(arena));
  });
}

template <typename T>
cudaError_t Preload() {
  return PreloadKernels(UnpackKernel<T, kSmallTable>, UnpackKernel<T, kMediumTable>,
                        UnpackKernel<T, kLargeTable>, PackKernel<T, kSmallTable>,
                        PackKernel<T, kMediumTable>, PackKernel<T, kLargeTable>);
}

}  // namespace

cudaError_t LaunchUnpack(bool is_double, const Sweep& sweep, const void* arena,
                         const Leaves& leaves, cudaStream_t stream) {
  return is_double ? Unpack<double>(sweep, arena, leaves, stream)
                   : Unpack<float>(sweep, arena, leaves, stream);
}

cudaError_t LaunchPack(bool is_double, const Sweep& sweep, const Leaves& leaves, void* arena,
                       cudaStream_t stream) {
  return is_double ? Pack<double>(sweep, leaves, arena, stream)
                   : Pack<float>(sweep, leaves, arena, stream);
}

cudaError_t PreloadPacking() {
  const cudaError_t error = Preload<float>();
  return error != cudaSuccess ? error : Preload<double>();
}

}  // namespace jaxrenaissance
