// How a block finds its place: a tile of the arena, the segments in it, and the leaves behind them.
#pragma once

#include "kernels/launch.h"
#include "kernels/tuning.h"

namespace jaxrenaissance {

// Pointers to leaves, passed by value in the kernel's parameters. `stride` is the distance in
// elements between the members of a batch (0 where all share the leaf) times four, plus the leaf's
// type. A capacity of 0 is the table of a launch that needs no leaves.
template <int kCapacity>
struct LeafTable {
  int32_t first_leaf;  // the table holds leaves [first_leaf, first_leaf + num_leaves)
  int32_t num_leaves;
  void* data[kCapacity];
  int64_t stride_and_type[kCapacity];
};
template <>
struct LeafTable<0> {};

// Fills a table of the smallest capacity for each launch and calls launch(sweep, table). Its grid
// is one block a tile.
template <typename F>
cudaError_t ForEachLaunch(const Sweep& sweep, const Leaves& leaves, const F& launch) {
  for (const LeafRange& range : leaves.ranges) {
    Sweep part = sweep;
    part.first_tile = range.first_tile;
    part.tiles = range.tiles;
    if (part.tiles * part.members == 0) continue;
    const auto fill = [&](auto& table) {
      table.first_leaf = static_cast<int32_t>(range.first_leaf);
      table.num_leaves = static_cast<int32_t>(range.num_leaves);
      for (int64_t i = 0; i < range.num_leaves; ++i) {
        const Leaf& leaf = leaves.leaves[range.first_leaf + i];
        table.data[i] = leaf.data;
        table.stride_and_type[i] = leaf.stride * 4 + static_cast<int64_t>(leaf.type);
      }
      launch(part, table);
      return cudaPeekAtLastError();
    };
    cudaError_t error;
    if (range.num_leaves <= kSmallTable) {
      LeafTable<kSmallTable> table;
      error = fill(table);
    } else if (range.num_leaves <= kMediumTable) {
      LeafTable<kMediumTable> table;
      error = fill(table);
    } else {
      LeafTable<kLargeTable> table;
      error = fill(table);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

inline dim3 GridOf(const Sweep& sweep) {
  return dim3(static_cast<unsigned>(sweep.tiles * sweep.members));
}

// A row of the tile table that Python builds. leaf >= 0: the whole tile lies in one segment of that
// leaf, and its first element is the leaf's element `offset`. leaf < 0: it covers segments [low,
// high].
struct Tile {
  int32_t low, high, leaf, group;

  __device__ __forceinline__ int64_t offset() const {
    return (static_cast<int64_t>(high) << 32) | static_cast<uint32_t>(low);
  }
};
static_assert(sizeof(Tile) == 16);

__device__ __forceinline__ Tile LoadTile(const Tile* tiles, int64_t index) {
  const int4 raw = __ldg(reinterpret_cast<const int4*>(tiles) + index);
  return {raw.x, raw.y, raw.z, raw.w};
}

// Where a thread's vector lies: `count` of its kVector elements are in a segment of `leaf`, from
// element `offset` of it on.
struct Place {
  int64_t offset;
  int32_t leaf;
  int32_t group;
  int32_t count;
};

// `position` is the arena index of the vector's first element; a vector never straddles two
// segments, since these start on 128-byte boundaries.
__device__ __forceinline__ Place FindPlace(const Tile& tile, const Segment* segments,
                                           int64_t position, int64_t tile_start) {
  if (tile.leaf >= 0) {
    return {tile.offset() + (position - tile_start), tile.leaf, tile.group, kVector};
  }
  if (tile.high < tile.low) return {0, 0, 0, 0};
  const Segment& segment = segments[FindSegment(segments, tile.low, tile.high + 1, position)];
  const int64_t within = position - segment.start;
  const int64_t left = segment.size - within;
  const bool inside = within >= 0 && left > 0;
  return {segment.leaf_offset + within, static_cast<int32_t>(segment.leaf),
          static_cast<int32_t>(segment.group),
          inside ? static_cast<int32_t>(left < kVector ? left : kVector) : 0};
}

template <typename T>
struct alignas(sizeof(T) * kVector > 16 ? 16 : sizeof(T) * kVector) Vector {
  T x[kVector];
};

template <typename T>
__device__ __forceinline__ bool IsVectorAligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Vector<T>) == 0;
}

// Loads `count` elements; the others stay as they were. Leaves may start anywhere, so the vector
// path is taken per thread.
template <typename T>
__device__ __forceinline__ void LoadVector(const T* p, int count, Vector<T>& out) {
  if (count == kVector && IsVectorAligned(p)) {
    out = *reinterpret_cast<const Vector<T>*>(p);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) out.x[i] = p[i];
  }
}

template <typename T>
__device__ __forceinline__ void StoreVector(T* p, int count, const Vector<T>& value) {
  if (count == kVector && IsVectorAligned(p)) {
    *reinterpret_cast<Vector<T>*>(p) = value;
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) p[i] = value.x[i];
  }
}

// Calls f with a typed pointer to element `offset` of a leaf in this member of the batch. T is the
// arena's type: a float32 arena has no float64 leaves.
template <typename T, int kCapacity, typename F>
__device__ __forceinline__ void WithLeaf(const LeafTable<kCapacity>& leaves, int leaf,
                                         int64_t member, int64_t offset, const F& f) {
  const int entry = leaf - leaves.first_leaf;
  if (entry < 0 || entry >= leaves.num_leaves) return;  // another launch's
  const int64_t word = leaves.stride_and_type[entry];
  const int64_t element = member * (word >> 2) + offset;
  void* data = leaves.data[entry];
  switch (static_cast<LeafType>(word & 3)) {
    case LeafType::kF32:
      return f(static_cast<float*>(data) + element);
    case LeafType::kBf16:
      return f(static_cast<Bf16*>(data) + element);
    case LeafType::kF16:
      return f(static_cast<F16*>(data) + element);
    case LeafType::kF64:
      if constexpr (sizeof(T) == 8) return f(static_cast<double*>(data) + element);
  }
}

// The block's tile, and which member of the batch it serves.
struct BlockPlace {
  int64_t tile;
  int64_t member;
};

// Whether `leaf` belongs to this launch.
template <int kCapacity>
__device__ __forceinline__ bool Holds(const LeafTable<kCapacity>& leaves, int leaf) {
  return static_cast<uint32_t>(leaf - leaves.first_leaf) < static_cast<uint32_t>(leaves.num_leaves);
}

__device__ __forceinline__ BlockPlace FindBlock(const Sweep& sweep) {
  if (sweep.members == 1) return {sweep.first_tile + blockIdx.x, 0};
  return {sweep.first_tile + blockIdx.x % static_cast<uint32_t>(sweep.tiles),
          blockIdx.x / static_cast<uint32_t>(sweep.tiles)};
}

// Arena index of vector number u of this thread.
__device__ __forceinline__ int64_t VectorStart(int64_t tile, int u) {
  return tile * kTile + (static_cast<int64_t>(u) * kThreads + threadIdx.x) * kVector;
}

}  // namespace jaxrenaissance
