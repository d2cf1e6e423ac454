// The CPU loops: compiled once per instruction set, chosen when the module is loaded.
#pragma once

#include <cstdint>

#include "core/operands.h"

namespace jaxrenaissance {

// One contiguous stretch of one segment. `floats` are the scalars of its member, in the type for
// which the kernel was chosen.
struct UpdateStretch {
  void* weights;
  void* changes;  // where `change` puts what is to be added to the weights, which then stay
  void* moments[2];
  void* ema;            // null where there is none
  const double* ratio;  // the trust ratio; null where there is none
  const void* gradient;
  int64_t count;
  const void* floats;
  int64_t group;
};

using UpdateFn = void (*)(const UpdateStretch&);
using ConvertFn = void (*)(const void* from, void* to, int64_t count);
using NonFiniteFn = bool (*)(const void* data, int64_t count);
// A chunk of core/reduction.h: the sum of its squares; of the squares of its update.
using ChunkSumFn = double (*)(const void* data, int64_t count);
using ChunkUpdateSumFn = double (*)(const UpdateStretch&);
// Of a chunk's update before the learning rate, for LAMB.
using ChunkDirectionSumFn = double (*)(const UpdateStretch&);
// Of a chunk's products of gradients and weights.
using ChunkProductSumFn = double (*)(const void* gradient, const void* weights, int64_t count);
// Adds the gradient to the accumulator, or starts it. Whether the gradient, or only the sum, is not
// finite.
using AccumulateFn = bool (*)(const void* gradient, void* accumulator, int64_t count,
                              bool is_first);
// Moves data towards `target` (null: zero).
using LerpFn = void (*)(void* data, const void* target, int64_t count, double tau);

// Indexed by [arena is double][floats are double][kind][gradient type], and so on; null where a
// float32 arena would meet a float64 leaf.
struct CpuKernels {
  const char* name;
  UpdateFn update[2][2][kUpdateKinds][kLeafTypes];
  UpdateFn change[2][2][kUpdateKinds][kLeafTypes];
  ConvertFn convert[kLeafTypes][kLeafTypes];  // [from][to]
  NonFiniteFn non_finite[kLeafTypes];
  ChunkSumFn chunk_sum[kLeafTypes];
  ChunkUpdateSumFn chunk_update_sum[2][2][kUpdateKinds][kLeafTypes];
  ChunkDirectionSumFn chunk_direction_sum[2][2][kUpdateKinds][kLeafTypes];
  ChunkProductSumFn chunk_product_sum[2][kLeafTypes];
  AccumulateFn accumulate[2][kLeafTypes];
  LerpFn lerp[2][kLeafTypes];
};

// The kernels of the widest instruction set that this processor has.
const CpuKernels& BestCpuKernels();

}  // namespace jaxrenaissance
