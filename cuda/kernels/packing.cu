// unpack and pack: an arena to its leaves and back.
#include "kernels/launch.h"
#include "kernels/preload.cuh"
#include "kernels/segment_table.cuh"
#include "kernels/vector.cuh"

namespace jaxrenaissance {
namespace {

template <typename T, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    UnpackKernel(const T* arena, int64_t arena_stride, int64_t size, int64_t members,
                 const __grid_constant__ SegmentTable<kCapacity> table) {
  const BlockPlace block = FindBlock(table, members);
  const int64_t position = VectorStart(block.tile);
  if (position >= size) return;
  const Vector<T> x =
      *reinterpret_cast<const Vector<T>*>(arena + block.member * arena_stride + position);
  const Place place = FindPlace<T>(table, block.tile, position);
  if (place.count == 0) return;
  WithLeaf<T>(table, place, block.member, [&](auto* leaf) {
    using Element = std::decay_t<decltype(*leaf)>;
    Vector<Element> narrow;
#pragma unroll
    for (int i = 0; i < kVector; ++i) narrow.x[i] = Narrow<Element>(x.x[i]);
    StoreVector(leaf, place.count, narrow);
  });
}

template <typename T, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    PackKernel(T* arena, int64_t size, int64_t members,
               const __grid_constant__ SegmentTable<kCapacity> table) {
  const BlockPlace block = FindBlock(table, members);
  const int64_t position = VectorStart(block.tile);
  if (position >= size) return;
  const Place place = FindPlace<T>(table, block.tile, position);
  if (!place.mine) return;
  Vector<T> x{};  // padding is zero
  if (place.count > 0) {
    WithLeaf<T>(table, place, block.member, [&](const auto* leaf) {
      Vector<std::decay_t<decltype(*leaf)>> raw{};
      LoadVector(leaf, place.count, raw);
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        x.x[i] = i < place.count ? static_cast<T>(Widen(raw.x[i])) : T(0);
    });
  }
  *reinterpret_cast<Vector<T>*>(arena + block.member * size + position) = x;
}

template <typename T>
cudaError_t Unpack(const Layout& layout, const void* arena, int64_t arena_stride,
                   const Leaves& leaves, const TableCache& tables, cudaStream_t stream) {
  return ForEachLaunch<T>(layout, leaves, Tag::kGroup, tables, [&](dim3 grid, const auto& table) {
    UnpackKernel<T><<<grid, kThreads, 0, stream>>>(static_cast<const T*>(arena), arena_stride,
                                                   layout.size, layout.members, table);
  });
}

template <typename T>
cudaError_t Pack(const Layout& layout, const Leaves& leaves, void* arena, const TableCache& tables,
                 cudaStream_t stream) {
  return ForEachLaunch<T>(layout, leaves, Tag::kGroup, tables, [&](dim3 grid, const auto& table) {
    PackKernel<T>
        <<<grid, kThreads, 0, stream>>>(static_cast<T*>(arena), layout.size, layout.members, table);
  });
}

template <typename T>
cudaError_t Preload() {
  return PreloadKernels(UnpackKernel<T, kSmallTable>, UnpackKernel<T, kMediumTable>,
                        UnpackKernel<T, kLargeTable>, PackKernel<T, kSmallTable>,
                        PackKernel<T, kMediumTable>, PackKernel<T, kLargeTable>);
}

}  // namespace

cudaError_t LaunchUnpack(const Layout& layout, const void* arena, int64_t arena_stride,
                         const Leaves& leaves, const TableCache& tables, cudaStream_t stream) {
  return (layout.is_double ? Unpack<double> : Unpack<float>)(layout, arena, arena_stride, leaves,
                                                             tables, stream);
}

cudaError_t LaunchPack(const Layout& layout, const Leaves& leaves, void* arena,
                       const TableCache& tables, cudaStream_t stream) {
  return (layout.is_double ? Pack<double> : Pack<float>)(layout, leaves, arena, tables, stream);
}

cudaError_t PreloadPacking() {
  const cudaError_t error = Preload<float>();
  return error != cudaSuccess ? error : Preload<double>();
}

}  // namespace jaxrenaissance
