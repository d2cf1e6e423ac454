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
  T* accumulator;    // null where there is none
  const T* weights;  // null where nobody asked for their part
  int64_t weights_stride;
  int64_t size;
  int32_t* ints;
  int32_t first_leaf;
  bool flag;                      // whether non-finite gradients are looked for
  int32_t* workspaces[kMaxSums];  // null where nobody asked for sums
  int64_t num_segments;
  int64_t num_partials;
  int64_t workspace_stride;
};

// What a pass does beside the look at the gradients.
enum class Extra { kNothing, kAccumulate, kWeights };

__device__ __forceinline__ double PlusSquare(double sum, float x) {
  // The square of a float is exact in float64, so that one rounding is all there is, as in two ops.
  return __fma_rn(static_cast<double>(x), static_cast<double>(x), sum);
}
__device__ __forceinline__ double PlusSquare(double sum, double x) { return sum + x * x; }
__device__ __forceinline__ double PlusProduct(double sum, float x, float y) {
  return __fma_rn(static_cast<double>(x), static_cast<double>(y), sum);
}
__device__ __forceinline__ double PlusProduct(double sum, double x, double y) {
  return sum + x * y;
}

template <typename T, bool kFromArena, Extra kExtra, int kCapacity>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8              ? 1
                                            : kExtra == Extra::kWeights ? kTrustNormsMinBlocks
                                                                        : kNormsMinBlocks)
    NormsKernel(const Pass<T> pass, const __grid_constant__ PartialTable<kCapacity> table) {
  constexpr bool kAccumulate = kExtra == Extra::kAccumulate;
  constexpr bool kWeights = kExtra == Extra::kWeights;
  const ChunkPlace place = FindChunk<T>(table);
  const int lane = threadIdx.x % kChunkLanes;
  int32_t* ints = pass.ints + static_cast<int64_t>(place.member) * kInts;
  double sums[kVector] = {}, weights[kVector] = {}, products[kVector] = {};
  bool bad = false;
  const bool is_first = kAccumulate && ints[kMicro] == 0;

  const auto look = [&](const auto* data, auto is_whole) {
    using Element = std::decay_t<decltype(*data)>;
    constexpr bool kIsWhole = decltype(is_whole)::value;
    // Some loads go out before the first is used; all of them would take the registers of other
    // blocks.
    constexpr int kInFlight =
        sizeof(Element) == 2 && !kWeights ? kNormsInFlight : kNormsInFlight / 2;
#pragma unroll
    for (int first = 0; first < kChunkVectors; first += kInFlight) {
      Vector<Element> raw[kInFlight]{};
      Vector<T> w[kWeights ? kInFlight : 1]{};
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int count = kIsWhole ? kVector : VectorCount(place, first + k);
        const int64_t within = ((first + k) * kChunkLanes + lane) * kVector;
        LoadVector(data + within, count, raw[k]);
        if constexpr (kWeights) {
          LoadVector(pass.weights + place.member * pass.weights_stride + place.position + within,
                     count, w[k]);
        }
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
            if constexpr (kWeights) {
              weights[i] = PlusSquare(weights[i], w[k].x[i]);
              products[i] = PlusProduct(products[i], w[k].x[i], static_cast<T>(g));
            }
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

  const auto write = [&](int k, double partial) {
    if (threadIdx.x != 0 || pass.workspaces[k] == nullptr) return;
    WritePartial(table, place, partial, pass.num_segments, pass.num_partials,
                 pass.workspaces[k] + place.member * pass.workspace_stride);
  };
  const double sum = SumOfPartial(SumOfChunk(sums));
  write(0, sum);
  if constexpr (kWeights) {
    write(1, SumOfPartial(SumOfChunk(weights)));
    write(2, SumOfPartial(SumOfChunk(products)));
  }
  // A sum of squares of floats is finite where they all are: no look at each of them.
  bad = __syncthreads_or(bad ||
                         (!kAccumulate && threadIdx.x == 0 && IsNonFinite(sum) && sizeof(T) == 4));
  if (threadIdx.x != 0) return;
  const int32_t leaf = pass.first_leaf + static_cast<int32_t>(place.tag());
  int32_t* first_bad = ints + kFirstBad;
  if (pass.flag && bad && *static_cast<volatile int32_t*>(first_bad) > leaf)
    atomicMin(first_bad, leaf);
}

template <typename T>
cudaError_t Launch(const Layout& layout, const NormsOperands& operands, const TableCache& tables,
                   cudaStream_t stream) {
  const Workspace& workspace = operands.workspaces[0];
  const Pass<T> pass = {static_cast<const T*>(operands.gradients.arena),
                        operands.gradients.arena_stride,
                        static_cast<T*>(operands.accumulator),
                        static_cast<const T*>(operands.weights),
                        operands.weights_stride,
                        layout.size,
                        operands.ints,
                        operands.first_leaf,
                        operands.flag,
                        {workspace.data, operands.workspaces[1].data, operands.workspaces[2].data},
                        workspace.num_segments,
                        workspace.num_partials,
                        workspace.stride};
  return ForEachPartialLaunch<T>(
      layout, operands.gradients.leaves, Tag::kLeaf, tables, [&](dim3 grid, const auto& table) {
        const auto launch = [&](auto from_arena, auto extra) {
          NormsKernel<T, decltype(from_arena)::value, decltype(extra)::value>
              <<<grid, kThreads, 0, stream>>>(pass, table);
        };
        const auto launch_from = [&](auto from_arena) {
          if (operands.accumulator != nullptr) {
            launch(from_arena, std::integral_constant<Extra, Extra::kAccumulate>{});
          } else if (operands.weights != nullptr) {
            launch(from_arena, std::integral_constant<Extra, Extra::kWeights>{});
          } else {
            launch(from_arena, std::integral_constant<Extra, Extra::kNothing>{});
          }
        };
        operands.gradients.from_arena ? launch_from(std::true_type{})
                                      : launch_from(std::false_type{});
      });
}

template <typename T, bool kFromArena, Extra kExtra>
cudaError_t PreloadOf() {
  return PreloadKernels(NormsKernel<T, kFromArena, kExtra, kSmallTable>,
                        NormsKernel<T, kFromArena, kExtra, kMediumTable>,
                        NormsKernel<T, kFromArena, kExtra, kLargePartialTable>);
}

template <Extra kExtra>
cudaError_t PreloadAll() {
  return FirstError({PreloadOf<float, true, kExtra>, PreloadOf<float, false, kExtra>,
                     PreloadOf<double, true, kExtra>, PreloadOf<double, false, kExtra>});
}

}  // namespace

cudaError_t LaunchNorms(const Layout& layout, const NormsOperands& operands,
                        const TableCache& tables, cudaStream_t stream) {
  return (layout.is_double ? Launch<double> : Launch<float>)(layout, operands, tables, stream);
}

cudaError_t PreloadNorms() {
  return FirstError({PreloadAll<Extra::kNothing>, PreloadAll<Extra::kWeights>});
}
cudaError_t PreloadAccumulate() { return PreloadAll<Extra::kAccumulate>(); }

}  // namespace jaxrenaissance
