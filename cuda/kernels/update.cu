// update: one linear sweep over weights, moments and gradients.
#include "core/update.h"
#include "kernels/launch.h"
#include "kernels/preload.cuh"
#include "kernels/rules.cuh"
#include "kernels/segment_table.cuh"
#include "kernels/vector.cuh"

namespace jaxrenaissance {
namespace {

// S is the type of the scalar arena.
template <typename Rule, typename T, typename S, bool kFromArena, int kCapacity>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : kMinBlocks)
    UpdateKernel(const S* floats, int64_t floats_stride, bool gated, const Arenas<T> arenas,
                 const Ratios<S> ratios, const __grid_constant__ SegmentTable<kCapacity> table) {
  const BlockPlace block = FindBlock(table, arenas.members);
  const int64_t position = VectorStart(block.tile);
  if (position >= arenas.size) return;
  const int64_t offset = block.member * arenas.size + position;
  floats += block.member * floats_stride;
  const Vector<S> header = LoadHeader(floats);
  if (gated && header.x[kApply] == S(0)) return;

  // All loads are issued before the first result is used.
  Vector<T> w, m, v, e, g;
  w = *reinterpret_cast<const Vector<T>*>(arenas.weights + offset);
  if (Rule::kMoments > 0) m = *reinterpret_cast<const Vector<T>*>(arenas.moments[0] + offset);
  if (Rule::kMoments > 1) v = *reinterpret_cast<const Vector<T>*>(arenas.moments[1] + offset);
  if (arenas.ema != nullptr) e = *reinterpret_cast<const Vector<T>*>(arenas.ema + offset);
  const Place place = FindPlace<T>(table, block.tile, position);
  if constexpr (kFromArena) {
    g = *reinterpret_cast<const Vector<T>*>(arenas.gradient +
                                            block.member * arenas.gradient_stride + position);
  } else if (place.count > 0) {
    WithLeaf<T>(table, place, block.member, [&](const auto* leaf) {
      Vector<std::decay_t<decltype(*leaf)>> raw{};
      LoadVector(leaf, place.count, raw);
#pragma unroll
      for (int i = 0; i < kVector; ++i) g.x[i] = static_cast<T>(Widen(raw.x[i]));
    });
  }
  if (place.count == 0 || header.x[kApply] == S(0)) return;
  const CallScalars<T> call = LoadCall<T>(header.x);
  const S* row = floats + RowStart(place.tag());
  GroupScalars<T> scalars = LoadRow<T>(row);
  if (ratios.data != nullptr) {
    const int64_t segment = table.first_segment + place.segment;
    const S ratio = ratios.data[block.member * ratios.stride + segment];
    TakeRatio(row, static_cast<T>(ratio), scalars);
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    Apply<Rule>(scalars, ScaledGradient(call, g.x[i]), w.x[i], m.x[i], v.x[i]);
  StoreVector(arenas.weights + offset, place.count, w);
  if (Rule::kMoments > 0) StoreVector(arenas.moments[0] + offset, place.count, m);
  if (Rule::kMoments > 1) StoreVector(arenas.moments[1] + offset, place.count, v);
  if (arenas.ema != nullptr) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) e.x[i] = Lerp(e.x[i], w.x[i], call.one_minus_ema);
    StoreVector(arenas.ema + offset, place.count, e);
  }
}

template <typename Rule, typename T, typename S>
cudaError_t Launch(const Layout& layout, const Floats& floats, const UpdateOperands& operands,
                   const TableCache& tables, cudaStream_t stream) {
  const Arenas<T> arenas = MakeArenas<T>(layout, operands);
  const S* scalars = static_cast<const S*>(floats.data);
  const Ratios<S> ratios = {static_cast<const S*>(operands.ratios), operands.ratios_stride};
  const GradientOperands& gradients = operands.gradients;
  return ForEachLaunch<T>(layout, gradients.leaves, Tag::kGroup, tables,
                          [&](dim3 grid, const auto& table) {
                            if (gradients.from_arena) {
                              UpdateKernel<Rule, T, S, true><<<grid, kThreads, 0, stream>>>(
                                  scalars, floats.stride, operands.gated, arenas, ratios, table);
                            } else {
                              UpdateKernel<Rule, T, S, false><<<grid, kThreads, 0, stream>>>(
                                  scalars, floats.stride, operands.gated, arenas, ratios, table);
                            }
                          });
}

template <typename Rule, typename T, typename S>
cudaError_t Preload() {
  return PreloadKernels(
      UpdateKernel<Rule, T, S, true, kSmallTable>, UpdateKernel<Rule, T, S, true, kMediumTable>,
      UpdateKernel<Rule, T, S, true, kLargeTable>, UpdateKernel<Rule, T, S, false, kSmallTable>,
      UpdateKernel<Rule, T, S, false, kMediumTable>, UpdateKernel<Rule, T, S, false, kLargeTable>);
}

}  // namespace

cudaError_t LaunchUpdate(UpdateKind kind, const Layout& layout, const Floats& floats,
                         const UpdateOperands& operands, const TableCache& tables,
                         cudaStream_t stream) {
  return WithRule(kind, [&](auto rule) {
    using Rule = decltype(rule);
    // float64 scalars beside a float32 arena: a model with leaves of both types.
    const auto launch = layout.is_double   ? Launch<Rule, double, double>
                        : floats.is_double ? Launch<Rule, float, double>
                                           : Launch<Rule, float, float>;
    return launch(layout, floats, operands, tables, stream);
  });
}

cudaError_t PreloadUpdate(UpdateKind kind) {
  return WithRule(kind, [](auto rule) {
    using Rule = decltype(rule);
    return FirstError(
        {Preload<Rule, float, float>, Preload<Rule, float, double>, Preload<Rule, double, double>});
  });
}

}  // namespace jaxrenaissance
