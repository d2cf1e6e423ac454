// update: one linear sweep over weights, moments and gradients.
#include "core/update.h"
#include "kernels/preload.cuh"
#include "kernels/tiles.cuh"

namespace jaxrenaissance {
namespace {

template <typename T>
struct Arenas {
  T* weights;
  T* moments[2];
  const T* gradient;        // where gradients are an arena
  int64_t gradient_stride;  // between members
};

template <typename T>
__device__ __forceinline__ GroupScalars<T> LoadGroupOf(const Floats& floats, int64_t member,
                                                       int group) {
  return floats.is_double
             ? LoadGroup<T>(static_cast<const double*>(floats.data) + member * floats.stride, group)
             : LoadGroup<T>(static_cast<const float*>(floats.data) + member * floats.stride, group);
}

template <typename T>
__device__ __forceinline__ T LoadFloat(const Floats& floats, int64_t member, int slot) {
  const int64_t index = member * floats.stride + slot;
  return floats.is_double ? static_cast<T>(static_cast<const double*>(floats.data)[index])
                          : static_cast<T>(static_cast<const float*>(floats.data)[index]);
}

// kCapacity == 0: the gradient is an arena.
template <typename Rule, typename T, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    UpdateKernel(const Sweep sweep, const Floats floats, const Arenas<T> arenas,
                 const __grid_constant__ LeafTable<kCapacity> leaves) {
  const BlockPlace block = FindBlock(sweep);
  const int64_t member_start = block.member * sweep.size;

  // The arenas' addresses need no table, so these loads are in flight while the tile and its leaf
  // are looked up.
  Vector<T> w[kUnroll], m[kUnroll], v[kUnroll], g[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t position = VectorStart(block.tile, u);
    if (position >= sweep.size) continue;
    w[u] = *reinterpret_cast<const Vector<T>*>(arenas.weights + member_start + position);
    if (Rule::kMoments > 0)
      m[u] = *reinterpret_cast<const Vector<T>*>(arenas.moments[0] + member_start + position);
    if (Rule::kMoments > 1)
      v[u] = *reinterpret_cast<const Vector<T>*>(arenas.moments[1] + member_start + position);
    if constexpr (kCapacity == 0) {
      g[u] = *reinterpret_cast<const Vector<T>*>(arenas.gradient +
                                                 block.member * arenas.gradient_stride + position);
    }
  }
  const Tile tile = LoadTile(sweep.table, block.tile);
  const T apply = LoadFloat<T>(floats, block.member, kApply);
  const T factor = LoadFloat<T>(floats, block.member, kGradFactor);
  if (apply == T(0)) return;

  Place place[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t position = VectorStart(block.tile, u);
    place[u] = position < sweep.size ? FindPlace(tile, sweep.segments, position, block.tile * kTile)
                                     : Place{0, 0, 0, 0};
    if constexpr (kCapacity > 0) {
      if (!Holds(leaves, place[u].leaf)) place[u].count = 0;
      if (place[u].count == 0) continue;
      WithLeaf<T>(leaves, place[u].leaf, block.member, place[u].offset, [&](const auto* leaf) {
        Vector<std::decay_t<decltype(*leaf)>> raw{};
        LoadVector(leaf, place[u].count, raw);
#pragma unroll
        for (int i = 0; i < kVector; ++i) g[u].x[i] = static_cast<T>(Widen(raw.x[i]));
      });
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (place[u].count == 0) continue;
    const int64_t position = member_start + VectorStart(block.tile, u);
    const GroupScalars<T> scalars = LoadGroupOf<T>(floats, block.member, place[u].group);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      Rule::Apply(scalars, g[u].x[i] * factor, w[u].x[i], m[u].x[i], v[u].x[i]);
    }
    StoreVector(arenas.weights + position, place[u].count, w[u]);
    if (Rule::kMoments > 0) StoreVector(arenas.moments[0] + position, place[u].count, m[u]);
    if (Rule::kMoments > 1) StoreVector(arenas.moments[1] + position, place[u].count, v[u]);
  }
}

template <typename Rule, typename T>
cudaError_t Launch(const Sweep& sweep, const UpdateOperands& operands, cudaStream_t stream) {
  const Arenas<T> arenas = {
      static_cast<T*>(operands.weights),
      {static_cast<T*>(operands.moments[0]), static_cast<T*>(operands.moments[1])},
      static_cast<const T*>(operands.gradients.arena),
      operands.gradients.arena_stride};
  if (operands.gradients.leaves == nullptr) {
    if (sweep.tiles * sweep.members == 0) return cudaSuccess;
    UpdateKernel<Rule, T, 0>
        <<<GridOf(sweep), kThreads, 0, stream>>>(sweep, operands.floats, arenas, {});
    return cudaPeekAtLastError();
  }
  return ForEachLaunch(
      sweep, *operands.gradients.leaves, [&](const Sweep& part, const auto& table) {
        UpdateKernel<Rule, T>
            <<<GridOf(part), kThreads, 0, stream>>>(part, operands.floats, arenas, table);
      });
}

template <typename Rule, typename T>
cudaError_t Preload() {
  return PreloadKernels(UpdateKernel<Rule, T, 0>, UpdateKernel<Rule, T, kSmallTable>,
                        UpdateKernel<Rule, T, kMediumTable>, UpdateKernel<Rule, T, kLargeTable>);
}

template <typename F>
cudaError_t WithRule(UpdateKind kind, const F& f) {
  switch (kind) {
    case UpdateKind::kSgd:
      return f(Sgd{});
    case UpdateKind::kMomentum:
      return f(Momentum{});
    case UpdateKind::kNesterov:
      return f(Nesterov{});
    case UpdateKind::kAdam:
      return f(Adam{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchUpdate(UpdateKind kind, bool is_double, const Sweep& sweep,
                         const UpdateOperands& operands, cudaStream_t stream) {
  return WithRule(kind, [&](auto rule) {
    using Rule = decltype(rule);
    return is_double ? Launch<Rule, double>(sweep, operands, stream)
                     : Launch<Rule, float>(sweep, operands, stream);
  });
}

cudaError_t PreloadUpdate(UpdateKind kind) {
  return WithRule(kind, [](auto rule) {
    using Rule = decltype(rule);
    const cudaError_t error = Preload<Rule, float>();
    return error != cudaSuccess ? error : Preload<Rule, double>();
  });
}

}  // namespace jaxrenaissance
