// Where a thread finds its leaf: a table of segments, passed by value in the kernel's parameters.
//
// Constant memory answers without queueing behind the sweep's own traffic. A table in device memory
// was measured 8 % slower on GPT-2's leaves: each gradient load had to wait for it.
#pragma once

#include "core/operands.h"
#include "kernels/table_cache.h"
#include "kernels/tuning.h"

namespace jaxrenaissance {

// Elements of the arena's type. Two-byte ones have as many as float, so that the offsets of one
// arena are those of the other.
template <typename T>
constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(T) < 4 ? 4 : sizeof(T));

// What a kernel wants to know of a segment beside its place. With kGap, how many lines are empty
// behind it; the other kernels' segments follow each other without any.
enum class Tag { kGroup, kLeaf, kGap };
constexpr int kTagBits = 25;

// Elements between members of a batch; 0 where they share the leaf.
template <int kCapacity>
struct Strides {
  static constexpr bool kServesBatches = true;

  __device__ __forceinline__ uint32_t stride_of(uint32_t segment) const { return stride[segment]; }

  uint32_t stride[kCapacity];
};

template <>
struct Strides<kLargeTable> {
  static constexpr bool kServesBatches = false;

  __device__ __forceinline__ uint32_t stride_of(uint32_t) const { return 0; }
};

// Segments of one launch, in order, without gaps but for the end of each one's last line, and for
// whole lines where the tag says how many.
template <int kCapacity>
struct SegmentTable : Strides<kCapacity> {
  uint32_t first_segment;  // of all launches
  uint32_t first_tile;
  uint32_t tiles;
  uint32_t bucket_shift;  // tiles a bucket, as a power of two
  uint32_t low_line,
      high_line;  // the part of the arena that this launch looks after, padding included
  uint16_t
      bucket[kBuckets + 1];  // the last segment that starts at or before the bucket's first line
  uint32_t start[kCapacity + 1];  // first line of each segment; then the line after the last
  uint32_t meta[kCapacity];  // elements missing in the last line (5 bits), leaf type (2 bits), tag
  void* data[kCapacity];     // the segment's first element, of member 0

  void** Column(int) { return data; }
};

// All parameters of a kernel together have 32,764 bytes; those beside the table take some 100.
static_assert(sizeof(SegmentTable<kLargeTable>) <= 32764 - 160);

// The place of one thread's vector: `count` of its kVector elements are in segment `segment`,
// `within` elements from its start. A vector never straddles two segments, since these start on
// lines.
struct Place {
  int64_t within;
  uint32_t segment;
  uint32_t meta;
  int count;
  bool mine;  // this launch looks after this part of the arena

  __device__ __forceinline__ LeafType type() const {
    return static_cast<LeafType>((meta >> 5) & 3u);
  }
  __device__ __forceinline__ uint32_t tag() const { return meta >> 7; }
};

// The block's tile, and which member of the batch it serves.
struct BlockPlace {
  uint32_t tile;
  uint32_t member;
};

template <int kCapacity>
__device__ __forceinline__ BlockPlace FindBlock(const SegmentTable<kCapacity>& table,
                                                int64_t members) {
  if (members == 1) return {table.first_tile + blockIdx.x, 0};
  return {table.first_tile + blockIdx.x % table.tiles, blockIdx.x / table.tiles};
}

// Arena index of this thread's vector number u, where a thread of the block's tile has kVectors.
template <int kVectors = 1>
__device__ __forceinline__ int64_t VectorStart(uint32_t tile, int u = 0) {
  return tile * (kVectors * kTile) + u * kTile + static_cast<int64_t>(threadIdx.x) * kVector;
}

template <typename T, bool kHasGaps = false, int kCapacity>
__device__ __forceinline__ int64_t SegmentSize(const SegmentTable<kCapacity>& table,
                                               const Place& place) {
  uint32_t lines = table.start[place.segment + 1] - table.start[place.segment];
  if constexpr (kHasGaps) lines -= place.tag();
  return static_cast<int64_t>(lines) * kLine<T> - (place.meta & 31u);
}

template <typename T, bool kHasGaps = false, int kCapacity>
__device__ __forceinline__ Place FindPlace(const SegmentTable<kCapacity>& table, uint32_t tile,
                                           int64_t position) {
  const uint32_t line = static_cast<uint32_t>(position / kLine<T>);
  const uint32_t bucket = (tile - table.first_tile) >> table.bucket_shift;
  uint32_t low = table.bucket[bucket], high = table.bucket[bucket + 1];
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (table.start[middle] <= line) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  Place place;
  place.segment = low;
  place.meta = table.meta[low];
  place.within = position - static_cast<int64_t>(table.start[low]) * kLine<T>;
  int64_t left = SegmentSize<T, kHasGaps>(table, place) - place.within;
  if (kHasGaps && place.within < 0) left = 0;  // before the first segment
  place.mine = line >= table.low_line && line < table.high_line;
  place.count = !place.mine || left <= 0 ? 0 : left < kVector ? static_cast<int>(left) : kVector;
  return place;
}

