// update_norms: how far an update would move the weights, without a write to any of them; or, for
// LAMB's trust ratios, the update before its learning rate, and the weights.
#include "core/update.h"
#include "kernels/launch.h"
#include "kernels/partial_table.cuh"
#include "kernels/preload.cuh"
#include "kernels/rules.cuh"
#include "kernels/vector.cuh"

namespace jaxrenaissance {
namespace {

template <typename Rule, typename T, typename S, bool kFromArena>
__global__ void __launch_bounds__(kThreads)
    UpdateNormsKernel(const S* floats, int64_t floats_stride, const Arenas<T> arenas,
                      const Ratios<S> ratios, const Workspace workspace, int32_t* of_weights,
                      const __grid_constant__ PartialTable<kLargePartialTable> table) {
  const ChunkPlace place = FindChunk<T>(table);
  const int lane = threadIdx.x % kChunkLanes;
  double sums[kVector] = {}, weights[kVector] = {};
  floats += place.member * floats_stride;
  // Without an update there is nothing to sum, though the partials must be there.
  if (place.left > 0 && floats[kApply] != S(0)) {
    const CallScalars<T> call = LoadCall<T>(floats);
    const S* row = floats + RowStart(place.tag());
    GroupScalars<T> scalars = LoadRow<T>(row);
    if (ratios.data != nullptr) {
      const int64_t segment = table.first_segment + place.segment;
      const S ratio = ratios.data[place.member * ratios.stride + segment];
      TakeRatio(row, static_cast<T>(ratio), scalars);
    }
    const auto look = [&](const auto* gradient) {
#pragma unroll 2
      for (int u = 0; u < kChunkVectors; ++u) {
        const int count = VectorCount(place, u);
        const int64_t within = (u * kChunkLanes + lane) * kVector;
        const int64_t offset = place.member * arenas.size + place.position + within;
        Vector<T> w{}, m{}, v{};
        Vector<std::decay_t<decltype(*gradient)>> raw{};
        LoadVector(arenas.weights + offset, count, w);
        if (Rule::kMoments > 0) LoadVector(arenas.moments[0] + offset, count, m);
        if (Rule::kMoments > 1) LoadVector(arenas.moments[1] + offset, count, v);
        LoadVector(gradient + within, count, raw);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const T before = w.x[i];
          const T g = ScaledGradient(call, static_cast<T>(Widen(raw.x[i])));
          double change;
          if (of_weights != nullptr) {
            change = static_cast<double>(Rule::Direction(scalars, g, before, m.x[i], v.x[i]) +
                                         scalars.wd * before);
            const double own = static_cast<double>(before);
            if (i < count) weights[i] = weights[i] + own * own;
          } else {
            Apply<Rule>(scalars, g, w.x[i], m.x[i], v.x[i]);
            change = static_cast<double>(w.x[i]) - static_cast<double>(before);
          }
          if (i < count) sums[i] = sums[i] + change * change;
        }
      }
    };
    if constexpr (kFromArena) {
      look(arenas.gradient + place.member * arenas.gradient_stride + place.position);
    } else {
      WithLeaf<T>(table, place, look);
    }
  }
  const auto write = [&](int32_t* data, double partial) {
    if (threadIdx.x != 0) return;
    WritePartial(table, place, partial, workspace.num_segments, workspace.num_partials,
                 data + place.member * workspace.stride);
  };
  write(workspace.data, SumOfPartial(SumOfChunk(sums)));
  if (of_weights != nullptr) write(of_weights, SumOfPartial(SumOfChunk(weights)));
}

template <typename Rule, typename T, typename S>
cudaError_t Launch(const Layout& layout, const Floats& floats, const UpdateOperands& operands,
                   const Workspace& workspace, int32_t* of_weights, const TableCache& tables,
                   cudaStream_t stream) {
  const Arenas<T> arenas = MakeArenas<T>(layout, operands);
  const S* scalars = static_cast<const S*>(floats.data);
  const Ratios<S> ratios = {static_cast<const S*>(operands.ratios), operands.ratios_stride};
  const GradientOperands& gradients = operands.gradients;
  return ForEachPartialLaunch<T, kLargePartialTable>(
      layout, gradients.leaves, Tag::kGroup, tables, [&](dim3 grid, const auto& table) {
        if (gradients.from_arena) {
          UpdateNormsKernel<Rule, T, S, true><<<grid, kThreads, 0, stream>>>(
              scalars, floats.stride, arenas, ratios, workspace, of_weights, table);
        } else {
          UpdateNormsKernel<Rule, T, S, false><<<grid, kThreads, 0, stream>>>(
              scalars, floats.stride, arenas, ratios, workspace, of_weights, table);
        }
      });
}

template <typename Rule, typename T, typename S>
cudaError_t Preload() {
  return PreloadKernels(UpdateNormsKernel<Rule, T, S, true>, UpdateNormsKernel<Rule, T, S, false>);
}

}  // namespace

cudaError_t LaunchUpdateNorms(UpdateKind kind, const Layout& layout, const Floats& floats,
                              const UpdateOperands& operands, const Workspace& workspace,
                              int32_t* of_weights, const TableCache& tables, cudaStream_t stream) {
  return WithRule(kind, [&](auto rule) {
    using Rule = decltype(rule);
    const auto launch = layout.is_double   ? Launch<Rule, double, double>
                        : floats.is_double ? Launch<Rule, float, double>
                                           : Launch<Rule, float, float>;
    return launch(layout, floats, operands, workspace, of_weights, tables, stream);
  });
}

cudaError_t PreloadUpdateNorms(UpdateKind kind) {
  return WithRule(kind, [](auto rule) {
    using Rule = decltype(rule);
    return FirstError(
        {Preload<Rule, float, float>, Preload<Rule, float, double>, Preload<Rule, double, double>});
  });
}

}  // namespace jaxrenaissance
