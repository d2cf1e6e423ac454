// norms and accumulate: one pass over the gradients that finds non-finite values, adds them to an
// accumulator where there is one, and writes sums of squares.
#include <type_traits>

#include "core/scalars.h"
#include "kernels/launch.h"
#include "kernels/partial_table.cuh"
#include "kernels/preload.cuh"
#include "kernels/vector.cuh"

namespace jaxrenaissance {
namespace {

template <typename T>
struct Pass {
  const T* gradient;  // null where the gradients are leaves
  int64_t gradient_stride;
  T* accumulator;  // null where there is none
  int64_t size;
  int32_t* ints;
  int32_t first_leaf;
  bool flag;           // whether non-finite gradients are looked for
  int32_t* workspace;  // null where nobody asked for sums
  int64_t num_segments;
  int64_t num_partials;
  int64_t workspace_stride;
};

__device__ __forceinline__ double PlusSquare(double sum, float x) {
  // The square of a float is exact in float64, so that one rounding is all there is, as in two ops.
  return __fma_rn(static_cast<double>(x), static_cast<double>(x), sum);
}
__device__ __forceinline__ double PlusSquare(double sum, double x) { return sum + x * x; }

template <typename T, bool kFromArena, bool kAccumulate, int kCapacity>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : kNormsMinBlocks)
    NormsKernel(const Pass<T> pass, const __grid_constant__ PartialTable<kCapacity> table) {
  const ChunkPlace place = FindChunk<T>(table);
  const int lane = threadIdx.x % kChunkLanes;
  int32_t* ints = pass.ints + static_cast<int64_t>(place.member) * kInts;
  double sums[kVector] = {};
  bool bad = false;
  const bool is_first = kAccumulate && ints[kMicro] == 0;

  const auto look = [&](const auto* data, auto is_whole) {
    using Element = std::decay_t<decltype(*data)>;
    constexpr bool kIsWhole = decltype(is_whole)::value;
    // Some loads go out before the first is used; all of them would take the registers of other
    // blocks.
    constexpr int kInFlight = sizeof(Element) == 2 ? kNormsInFlight : kNormsInFlight / 2;
#pragma unroll
    for (int first = 0; first < kChunkVectors; first += kInFlight) {
      Vector<Element> raw[kInFlight]{};
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int count = kIsWhole ? kVector : VectorCount(place, first + k);
        LoadVector(data + ((first + k) * kChunkLanes + lane) * kVector, count, raw[k]);
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if constexpr (kAccumulate) {
          const int count = kIsWhole ? kVector : VectorCount(place, first + k);
          T* own = pass.accumulator + place.member * pass.size + place.position +
                   ((first + k) * kChunkLanes + lane) * kVector;
          Vector<T> sum{};
          if (!is_first) LoadVector(own, count, sum);
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            const T before = sum.x[i];
            const T g = static_cast<T>(Widen(raw[k].x[i]));
            sum.x[i] = is_first ? g : before + g;
            bad |= IsNonFinite(g) || (IsNonFinite(sum.x[i]) && !IsNonFinite(before));
            sums[i] = PlusSquare(sums[i], sum.x[i]);
          }
          StoreVector(own, count, sum);
        } else {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            const auto g = Widen(raw[k].x[i]);
            if constexpr (sizeof(T) == 8) bad |= IsNonFinite(g);
            sums[i] = PlusSquare(sums[i], g);
          }
        }
      }
    }
  };
  const auto look_at = [&](const auto* data) {
    if (place.left >= kChunkElements) {
      look(data, std::true_type{});
    } else if (place.left > 0) {
      look(data, std::false_type{});
    }
  };
  if constexpr (kFromArena) {
    look_at(pass.gradient + place.member * pass.gradient_stride + place.position);
  } else {
    WithLeaf<T>(table, place, look_at);
  }

  const double sum = SumOfPartial(SumOfChunk(sums));
  // A sum of squares of floats is finite where they all are: no look at each of them.
  bad = __syncthreads_or(bad ||
                         (!kAccumulate && threadIdx.x == 0 && IsNonFinite(sum) && sizeof(T) == 4));
  if (threadIdx.x != 0) return;
  if (pass.workspace != nullptr) {
    WritePartial(table, place, sum, pass.num_segments, pass.num_partials,
                 pass.workspace + place.member * pass.workspace_stride);
  }
  const int32_t leaf = pass.first_leaf + static_cast<int32_t>(place.tag());
  int32_t* first_bad = ints + kFirstBad;
  if (pass.flag && bad && *static_cast<volatile int32_t*>(first_bad) > leaf)
    atomicMin(first_bad, leaf);
}

template <typename T>
cudaError_t Launch(const Layout& layout, const NormsOperands& operands, cudaStream_t stream) {
  const Workspace& workspace = operands.workspace;
  const Pass<T> pass = {static_cast<const T*>(operands.gradients.arena),
                        operands.gradients.arena_stride,
                        static_cast<T*>(operands.accumulator),
                        layout.size,
                        operands.ints,
                        operands.first_leaf,
                        operands.flag,
                        workspace.data,
                        workspace.num_segments,
                        workspace.num_partials,
                        workspace.stride};
  return ForEachPartialLaunch<T>(
      layout, operands.gradients.leaves, Tag::kLeaf, [&](dim3 grid, const auto& table) {
        const auto launch = [&](auto from_arena, auto accumulate) {
          NormsKernel<T, from_arena, accumulate><<<grid, kThreads, 0, stream>>>(pass, table);
        };
        const bool accumulate = operands.accumulator != nullptr;
        if (operands.gradients.from_arena) {
          accumulate ? launch(std::true_type{}, std::true_type{})
                     : launch(std::true_type{}, std::false_type{});
        } else {
          accumulate ? launch(std::false_type{}, std::true_type{})
                     : launch(std::false_type{}, std::false_type{});
        }
      });
}

template <typename T, bool kFromArena, bool kAccumulate>
cudaError_t PreloadOf() {
  return PreloadKernels(NormsKernel<T, kFromArena, kAccumulate, kSmallTable>,
                        NormsKernel<T, kFromArena, kAccumulate, kMediumTable>,
                        NormsKernel<T, kFromArena, kAccumulate, kLargePartialTable>);
}

}  // namespace

cudaError_t LaunchNorms(const Layout& layout, const NormsOperands& operands, cudaStream_t stream) {
  return (layout.is_double ? Launch<double> : Launch<float>)(layout, operands, stream);
}

cudaError_t PreloadNorms() {
  return FirstError({PreloadOf<float, true, false>, PreloadOf<float, false, false>,
                     PreloadOf<double, true, false>, PreloadOf<double, false, false>});
}

cudaError_t PreloadAccumulate() {
  return FirstError({PreloadOf<float, true, true>, PreloadOf<float, false, true>,
                     PreloadOf<double, true, true>, PreloadOf<double, false, true>});
}

}  // namespace jaxrenaissance