// Calls f with a typed pointer to element `element` of a leaf. T is the arena's type: only a
// float64 arena has float64 leaves.
template <typename T, typename F>
__device__ __forceinline__ void WithElement(void* data, LeafType type, int64_t element,
                                            const F& f) {
  switch (type) {
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

// Calls f with a typed pointer to the place's first element.
template <typename T, int kCapacity, typename F>
__device__ __forceinline__ void WithLeaf(const SegmentTable<kCapacity>& table, const Place& place,
                                         uint32_t member, const F& f) {
  const int64_t stride = table.stride_of(place.segment);
  return WithElement<T>(table.data[place.segment], place.type(),
                        place.within + static_cast<int64_t>(member) * stride, f);
}

// False where a stride has no room, or there is a batch, and a table that has none for it.
template <int kCapacity>
bool FillStrides(const Layout& layout, const Leaves& leaves, int64_t first, int64_t count,
                 Strides<kCapacity>& strides) {
  if constexpr (Strides<kCapacity>::kServesBatches) {
    for (int64_t i = 0; i < count; ++i) {
      int64_t stride = 0;
      if (layout.members > 1 && !leaves.empty())
        stride = leaves.forms[layout.segments[first + i].leaf].stride;
      if (stride > UINT32_MAX) return false;
      strides.stride[i] = static_cast<uint32_t>(stride);
    }
    return true;
  } else {
    return layout.members <= 1;
  }
}

// Fills what a table says of segments [first, first + count) of a layout: start, meta and stride.
// `leaves` may be empty: then the gradient is an arena.
template <typename T, typename Table>
bool FillSegments(const Layout& layout, const Leaves& leaves, Tag tag, int64_t first, int64_t count,
                  Table& table) {
  const Segment* segments = layout.segments + first;
  for (int64_t i = 0; i < count; ++i) {
    const Segment& segment = segments[i];
    const int64_t lines = (segment.size + kLine<T> - 1) / kLine<T>;
    const int64_t end = segment.start + lines * kLine<T>;
    const int64_t next = i + 1 < count ? segments[i + 1].start : end;
    if (segment.start % kLine<T> != 0 || next / kLine<T> > UINT32_MAX) return false;
    if (end > layout.size || next < end) return false;
    const bool follows = next == end && (first + i > 0 || segment.start == 0);
    if (!follows && tag != Tag::kGap) return false;
    const int64_t number = tag == Tag::kGroup  ? segment.group
                           : tag == Tag::kLeaf ? segment.leaf
                                               : (next - end) / kLine<T>;
    if (number >> kTagBits != 0) return false;
    table.start[i] = static_cast<uint32_t>(segment.start / kLine<T>);
    table.start[i + 1] = static_cast<uint32_t>(next / kLine<T>);
    LeafType type = LeafType::kF32;
    if (!leaves.empty()) type = leaves.forms[segment.leaf].type;
    table.meta[i] = static_cast<uint32_t>(lines * kLine<T> - segment.size) |
                    static_cast<uint32_t>(type) << 5 | static_cast<uint32_t>(number) << 7;
  }
  return FillStrides(layout, leaves, first, count, table);
}

// Fills table for segments [first, first + count) of a layout, in tiles of `tile` elements.
template <typename T, int kCapacity>
bool FillTable(const Layout& layout, const Leaves& leaves, Tag tag, int64_t first, int64_t count,
               int64_t tile, SegmentTable<kCapacity>& table) {
  table.first_segment = static_cast<uint32_t>(first);
  if (!FillSegments<T>(layout, leaves, tag, first, count, table)) return false;
  const Segment* segments = layout.segments + first;
  const bool last_launch = first + count == layout.num_segments;
  const int64_t low = first == 0 ? 0 : segments[0].start;
  const int64_t high = last_launch ? layout.size : segments[count].start;
  const int64_t first_tile = low / tile;
  const int64_t tiles = (high + tile - 1) / tile - first_tile;
  if (tiles * layout.members > INT32_MAX) return false;
  table.low_line = static_cast<uint32_t>(low / kLine<T>);
  table.high_line = static_cast<uint32_t>(high / kLine<T>);
  table.first_tile = static_cast<uint32_t>(first_tile);
  table.tiles = static_cast<uint32_t>(tiles);
  table.bucket_shift = 0;
  while ((tiles >> table.bucket_shift) >= kBuckets) ++table.bucket_shift;
  int64_t segment = 0;
  for (int64_t b = 0; b <= kBuckets; ++b) {
    const int64_t line = ((first_tile + (b << table.bucket_shift)) * tile) / kLine<T>;
    while (segment + 1 < count && table.start[segment + 1] <= line) ++segment;
    table.bucket[b] = static_cast<uint16_t>(segment);
  }
  return true;
}

// Calls launch(grid, table) for each launch, with a table of the smallest capacity that fits.
template <typename T, int kVectors = 1, typename F>
cudaError_t ForEachLaunch(const Layout& layout, const Leaves& leaves, Tag tag,
                          const TableCache& cache, const F& launch) {
  if (layout.size * layout.members == 0) return cudaSuccess;
  return LaunchTables<SegmentTable, kSmallTable, kMediumTable, kLargeTable>(
      layout, {&leaves}, cache,
      [&](int64_t first, int64_t count, auto& table) {
        return FillTable<T>(layout, leaves, tag, first, count, kVectors * kTile, table);
      },
      [&](const auto& table) {
        launch(dim3(table.tiles * static_cast<unsigned>(layout.members)), table);
      });
}

}  // namespace jaxrenaissance
