// update: one linear sweep over weights, moments and gradients.
#include "core/update.h"
#include "kernels/launch.h"
#include "kernels/preload.cuh"
#include "kernels/segment_table.cuh"
#include "kernels/vector.cuh"

namespace jaxrenaissance {
namespace {

// The arenas of a batch. `gradient` is null where the gradients are leaves.
template <typename T>
struct Arenas {
  T* weights;
  T* moments[2];
  const T* gradient;
  int64_t gradient_stride;  // between members; 0 where they share it
  int64_t size;             // of one member
  int64_t members;
};

// A group's scalars, loaded as whole vectors: a row is 16 aligned slots.
template <typename T, typename S>
__device__ __forceinline__ GroupScalars<T> LoadRow(const S* row) {
  S slots[kRow];
#pragma unroll
  for (int i = 0; i < kRow; i += kVector) {
    const Vector<S> part = *reinterpret_cast<const Vector<S>*>(row + i);
#pragma unroll
    for (int j = 0; j < kVector; ++j) slots[i + j] = part.x[j];
  }
  return LoadGroup<T>(slots);
}

// S is the type of the scalar arena.
template <typename Rule, typename T, typename S, bool kFromArena, int kCapacity>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : kMinBlocks)
    UpdateKernel(const S* floats, int64_t floats_stride, const Arenas<T> arenas,
                 const __grid_constant__ SegmentTable<kCapacity> table) {
  const BlockPlace block = FindBlock(table, arenas.members);
  const int64_t position = VectorStart(block.tile);
  if (position >= arenas.size) return;
  const int64_t offset = block.member * arenas.size + position;
  floats += block.member * floats_stride;

  // All loads are issued before the first result is used.
  Vector<T> w, m, v, g;
  w = *reinterpret_cast<const Vector<T>*>(arenas.weights + offset);
  if (Rule::kMoments > 0) m = *reinterpret_cast<const Vector<T>*>(arenas.moments[0] + offset);
  if (Rule::kMoments > 1) v = *reinterpret_cast<const Vector<T>*>(arenas.moments[1] + offset);
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
  if (place.count == 0 || floats[kApply] == S(0)) return;
  const T factor = static_cast<T>(floats[kGradFactor]);
  const GroupScalars<T> scalars = LoadRow<T>(floats + (1 + place.tag()) * kRow);
#pragma unroll
  for (int i = 0; i < kVector; ++i) Rule::Apply(scalars, g.x[i] * factor, w.x[i], m.x[i], v.x[i]);
  StoreVector(arenas.weights + offset, place.count, w);
  if (Rule::kMoments > 0) StoreVector(arenas.moments[0] + offset, place.count, m);
  if (Rule::kMoments > 1) StoreVector(arenas.moments[1] + offset, place.count, v);
}

template <typename Rule, typename T, typename S>
cudaError_t Launch(const Layout& layout, const Floats& floats, void* weights, void* const* moments,
                   const GradientOperands& gradients, cudaStream_t stream) {
  const Arenas<T> arenas = {static_cast<T*>(weights),
                            {static_cast<T*>(moments[0]), static_cast<T*>(moments[1])},
                            static_cast<const T*>(gradients.arena),
                            gradients.arena_stride,
                            layout.size,
                            layout.members};
  const S* scalars = static_cast<const S*>(floats.data);
  return ForEachLaunch<T>(layout, gradients.leaves, Tag::kGroup, [&](dim3 grid, const auto& table) {
    if (gradients.from_arena) {
      UpdateKernel<Rule, T, S, true>
          <<<grid, kThreads, 0, stream>>>(scalars, floats.stride, arenas, table);
    } else {
      UpdateKernel<Rule, T, S, false>
          <<<grid, kThreads, 0, stream>>>(scalars, floats.stride, arenas, table);
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

cudaError_t LaunchUpdate(UpdateKind kind, const Layout& layout, const Floats& floats, void* weights,
                         void* const* moments, const GradientOperands& gradients,
                         cudaStream_t stream) {
  return WithRule(kind, [&](auto rule) {
    using Rule = decltype(rule);
    // float64 scalars beside a float32 arena: a model with leaves of both types.
    const auto launch = layout.is_double   ? Launch<Rule, double, double>
                        : floats.is_double ? Launch<Rule, float, double>
                                           : Launch<Rule, float, float>;
    return launch(layout, floats, weights, moments, gradients, stream);
  });
}

cudaError_t PreloadUpdate(UpdateKind kind) {
  return WithRule(kind, [](auto rule) {
    using Rule = decltype(rule);
    for (const auto preload : {Preload<Rule, float, float>, Preload<Rule, float, double>,
                               Preload<Rule, double, double>}) {
      if (const cudaError_t error = preload(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

}  // namespace jaxrenaissance
