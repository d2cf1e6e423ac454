// changes: one step of an update that reads weights as leaves, and writes as leaves what is to be
// added to them. For optax's contract, where the weights are the user's own arrays.
#include "core/update.h"
#include "kernels/launch.h"
#include "kernels/preload.cuh"
#include "kernels/rules.cuh"
#include "kernels/segment_table.cuh"
#include "kernels/vector.cuh"

namespace jaxrenaissance {
namespace {

// Further leaves of the segments in a table.
template <int kCapacity>
struct LeafColumn : Strides<kCapacity> {
  void* data[kCapacity];  // the segment's first element, of member 0
  uint8_t type[kCapacity];
};

template <int kCapacity>
struct LeafColumns {
  LeafColumn<kCapacity> weights;
  LeafColumn<kCapacity> changes;
  bool has_weights;
};

template <int kCapacity>
struct ChangesTable {
  static constexpr bool kServesBatches = Strides<kCapacity>::kServesBatches;

  SegmentTable<kCapacity> segments;
  LeafColumns<kCapacity> columns;

  void** Column(int number) {
    if (number == 0) return segments.data;
    return (number == 1 ? columns.weights : columns.changes).data;
  }
};

template <int kCapacity>
bool FillColumn(const Layout& layout, const Leaves& leaves, int64_t first, int64_t count,
                LeafColumn<kCapacity>& column) {
  for (int64_t i = 0; i < count; ++i) {
    const LeafForm& form = leaves.forms[layout.segments[first + i].leaf];
    column.type[i] = static_cast<uint8_t>(form.type);
  }
  return FillStrides(layout, leaves, first, count, column);
}

// Calls f with a typed pointer to the place's first element.
template <typename T, int kCapacity, typename F>
__device__ __forceinline__ void WithLeafOf(const LeafColumn<kCapacity>& column, const Place& place,
                                           uint32_t member, const F& f) {
  WithElement<T>(column.data[place.segment], static_cast<LeafType>(column.type[place.segment]),
                 place.within + static_cast<int64_t>(member) * column.stride_of(place.segment), f);
}

// The place's elements of a leaf; the others are zero.
template <typename T>
struct Load {
  int count;
  Vector<T>& out;

  template <typename L>
  __device__ __forceinline__ void operator()(const L* leaf) const {
    Vector<L> raw{};
    LoadVector(leaf, count, raw);
#pragma unroll
    for (int i = 0; i < kVector; ++i) out.x[i] = static_cast<T>(Widen(raw.x[i]));
  }
};

template <typename Rule, typename T, typename S, int kCapacity>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : kMinBlocks)
    ChangesKernel(const S* floats, int64_t floats_stride, const Arenas<T> arenas,
                  const Ratios<S> ratios, const __grid_constant__ SegmentTable<kCapacity> table,
                  const __grid_constant__ LeafColumns<kCapacity> columns) {
  const BlockPlace block = FindBlock(table, arenas.members);
  const int64_t position = VectorStart(block.tile);
  if (position >= arenas.size) return;
  const int64_t offset = block.member * arenas.size + position;
  floats += block.member * floats_stride;
  const Vector<S> header = LoadHeader(floats);

  // All loads are issued before the first result is used.
  Vector<T> w{}, m, v, g;
  if (Rule::kMoments > 0) m = *reinterpret_cast<const Vector<T>*>(arenas.moments[0] + offset);
  if (Rule::kMoments > 1) v = *reinterpret_cast<const Vector<T>*>(arenas.moments[1] + offset);
  const Place place = FindPlace<T>(table, block.tile, position);
  if (place.count == 0) return;
  WithLeaf<T>(table, place, block.member, Load<T>{place.count, g});
  if (columns.has_weights)
    WithLeafOf<T>(columns.weights, place, block.member, Load<T>{place.count, w});
  if (header.x[kApply] != S(0)) {
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
      ToChange<Rule>(scalars, ScaledGradient(call, g.x[i]), w.x[i], m.x[i], v.x[i]);
    if (Rule::kMoments > 0) StoreVector(arenas.moments[0] + offset, place.count, m);
    if (Rule::kMoments > 1) StoreVector(arenas.moments[1] + offset, place.count, v);
  } else {
    w = Vector<T>{};
  }
  WithLeafOf<T>(columns.changes, place, block.member, [&](auto* leaf) {
    using Element = std::decay_t<decltype(*leaf)>;
    Vector<Element> narrow;
#pragma unroll
    for (int i = 0; i < kVector; ++i) narrow.x[i] = Narrow<Element>(w.x[i]);
    StoreVector(leaf, place.count, narrow);
  });
}

template <typename Rule, typename T, typename S>
cudaError_t Launch(const Layout& layout, const Floats& floats, const UpdateOperands& operands,
                   const Leaves& weights, const Leaves& changes, const TableCache& tables,
                   cudaStream_t stream) {
  const Arenas<T> arenas = MakeArenas<T>(layout, operands);
  const S* scalars = static_cast<const S*>(floats.data);
  const Ratios<S> ratios = {static_cast<const S*>(operands.ratios), operands.ratios_stride};
  const Leaves& gradients = operands.gradients.leaves;
  if (layout.size * layout.members == 0) return cudaSuccess;
  return LaunchTables<ChangesTable, kSmallTable, kMediumTripleTable, kLargeTripleTable>(
      layout, {&gradients, &weights, &changes}, tables,
      [&](int64_t first, int64_t count, auto& table) {
        auto& columns = table.columns;
        columns.has_weights = !weights.empty();
        return FillTable<T>(layout, gradients, Tag::kGroup, first, count, kTile, table.segments) &&
               (weights.empty() || FillColumn(layout, weights, first, count, columns.weights)) &&
               FillColumn(layout, changes, first, count, columns.changes);
      },
      [&](const auto& table) {
        const dim3 grid(table.segments.tiles * static_cast<unsigned>(layout.members));
        ChangesKernel<Rule, T, S><<<grid, kThreads, 0, stream>>>(
            scalars, floats.stride, arenas, ratios, table.segments, table.columns);
      });
}

template <typename Rule, typename T, typename S>
cudaError_t Preload() {
  return PreloadKernels(ChangesKernel<Rule, T, S, kSmallTable>,
                        ChangesKernel<Rule, T, S, kMediumTripleTable>,
                        ChangesKernel<Rule, T, S, kLargeTripleTable>);
}

}  // namespace

cudaError_t LaunchChanges(UpdateKind kind, const Layout& layout, const Floats& floats,
                          const UpdateOperands& operands, const Leaves& weights,
                          const Leaves& changes, const TableCache& tables, cudaStream_t stream) {
  return WithRule(kind, [&](auto rule) {
    using Rule = decltype(rule);
    const auto launch = layout.is_double   ? Launch<Rule, double, double>
                        : floats.is_double ? Launch<Rule, float, double>
                                           : Launch<Rule, float, float>;
    return launch(layout, floats, operands, weights, changes, tables, stream);
  });
}

cudaError_t PreloadChanges(UpdateKind kind) {
  return WithRule(kind, [](auto rule) {
    using Rule = decltype(rule);
    return FirstError(
        {Preload<Rule, float, float>, Preload<Rule, float, double>, Preload<Rule, double, double>});
  });
}

}  // namespace jaxrenaissance
