// Where a block of a reduction finds its partial: eight chunks of one segment, from a table passed
// by value in the kernel's parameters, as in segment_table.cuh.
#pragma once

#include "core/reduction.h"
#include "kernels/segment_table.cuh"
#include "kernels/tuning.h"

namespace jaxrenaissance {

static_assert(kThreads == kPartialChunks * kChunkLanes, "a warp is a chunk, a block a partial");
static_assert(kVector == kChunkWidth, "a thread's vector is one value of u and l");

// Segments of one launch, in order.
template <int kCapacity>
struct PartialTable : Strides<kCapacity> {
  uint32_t first_segment;  // of all launches
  uint32_t first_partial;
  uint32_t partials;
  uint32_t bucket_shift;            // partials a bucket, as a power of two
  uint16_t bucket[kBuckets + 1];    // the segment of the bucket's first partial
  uint32_t partial[kCapacity + 1];  // number of each segment's first partial; then the end
  uint32_t start[kCapacity + 1];    // first line of each segment; then the line after the last
  uint32_t meta[kCapacity];  // elements missing in the last line (5 bits), leaf type (2 bits), tag
  void* data[kCapacity];     // the segment's first element, of member 0

  void** Column(int) { return data; }
};

// The chunk of a warp.
struct ChunkPlace {
  int64_t within;    // its first element, from the segment's start
  int64_t left;      // elements from there to the segment's end; at most 0 where the chunk is empty
  int64_t position;  // its first element in the arena
  uint32_t segment;  // of this launch
  uint32_t partial;  // of all launches
  uint32_t member;
  uint32_t meta;

  __device__ __forceinline__ LeafType type() const {
    return static_cast<LeafType>((meta >> 5) & 3u);
  }
  __device__ __forceinline__ uint32_t tag() const { return meta >> 7; }
};

template <typename T, int kCapacity>
__device__ __forceinline__ ChunkPlace FindChunk(const PartialTable<kCapacity>& table) {
  const uint32_t own = blockIdx.x % table.partials;
  const uint32_t bucket = own >> table.bucket_shift;
  const uint32_t partial = table.first_partial + own;
  uint32_t low = table.bucket[bucket], high = table.bucket[bucket + 1];
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (table.partial[middle] <= partial) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  ChunkPlace place;
  place.segment = low;
  place.partial = partial;
  place.member = blockIdx.x / table.partials;
  place.meta = table.meta[low];
  place.within = static_cast<int64_t>(partial - table.partial[low]) * kPartialElements +
                 threadIdx.x / kChunkLanes * kChunkElements;
  const int64_t size =
      static_cast<int64_t>(table.start[low + 1] - table.start[low]) * kLine<T> - (place.meta & 31u);
  place.left = size - place.within;
  place.position = static_cast<int64_t>(table.start[low]) * kLine<T> + place.within;
  return place;
}

// Calls f with a typed pointer to the chunk's first element.
template <typename T, int kCapacity, typename F>
__device__ __forceinline__ void WithLeaf(const PartialTable<kCapacity>& table,
                                         const ChunkPlace& place, const F& f) {
  return WithElement<T>(
      table.data[place.segment], place.type(),
      place.within + static_cast<int64_t>(place.member) * table.stride_of(place.segment), f);
}

// How many of the four elements of vector u are there.
__device__ __forceinline__ int VectorCount(const ChunkPlace& place, int u) {
  const int64_t left =
      place.left - u * (kChunkLanes * kVector) - (threadIdx.x % kChunkLanes) * kVector;
  return left >= kVector ? kVector : left > 0 ? static_cast<int>(left) : 0;
}

// The sum of a warp's chunk, in lane 0, from the sums of each lane's four elements.
__device__ __forceinline__ double SumOfChunk(const double (&sums)[kVector]) {
  double sum = SumOfQuad(sums);
#pragma unroll
  for (int h = kChunkLanes / 2; h > 0; h /= 2) sum += __shfl_down_sync(~0u, sum, h);
  return sum;
}

// The sum of a block's partial, in thread 0, from each warp's chunk.
__device__ __forceinline__ double SumOfPartial(double chunk) {
  __shared__ double chunks[kPartialChunks];
  if (threadIdx.x % kChunkLanes == 0) chunks[threadIdx.x / kChunkLanes] = chunk;
  __syncthreads();
  return SumOfEight(chunks);
}

// Thread 0 writes the block's partial, and what the workspace says of its segment.
template <int kCapacity>
__device__ __forceinline__ void WritePartial(const PartialTable<kCapacity>& table,
                                             const ChunkPlace& place, double sum,
                                             int64_t num_segments, int64_t num_partials,
                                             int32_t* workspace) {
  PartialsOf(workspace, num_segments)[place.partial] = sum;
  if (place.partial == table.partial[place.segment])
    workspace[table.first_segment + place.segment] = static_cast<int32_t>(place.partial);
  if (place.partial + 1 == num_partials)
    workspace[num_segments] = static_cast<int32_t>(num_partials);
}

// Fills table for segments [first, first + count) of a layout. `leaves` may be empty: then the
// gradient is an arena.
template <typename T, int kCapacity>
bool FillTable(const Layout& layout, const Leaves& leaves, Tag tag, int64_t first, int64_t count,
               int64_t first_partial, PartialTable<kCapacity>& table) {
  table.first_segment = static_cast<uint32_t>(first);
  table.first_partial = static_cast<uint32_t>(first_partial);
  if (!FillSegments<T>(layout, leaves, tag, first, count, table)) return false;
  int64_t partial = first_partial;
  for (int64_t i = 0; i < count; ++i) {
    table.partial[i] = static_cast<uint32_t>(partial);
    partial += NumPartials(layout.segments[first + i].size);
  }
  table.partial[count] = static_cast<uint32_t>(partial);
  if (partial > INT32_MAX || (partial - first_partial) * layout.members > INT32_MAX) return false;
  table.partials = static_cast<uint32_t>(partial - first_partial);
  table.bucket_shift = 0;
  while ((table.partials >> table.bucket_shift) >= kBuckets) ++table.bucket_shift;
  int64_t segment = 0;
  for (int64_t b = 0; b <= kBuckets; ++b) {
    const int64_t own = first_partial + (b << table.bucket_shift);
    while (segment + 1 < count && table.partial[segment + 1] <= own) ++segment;
    table.bucket[b] = static_cast<uint16_t>(segment);
  }
  return true;
}

// Calls launch(grid, table) for each launch, with a table of the smallest capacity from kLeast on
// that fits.
template <typename T, int kLeast = kSmallTable, typename F>
cudaError_t ForEachPartialLaunch(const Layout& layout, const Leaves& leaves, Tag tag,
                                 const TableCache& cache, const F& launch) {
  if (layout.members * layout.num_segments == 0) return cudaSuccess;
  constexpr int kMedium = kLeast < kMediumTable ? kMediumTable : kLeast;
  int64_t partial = 0;
  return LaunchTables<PartialTable, kLeast, kMedium, kLargePartialTable>(
      layout, {&leaves}, cache,
      [&](int64_t first, int64_t count, auto& table) {
        if (!FillTable<T>(layout, leaves, tag, first, count, partial, table)) return false;
        partial += table.partials;
        return true;
      },
      [&](const auto& table) {
        launch(dim3(table.partials * static_cast<unsigned>(layout.members)), table);
      });
}

}  // namespace jaxrenaissance
