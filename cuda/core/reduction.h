// Sums of squares in float64, in a fixed tree that belongs to the numerics: threads, tiles and
// tuning never change a bit of it.
//
// A segment is cut from its start into chunks of 1024 elements. Inside a chunk, element
// e = 128 u + 4 l + i is added to the sum of (l, i), over u in order; then the four sums of l,
// (0 + 2) + (1 + 3); then l and l + 16, l and l + 8, and so on. Chunks, segments and arenas follow
// pairwise in order, as if padded with zeros to a power of two. Eight chunks make a partial, which
// is what a kernel writes.
#pragma once

#include "core/config.h"

namespace jaxrenaissance {

constexpr int kChunkVectors = 8;  // values of u
constexpr int kChunkLanes = 32;   // values of l
constexpr int kChunkWidth = 4;    // values of i
constexpr int64_t kChunkElements = kChunkVectors * kChunkLanes * kChunkWidth;
constexpr int kPartialChunks = 8;
constexpr int64_t kPartialElements = kPartialChunks * kChunkElements;

JR_HD constexpr int64_t NumPartials(int64_t size) {
  return (size + kPartialElements - 1) / kPartialElements;
}

// A workspace: the number of each segment's first partial, the number of all partials, then these.
JR_HD constexpr int64_t PartialsStart(int64_t num_segments) {  // in words of 4 bytes
  return (num_segments + 2) / 2 * 2;
}

JR_HD double* PartialsOf(int32_t* workspace, int64_t num_segments) {
  return reinterpret_cast<double*>(workspace + PartialsStart(num_segments));
}

JR_HD double SumOfQuad(const double* x) { return (x[0] + x[2]) + (x[1] + x[3]); }

JR_HD double SumOfEight(const double* x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// Adds up what is pushed, pairwise in order.
class PairwiseSum {
 public:
  JR_HD void Push(double x) {
    int level = 0;
    for (uint64_t n = count_; n & 1; n >>= 1) x = sums_[level++] + x;
    sums_[level] = x;
    ++count_;
  }

  JR_HD double Total() const {
    double total = 0.0;
    for (int level = 0; level < kLevels; ++level) {
      if (count_ >> level & 1) total = sums_[level] + total;
    }
    return total;
  }

 private:
  static constexpr int kLevels = 40;
  uint64_t count_ = 0;
  double sums_[kLevels];  // of 2^level pushed values, where count_ has that bit
};

}  // namespace jaxrenaissance
