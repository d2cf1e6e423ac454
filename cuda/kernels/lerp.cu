// lerp: arenas move towards another arena, leaves, or zero.
#include "core/update.h"
#include "kernels/launch.h"
#include "kernels/preload.cuh"
#include "kernels/segment_table.cuh"
#include "kernels/vector.cuh"

namespace jaxrenaissance {
namespace {

template <typename T>
struct Targets {
  T* arenas[kMaxTargets];
  int count;
};

template <typename T, LerpSource kSource, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    LerpKernel(const T* taus, int64_t taus_stride, const Targets<T> targets, const T* source,
               int64_t source_stride, int64_t size, int64_t members,
               const __grid_constant__ SegmentTable<kCapacity> table) {
  const BlockPlace block = FindBlock(table, members);
  const int64_t position = VectorStart(block.tile);
  if (position >= size) return;
  const Place place = FindPlace<T>(table, block.tile, position);
  if (place.count == 0) return;
  const T tau = taus[block.member * taus_stride + place.tag()];
  if (tau == T(0)) return;
  Vector<T> to{};
  if constexpr (kSource == LerpSource::kArena) {
    LoadVector(source + block.member * source_stride + position, place.count, to);
  } else if constexpr (kSource == LerpSource::kLeaves) {
    WithLeaf<T>(table, place, block.member, [&](const auto* leaf) {
      Vector<std::decay_t<decltype(*leaf)>> raw{};
      LoadVector(leaf, place.count, raw);
#pragma unroll
      for (int i = 0; i < kVector; ++i) to.x[i] = static_cast<T>(Widen(raw.x[i]));
    });
  }
  const int64_t offset = block.member * size + position;
#pragma unroll
  for (int k = 0; k < kMaxTargets; ++k) {
    if (k >= targets.count) break;
    Vector<T> x{};
    LoadVector(targets.arenas[k] + offset, place.count, x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x.x[i] = Lerp(x.x[i], to.x[i], tau);
    StoreVector(targets.arenas[k] + offset, place.count, x);
  }
}

template <typename T>
cudaError_t Launch(const Layout& layout, const LerpOperands& operands, const TableCache& tables,
                   cudaStream_t stream) {
  Targets<T> targets{};
  targets.count = static_cast<int>(operands.targets.size());
  for (int k = 0; k < targets.count; ++k)
    targets.arenas[k] = static_cast<T*>(operands.targets[static_cast<size_t>(k)]);
  const T* taus = static_cast<const T*>(operands.taus);
  const T* source = static_cast<const T*>(operands.arena);
  return ForEachLaunch<T>(
      layout, operands.leaves, Tag::kGroup, tables, [&](dim3 grid, const auto& table) {
        const auto launch = [&](auto kind) {
          LerpKernel<T, decltype(kind)::value><<<grid, kThreads, 0, stream>>>(
              taus, operands.taus_stride, targets, source, operands.arena_stride, layout.size,
              layout.members, table);
        };
        switch (operands.source) {
          case LerpSource::kLeaves:
            return launch(std::integral_constant<LerpSource, LerpSource::kLeaves>{});
          case LerpSource::kArena:
            return launch(std::integral_constant<LerpSource, LerpSource::kArena>{});
          case LerpSource::kZero:
            return launch(std::integral_constant<LerpSource, LerpSource::kZero>{});
        }
      });
}

template <typename T, LerpSource kSource>
cudaError_t PreloadOf() {
  return PreloadKernels(LerpKernel<T, kSource, kSmallTable>, LerpKernel<T, kSource, kMediumTable>,
                        LerpKernel<T, kSource, kLargeTable>);
}

}  // namespace

cudaError_t LaunchLerp(const Layout& layout, const LerpOperands& operands, const TableCache& tables,
                       cudaStream_t stream) {
  return (layout.is_double ? Launch<double> : Launch<float>)(layout, operands, tables, stream);
}

cudaError_t PreloadLerp() {
  return FirstError({PreloadOf<float, LerpSource::kLeaves>, PreloadOf<float, LerpSource::kArena>,
                     PreloadOf<float, LerpSource::kZero>, PreloadOf<double, LerpSource::kLeaves>,
                     PreloadOf<double, LerpSource::kArena>, PreloadOf<double, LerpSource::kZero>});
}

}  // namespace jaxrenaissance
