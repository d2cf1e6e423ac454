// Launch constants, apart from the kernels.
#pragma once

#include <cstdint>

namespace jaxrenaissance {

constexpr int kVector = 4;     // elements a thread moves at once: 16 bytes of float32
constexpr int kThreads = 256;  // threads a block; a thread moves one vector of each series
// Blocks that a multiprocessor must be able to hold, which bounds the registers of an update. Of 4,
// 5, 6 (and 8, 10, 11 with half the threads), 6 and 11 spill and cost 5 %; the others do not
// differ.
constexpr int kMinBlocks = 4;
constexpr int64_t kTile = kVector * kThreads;  // elements a block

// A pass that only reads moves too few bytes a thread with one vector: on GPT-2's leaves 0.90 of
// the copy rate on float32 and 0.46 on bfloat16. With four it reached 1.04 and 0.70, with
// eight 1.04 and 0.90.
constexpr int kStatisticsVectors = 8;
// But where segments are smaller than a block's eight tiles, nearly every block meets several, and
// a thread looks up each vector's alone.
constexpr int kSmallStatisticsVectors = 1;

// Norms: blocks that a multiprocessor must be able to hold, and how many vectors of two-byte
// elements a thread has in flight (half as many of wider ones). A block waits for its place, its
// loads and the sum of its warps, which other blocks hide. On GPT-2's leaves, float32 and bfloat16:
// all 8 vectors in flight and no bound 111 and 81 us, these 112 and 73, 6 blocks 117 and 75, 8
// blocks with half the vectors 122 and 73.
constexpr int kNormsMinBlocks = 5;
constexpr int kNormsInFlight = 8;
constexpr int kTrustNormsMinBlocks = 3;  // with the weights' part, which has three sums

// Blocks that finish a reduction: more would queue at one counter, and each has little to do.
constexpr int64_t kFinishBlocks = 512;

// Segments a launch: kernel parameters are copied on every launch, so small models take a small
// table. The largest one stays below the limit of 32,764 bytes for all parameters together. It
// holds so many since it has no room for what a batch needs, which takes several medium ones.
constexpr int kSmallTable = 64;
constexpr int kMediumTable = 448;
constexpr int kLargeTable = 2000;
constexpr int kLargePartialTable = 1280;  // of a reduction, whose table says more of a segment
// Of an op with three leaves a segment.
constexpr int kMediumTripleTable = 224;
constexpr int kLargeTripleTable = 640;

// Buckets of consecutive tiles: a first guess at the segment, before the search.
constexpr int kBuckets = 256;

constexpr int64_t kLineBytes = 128;  // segments start on lines

}  // namespace jaxrenaissance
