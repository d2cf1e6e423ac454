// unpack, pack and pack_piece: an arena to its leaves and back.
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
  const Place place = FindPlace<T, true>(table, block.tile, position);
  if (place.count == 0) return;
  WithLeaf<T>(table, place, block.member, [&](auto* leaf) {
    using Element = std::decay_t<decltype(*leaf)>;
    Vector<Element> converted;
#pragma unroll
    for (int i = 0; i < kVector; ++i) converted.x[i] = Convert<Element>(x.x[i]);
    StoreVector(leaf, place.count, converted);
  });
}

// Writes one vector of an arena, from the place's elements.
template <typename T, int kCapacity>
__device__ __forceinline__ void PackVector(const SegmentTable<kCapacity>& table, const Place& place,
                                           uint32_t member, T* to) {
  Vector<T> x{};  // padding is zero
  if (place.count > 0) {
    WithLeaf<T>(table, place, member, [&](const auto* leaf) {
      Vector<std::decay_t<decltype(*leaf)>> raw{};
      LoadVector(leaf, place.count, raw);
#pragma unroll
      for (int i = 0; i < kVector; ++i) x.x[i] = i < place.count ? Convert<T>(raw.x[i]) : T{};
    });
  }
  *reinterpret_cast<Vector<T>*>(to) = x;
}

template <typename T, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    PackKernel(T* arena, int64_t size, int64_t members,
               const __grid_constant__ SegmentTable<kCapacity> table) {
  const BlockPlace block = FindBlock(table, members);
  const int64_t position = VectorStart(block.tile);
  if (position >= size) return;
  const Place place = FindPlace<T, true>(table, block.tile, position);
  if (!place.mine) return;
  PackVector(table, place, block.member, arena + block.member * size + position);
}

// The segments' data are whole slices, and their tags the groups.
template <typename T, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    PackPieceKernel(T* arena, int64_t size, int64_t members, PieceIndex piece,
                    const __grid_constant__ SegmentTable<kCapacity> table) {
  const BlockPlace block = FindBlock(table, members);
  const int64_t position = VectorStart(block.tile);
  if (position >= size) return;
  const int64_t index = piece.Of(block.member);
  Place place = FindPlace<T>(table, block.tile, position);
  if (!place.mine) return;
  const int64_t own = SegmentSize<T>(table, place);
  place.within += index * own;
  const int64_t left = piece.shards * own - place.tag() - place.within;
  if (left < place.count) place.count = left <= 0 ? 0 : static_cast<int>(left);
  PackVector(table, place, block.member, arena + block.member * size + position);
}

template <typename T>
cudaError_t Unpack(const Layout& layout, const void* arena, int64_t arena_stride,
                   const Leaves& leaves, const TableCache& tables, cudaStream_t stream) {
  return ForEachLaunch<T>(layout, leaves, Tag::kGap, tables, [&](dim3 grid, const auto& table) {
    UnpackKernel<T><<<grid, kThreads, 0, stream>>>(static_cast<const T*>(arena), arena_stride,
                                                   layout.size, layout.members, table);
  });
}

template <typename T>
cudaError_t Pack(const Layout& layout, const Leaves& leaves, const PieceIndex& piece, void* arena,
                 const TableCache& tables, cudaStream_t stream) {
  const bool whole = piece.shards == 0;
  const Tag tag = whole ? Tag::kGap : Tag::kGroup;
  return ForEachLaunch<T>(layout, leaves, tag, tables, [&](dim3 grid, const auto& table) {
    T* to = static_cast<T*>(arena);
    if (whole) {
      PackKernel<T><<<grid, kThreads, 0, stream>>>(to, layout.size, layout.members, table);
    } else {
      PackPieceKernel<T>
          <<<grid, kThreads, 0, stream>>>(to, layout.size, layout.members, piece, table);
    }
  });
}

template <typename T>
cudaError_t Preload() {
  return PreloadKernels(UnpackKernel<T, kSmallTable>, UnpackKernel<T, kMediumTable>,
                        UnpackKernel<T, kLargeTable>, PackKernel<T, kSmallTable>,
                        PackKernel<T, kMediumTable>, PackKernel<T, kLargeTable>,
                        PackPieceKernel<T, kSmallTable>, PackPieceKernel<T, kMediumTable>,
                        PackPieceKernel<T, kLargeTable>);
}

// In the order of LeafType.
constexpr decltype(&Unpack<float>) kUnpack[] = {Unpack<float>, Unpack<Bf16>, Unpack<F16>,
                                                Unpack<double>};
constexpr decltype(&Pack<float>) kPack[] = {Pack<float>, Pack<Bf16>, Pack<F16>, Pack<double>};

}  // namespace

cudaError_t LaunchUnpack(const Layout& layout, const void* arena, int64_t arena_stride,
                         const Leaves& leaves, const TableCache& tables, cudaStream_t stream) {
  return kUnpack[static_cast<int>(layout.type)](layout, arena, arena_stride, leaves, tables,
                                                stream);
}

cudaError_t LaunchPack(const Layout& layout, const Leaves& leaves, const PieceIndex& piece,
                       void* arena, const TableCache& tables, cudaStream_t stream) {
  return kPack[static_cast<int>(layout.type)](layout, leaves, piece, arena, tables, stream);
}

cudaError_t PreloadPacking() {
  return FirstError({Preload<float>, Preload<Bf16>, Preload<F16>, Preload<double>});
}

}  // namespace jaxrenaissance
