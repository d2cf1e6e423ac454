// The CPU's FFI handlers: decode, check, and hand chunks of the arena to XLA's thread pool.
#include <array>
#include <cstring>
#include <optional>

#include "core/prologue.h"
#include "core/reduction.h"
#include "core/update.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "ffi/calls.h"
#include "ffi/handlers.h"

namespace jaxrenaissance {
namespace {

// Elements a chunk: large enough that taking one costs nothing, small enough that threads end
// together.
constexpr int64_t kChunk = 1 << 16;

ffi::Future Failed(const ffi::Error& error) {
  ffi::Promise promise;
  promise.SetError(error);
  return ffi::Future(promise);
}

template <typename T>
T* Offset(T* data, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return data == nullptr ? nullptr : static_cast<T*>(static_cast<Byte*>(data) + bytes);
}

int64_t ArenaItem(bool is_double) { return is_double ? 8 : 4; }

int64_t NumChunks(const Layout& layout) {
  return layout.members * ((layout.size + kChunk - 1) / kChunk);
}

// Calls f(member, segment, low, high) for each stretch [low, high) of a segment within the chunk.
template <typename F>
void ForEachStretch(const Layout& layout, int64_t chunk, const F& f) {
  const int64_t chunks = (layout.size + kChunk - 1) / kChunk;
  const int64_t member = chunk / chunks;
  const int64_t low = (chunk % chunks) * kChunk;
  const int64_t high = std::min(low + kChunk, layout.size);
  for (int64_t i = FindSegment(layout.segments, 0, layout.num_segments, low);
       i < layout.num_segments; ++i) {
    const Segment& segment = layout.segments[i];
    if (segment.start >= high) return;
    const int64_t from = std::max(low, segment.start);
    const int64_t to = std::min(high, segment.start + segment.size);
    if (from < to) f(member, segment, from, to);
  }
}

// The address of the leaf's element behind arena position `position` of a segment.
void* LeafElement(const Leaf& leaf, int64_t member, const Segment& segment, int64_t position) {
  const int64_t element = member * leaf.stride + segment.leaf_offset + (position - segment.start);
  return Offset(leaf.data, element * LeafTypeSize(leaf.type));
}

const void* GradientElement(const GradientOperands& gradients, bool is_double, int64_t member,
                            const Segment& segment, int64_t position, LeafType& type) {
  if (gradients.from_arena) {
    type = is_double ? LeafType::kF64 : LeafType::kF32;
    return Offset(gradients.arena,
                  (member * gradients.arena_stride + position) * ArenaItem(is_double));
  }
  const Leaf& leaf = gradients.leaves[segment.leaf];
  type = leaf.type;
  return LeafElement(leaf, member, segment, position);
}

double FloatAt(const Floats& floats, int64_t index) {
  return floats.is_double ? static_cast<const double*>(floats.data)[index]
                          : static_cast<const float*>(floats.data)[index];
}

// The part [low, high) of a segment of member `member`, and its gradient's type.
struct TypedStretch {
  UpdateStretch stretch;
  LeafType type;
};

// The trust ratio of a segment, where there are any.
template <typename Call>
std::optional<double> RatioOf(const Call& call, int64_t member, const Segment& segment) {
  const UpdateOperands& operands = call.operands;
  if (operands.ratios == nullptr) return std::nullopt;
  const int64_t number = &segment - call.layout.segments;
  return FloatAt({operands.ratios, 0, call.floats.is_double, 0},
                 member * operands.ratios_stride + number);
}

TypedStretch StretchOf(const Layout& layout, const Floats& floats, const UpdateOperands& operands,
                       int64_t member, const Segment& segment, int64_t low, int64_t high) {
  const int64_t item = ArenaItem(layout.is_double);
  const int64_t offset = (member * layout.size + low) * item;
  LeafType type;
  const void* gradient =
      GradientElement(operands.gradients, layout.is_double, member, segment, low, type);
  return {{Offset(operands.weights, offset),
           {Offset(operands.moments[0], offset), Offset(operands.moments[1], offset)},
           Offset(operands.ema, offset),
           nullptr,
           gradient,
           high - low,
           Offset(floats.data, member * floats.stride * ArenaItem(floats.is_double)),
           segment.group},
          type};
}

template <typename Rule, UpdateKind kKind>
ffi::Future Update(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  UpdateCall call = DecodeUpdate(decoder, Rule::kMoments);
  if (!decoder.ok()) return Failed(decoder.error());
  const auto& kernels =
      BestCpuKernels()
          .update[call.layout.is_double][call.floats.is_double][static_cast<int>(kKind)];
  const int64_t chunks = NumChunks(call.layout);
  return ForEachChunk(pool, chunks, [call = std::move(call), &kernels, chunks](int64_t i) {
    // Backwards: the statistics pass has just left the last gradients in the cache.
    const int64_t chunk = chunks - 1 - i;
    ForEachStretch(
        call.layout, chunk, [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
          if (FloatAt(call.floats, member * call.floats.stride + kApply) == 0) return;
          TypedStretch own =
              StretchOf(call.layout, call.floats, call.operands, member, segment, low, high);
          const std::optional<double> ratio = RatioOf(call, member, segment);
          own.stretch.ratio = ratio ? &*ratio : nullptr;
          kernels[static_cast<int>(own.type)](own.stretch);
        });
  });
}

// What is read from leaves and written to leaves goes through a small arena of its own, which stays
// in the cache, so that every pair of types is not a loop of its own.
template <typename Rule, UpdateKind kKind>
ffi::Future Changes(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  ChangesCall call = DecodeChanges(decoder, Rule::kMoments);
  if (!decoder.ok()) return Failed(decoder.error());
  const int64_t chunks = NumChunks(call.layout);
  return ForEachChunk(pool, chunks, [call = std::move(call), chunks](int64_t i) {
    constexpr int64_t kBlock = 1024;  // elements
    alignas(64) double block[kBlock];
    const bool is_double = call.layout.is_double;
    const CpuKernels& kernels = BestCpuKernels();
    const auto& change = kernels.change[is_double][call.floats.is_double][static_cast<int>(kKind)];
    const auto step = [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
      const Leaf& to = call.changes[segment.leaf];
      memset(block, 0, sizeof(block));
      if (FloatAt(call.floats, member * call.floats.stride + kApply) != 0) {
        if (!call.weights.empty()) {
          const Leaf& weight = call.weights[segment.leaf];
          kernels.widen[is_double][static_cast<int>(weight.type)](
              LeafElement(weight, member, segment, low), block, high - low);
        }
        TypedStretch own =
            StretchOf(call.layout, call.floats, call.operands, member, segment, low, high);
        own.stretch.weights = block;
        const std::optional<double> ratio = RatioOf(call, member, segment);
        own.stretch.ratio = ratio ? &*ratio : nullptr;
        change[static_cast<int>(own.type)](own.stretch);
      }
      kernels.narrow[is_double][static_cast<int>(to.type)](
          block, LeafElement(to, member, segment, low), high - low);
    };
    // Backwards, as the update.
    ForEachStretch(call.layout, chunks - 1 - i,
                   [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
                     for (; low < high; low += kBlock)
                       step(member, segment, low, std::min(low + kBlock, high));
                   });
  });
}

void AtomicMin(int32_t* target, int32_t value) {
  int32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (value < seen && !__atomic_compare_exchange_n(target, &seen, value, true, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {
  }
}

ffi::Future Statistics(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  StatisticsCall call = DecodeStatistics(decoder);
  const int64_t first_leaf = decoder.Attribute<int64_t>("first_leaf");
  if (!decoder.ok()) return Failed(decoder.error());
  const int64_t chunks = NumChunks(call.layout);
  return ForEachChunk(pool, chunks, [call = std::move(call), first_leaf](int64_t chunk) {
    ForEachStretch(
        call.layout, chunk, [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
          LeafType type;
          const void* gradient =
              GradientElement(call.gradients, call.layout.is_double, member, segment, low, type);
          if (BestCpuKernels().non_finite[static_cast<int>(type)](gradient, high - low)) {
            AtomicMin(call.ints + member * kInts + kFirstBad,
                      static_cast<int32_t>(first_leaf + segment.leaf));
          }
        });
  });
}

// The sums of one chunk, for each workspace.
using ChunkSums = std::array<double, kMaxSums>;

// Calls sum(member, segment, low, high) for each chunk of the partials' tree in a task's partials,
// and writes these to the workspaces that are there.
template <typename F>
ffi::Future ForEachPartial(ffi::ThreadPool pool, const Layout& layout,
                           const std::array<Workspace, kMaxSums>& workspaces, const F& sum) {
  // A task is as many partials as a chunk of the arena has, at most.
  constexpr int64_t kPartialsATask = kChunk / kPartialElements;
  int64_t partials = 0;
  std::vector<int64_t> firsts;  // the number of each segment's first partial; then the end
  for (int64_t i = 0; i < layout.num_segments; ++i) {
    firsts.push_back(partials);
    partials += NumPartials(layout.segments[i].size);
  }
  firsts.push_back(partials);
  const int64_t tasks = (partials + kPartialsATask - 1) / kPartialsATask;
  return ForEachChunk(
      pool, tasks * layout.members,
      [layout, workspaces, sum, firsts = std::move(firsts), tasks, partials](int64_t task) {
        const int64_t member = task / tasks;
        int64_t partial = task % tasks * kPartialsATask;
        const int64_t end = std::min(partial + kPartialsATask, partials);
        int64_t i = std::upper_bound(firsts.begin(), firsts.end(), partial) - firsts.begin() - 1;
        for (; partial < end; ++partial) {
          while (firsts[i + 1] <= partial) ++i;
          const Segment& segment = layout.segments[i];
          double sums[kMaxSums][kPartialChunks] = {};
          const int64_t first = (partial - firsts[i]) * kPartialElements;
          for (int64_t c = 0; c < kPartialChunks; ++c) {
            const int64_t low = first + c * kChunkElements;
            const int64_t high = std::min(low + kChunkElements, segment.size);
            if (low >= high) break;
            const ChunkSums own = sum(member, segment, segment.start + low, segment.start + high);
            for (int k = 0; k < kMaxSums; ++k) sums[k][c] = own[static_cast<size_t>(k)];
          }
          for (int k = 0; k < kMaxSums; ++k) {
            const Workspace& workspace = workspaces[static_cast<size_t>(k)];
            if (workspace.data == nullptr) continue;
            int32_t* words = workspace.data + member * workspace.stride;
            PartialsOf(words, layout.num_segments)[partial] = SumOfEight(sums[k]);
            if (partial == firsts[i]) words[i] = static_cast<int32_t>(partial);
            if (partial + 1 == partials)
              words[layout.num_segments] = static_cast<int32_t>(partials);
          }
        }
      });
}

std::array<Workspace, kMaxSums> WorkspacesOf(const NormsOperands& operands) {
  return {operands.workspaces[0], operands.workspaces[1], operands.workspaces[2]};
}

ffi::Future Norms(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  NormsCall call = DecodeNorms(decoder);
  if (!decoder.ok()) return Failed(decoder.error());
  const Layout layout = call.layout;
  const auto workspaces = WorkspacesOf(call.operands);
  return ForEachPartial(
      pool, layout, workspaces,
      [call = std::move(call)](int64_t member, const Segment& segment, int64_t low, int64_t high) {
        const NormsOperands& operands = call.operands;
        LeafType type;
        const void* gradient =
            GradientElement(operands.gradients, call.layout.is_double, member, segment, low, type);
        const int t = static_cast<int>(type);
        const double sum = BestCpuKernels().chunk_sum[t](gradient, high - low);
        // The sum is finite where all elements are, or large float64 ones overflow in it.
        if (operands.flag && IsNonFinite(sum) &&
            BestCpuKernels().non_finite[t](gradient, high - low)) {
          AtomicMin(operands.ints + member * kInts + kFirstBad,
                    static_cast<int32_t>(operands.first_leaf + segment.leaf));
        }
        ChunkSums sums = {sum};
        if (operands.weights != nullptr) {
          const bool is_double = call.layout.is_double;
          const void* weights = Offset(
              operands.weights, (member * operands.weights_stride + low) * ArenaItem(is_double));
          const LeafType arena_type = is_double ? LeafType::kF64 : LeafType::kF32;
          sums[1] = BestCpuKernels().chunk_sum[static_cast<int>(arena_type)](weights, high - low);
          if (operands.workspaces[2].data != nullptr) {
            sums[2] =
                BestCpuKernels().chunk_product_sum[is_double][t](gradient, weights, high - low);
          }
        }
        return sums;
      });
}

ffi::Future AccumulateGradients(ffi::ThreadPool pool, ffi::RemainingArgs args,
                                ffi::RemainingRets rets, ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  NormsCall call = DecodeAccumulate(decoder);
  if (!decoder.ok()) return Failed(decoder.error());
  const Layout layout = call.layout;
  const auto workspaces = WorkspacesOf(call.operands);
  return ForEachPartial(
      pool, layout, workspaces,
      [call = std::move(call)](int64_t member, const Segment& segment, int64_t low, int64_t high) {
        const NormsOperands& operands = call.operands;
        const bool is_double = call.layout.is_double;
        int32_t* ints = operands.ints + member * kInts;
        LeafType type;
        const void* gradient =
            GradientElement(operands.gradients, is_double, member, segment, low, type);
        void* sum =
            Offset(operands.accumulator, (member * call.layout.size + low) * ArenaItem(is_double));
        const bool bad = BestCpuKernels().accumulate[is_double][static_cast<int>(type)](
            gradient, sum, high - low, ints[kMicro] == 0);
        if (operands.flag && bad)
          AtomicMin(ints + kFirstBad, static_cast<int32_t>(operands.first_leaf + segment.leaf));
        if (operands.workspaces[0].data == nullptr) return ChunkSums{};
        const LeafType arena_type = is_double ? LeafType::kF64 : LeafType::kF32;
        return ChunkSums{BestCpuKernels().chunk_sum[static_cast<int>(arena_type)](sum, high - low)};
      });
}

template <typename Rule, UpdateKind kKind>
ffi::Future UpdateNorms(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  UpdateNormsCall call = DecodeUpdateNorms(decoder, Rule::kMoments);
  if (!decoder.ok()) return Failed(decoder.error());
  const Layout layout = call.layout;
  Workspace of_weights = call.workspace;
  of_weights.data = call.of_weights;
  const std::array<Workspace, kMaxSums> workspaces = {call.workspace, of_weights, Workspace{}};
  const bool is_direction = call.of_weights != nullptr;
  const auto& all =
      is_direction ? BestCpuKernels().chunk_direction_sum : BestCpuKernels().chunk_update_sum;
  const auto& kernels = all[layout.is_double][call.floats.is_double][static_cast<int>(kKind)];
  return ForEachPartial(pool, layout, workspaces,
                        [call = std::move(call), &kernels, is_direction](
                            int64_t member, const Segment& segment, int64_t low, int64_t high) {
                          // Without an update there is nothing to sum.
                          if (FloatAt(call.floats, member * call.floats.stride + kApply) == 0)
                            return ChunkSums{};
                          TypedStretch own = StretchOf(call.layout, call.floats, call.operands,
                                                       member, segment, low, high);
                          const std::optional<double> ratio = RatioOf(call, member, segment);
                          own.stretch.ratio = ratio ? &*ratio : nullptr;
                          ChunkSums sums = {kernels[static_cast<int>(own.type)](own.stretch)};
                          if (is_direction) {
                            const LeafType arena_type =
                                call.layout.is_double ? LeafType::kF64 : LeafType::kF32;
                            sums[1] = BestCpuKernels().chunk_sum[static_cast<int>(arena_type)](
                                own.stretch.weights, high - low);
                          }
                          return sums;
                        });
}

ffi::Future LerpArenas(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  LerpCall call = DecodeLerp(decoder);
  if (!decoder.ok()) return Failed(decoder.error());
  const int64_t chunks = NumChunks(call.layout);
  return ForEachChunk(pool, chunks, [call = std::move(call)](int64_t chunk) {
    const LerpOperands& operands = call.operands;
    const bool is_double = call.layout.is_double;
    const int64_t item = ArenaItem(is_double);
    ForEachStretch(
        call.layout, chunk, [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
          const double tau = FloatAt({operands.taus, 0, is_double, 0},
                                     member * operands.taus_stride + segment.group);
          if (tau == 0) return;
          LeafType type = is_double ? LeafType::kF64 : LeafType::kF32;
          const void* target = nullptr;
          if (operands.source == LerpSource::kArena) {
            target = Offset(operands.arena, (member * operands.arena_stride + low) * item);
          } else if (operands.source == LerpSource::kLeaves) {
            const Leaf& leaf = operands.leaves[segment.leaf];
            type = leaf.type;
            target = LeafElement(leaf, member, segment, low);
          }
          for (void* data : operands.targets) {
            BestCpuKernels().lerp[is_double][static_cast<int>(type)](
                Offset(data, (member * call.layout.size + low) * item), target, high - low, tau);
          }
        });
  });
}

ffi::Future Unpack(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  UnpackCall call = DecodeUnpack(decoder);
  if (!decoder.ok()) return Failed(decoder.error());
  const int64_t chunks = NumChunks(call.layout);
  return ForEachChunk(pool, chunks, [call = std::move(call)](int64_t chunk) {
    ForEachStretch(
        call.layout, chunk, [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
          const Leaf& leaf = call.leaves[segment.leaf];
          const int64_t offset =
              (member * call.arena_stride + low) * ArenaItem(call.layout.is_double);
          BestCpuKernels().narrow[call.layout.is_double][static_cast<int>(leaf.type)](
              Offset(call.arena, offset), LeafElement(leaf, member, segment, low), high - low);
        });
  });
}

ffi::Future Pack(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  PackCall call = DecodePack(decoder);
  if (!decoder.ok()) return Failed(decoder.error());
  const int64_t chunks = NumChunks(call.layout);
  return ForEachChunk(pool, chunks, [call = std::move(call)](int64_t chunk) {
    const int64_t item = ArenaItem(call.layout.is_double);
    const int64_t chunks_of_member = (call.layout.size + kChunk - 1) / kChunk;
    const int64_t member_of_chunk = chunk / chunks_of_member;
    int64_t written = (chunk % chunks_of_member) * kChunk;
    const int64_t end = std::min(written + kChunk, call.layout.size);
    const auto zero_until = [&](int64_t position) {
      if (position <= written) return;
      memset(Offset(call.arena, (member_of_chunk * call.layout.size + written) * item), 0,
             static_cast<size_t>((position - written) * item));
    };
    ForEachStretch(call.layout, chunk,
                   [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
                     zero_until(low);
                     const Leaf& leaf = call.leaves[segment.leaf];
                     BestCpuKernels().widen[call.layout.is_double][static_cast<int>(leaf.type)](
                         LeafElement(leaf, member, segment, low),
                         Offset(call.arena, (member * call.layout.size + low) * item), high - low);
                     written = high;
                   });
    zero_until(end);
  });
}

template <typename S>
void DeriveGroups(const StepDecision& decision, int64_t num_groups, S* floats) {
  for (int64_t group = 0; group < num_groups; ++group)
    DeriveGroup(decision, floats + RowStart(group));
}

ffi::Error Prologue(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  const PrologueCall call = DecodePrologue(decoder);
  if (!decoder.ok()) return decoder.error();
  KeepSubnormals keep;
  const auto run = [&](auto* floats) {
    for (int64_t member = 0; member < decoder.members(); ++member) {
      int32_t* ints = call.ints + member * kInts;
      const StepDecision decision = DecideStep(ints);
      AdvanceState(decision, kNoNorm, floats, ints);
      DeriveGroups(decision, call.num_groups, floats);
      floats += RowStart(call.num_groups);
    }
  };
  if (call.is_double) {
    run(static_cast<double*>(call.floats));
  } else {
    run(static_cast<float*>(call.floats));
  }
  return ffi::Error::Success();
}

// The sum of a segment of a member's workspace.
double SumOfSegment(const Workspace& workspace, int64_t member, int64_t segment) {
  int32_t* words = workspace.data + member * workspace.stride;
  const double* partials = PartialsOf(words, workspace.num_segments);
  PairwiseSum sum;
  for (int32_t p = words[segment]; p < words[segment + 1]; ++p) sum.Push(partials[p]);
  return sum.Total();
}

// The sum over all segments of workspaces [low, high) of a member.
double SumOfSegments(const Workspaces& all, int low, int high, int64_t member) {
  PairwiseSum sum;
  for (int k = low; k < high; ++k) {
    for (int64_t i = 0; i < all.each[k].num_segments; ++i)
      sum.Push(SumOfSegment(all.each[k], member, i));
  }
  return sum.Total();
}

// The trust ratio of each segment of the gradients' arenas. Workspaces of weights, and of products,
// follow those of the gradients in the same order.
template <typename S>
void WriteRatios(const FinishOperands& operands, int64_t member, const S* floats) {
  const Workspaces& all = operands.workspaces;
  for (int k = 0; k < all.gradients; ++k) {
    const int64_t segments = all.each[k].num_segments;
    S* ratios = static_cast<S*>(operands.ratios[k]) + member * segments;
    for (int64_t i = 0; i < segments; ++i) {
      const auto sum = [&](int series) {
        return SumOfSegment(all.each[k + series * all.gradients], member, i);
      };
      const bool has_products = operands.trust == TrustRule::kLarsAsOptax;
      const TrustSums sums = {sum(1), sum(0), has_products ? sum(2) : 0.0};
      const S* row = floats + RowStart(operands.groups[k][i]);
      ratios[i] = static_cast<S>(TrustRatio(operands.trust, sums, floats, row));
    }
  }
}

template <typename S>
void FinishMember(const FinishOperands& operands, int64_t member) {
  const Workspaces& all = operands.workspaces;
  S* floats = static_cast<S*>(operands.floats) + member * RowStart(operands.num_groups);
  if (operands.kind == FinishKind::kUpdateNorm) {
    const double sum = SumOfSegments(all, 0, all.count, member);
    floats[kUpdateNorm] = floats[kApply] == S(0) ? S(0) : static_cast<S>(SquareRoot(sum));
    return;
  }
  if (operands.kind == FinishKind::kRatios) return WriteRatios(operands, member, floats);

  int32_t* ints = operands.ints + member * kInts;
  const StepDecision decision = DecideStep(ints);
  const double sum = SumOfSegments(all, 0, all.gradients, member);
  const double divisor = AdvanceState(decision, sum, floats, ints);
  const auto [low, high] = WeightsOf(all);
  if (low < high)
    floats[kParamNorm] = static_cast<S>(SquareRoot(SumOfSegments(all, low, high, member)));
  DeriveGroups(decision, operands.num_groups, floats);
  for (int k = 0; k < all.gradients; ++k) {
    if (operands.norms[k] == nullptr) continue;
    S* norms = static_cast<S*>(operands.norms[k]) + member * all.each[k].num_segments;
    for (int64_t i = 0; i < all.each[k].num_segments; ++i)
      norms[i] = static_cast<S>(SquareRoot(SumOfSegment(all.each[k], member, i)) / divisor);
  }
  if (operands.trust != TrustRule::kNone) WriteRatios(operands, member, floats);
}

template <FinishOperands (*kDecode)(Decoder&)>
ffi::Error Finish(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  const FinishOperands operands = kDecode(decoder);
  if (!decoder.ok()) return decoder.error();
  KeepSubnormals keep;
  for (int64_t member = 0; member < operands.members; ++member)
    (operands.is_double ? FinishMember<double> : FinishMember<float>)(operands, member);
  return ffi::Error::Success();
}

auto Bind() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs();
}

// For what is too little work for a pool.
auto BindInline() { return ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs(); }

XLA_FFI_DEFINE_HANDLER(kUpdateSgd, (Update<Sgd, UpdateKind::kSgd>), Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateMomentum, (Update<Momentum, UpdateKind::kMomentum>), Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateNesterov, (Update<Nesterov, UpdateKind::kNesterov>), Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateAdam, (Update<Adam, UpdateKind::kAdam>), Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateLion, (Update<Lion, UpdateKind::kLion>), Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateNormsLion, (UpdateNorms<Lion, UpdateKind::kLion>), Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateNormsSgd, (UpdateNorms<Sgd, UpdateKind::kSgd>), Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateNormsMomentum, (UpdateNorms<Momentum, UpdateKind::kMomentum>),
                       Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateNormsNesterov, (UpdateNorms<Nesterov, UpdateKind::kNesterov>),
                       Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateNormsAdam, (UpdateNorms<Adam, UpdateKind::kAdam>), Bind());
XLA_FFI_DEFINE_HANDLER(kChangesSgd, (Changes<Sgd, UpdateKind::kSgd>), Bind());
XLA_FFI_DEFINE_HANDLER(kChangesMomentum, (Changes<Momentum, UpdateKind::kMomentum>), Bind());
XLA_FFI_DEFINE_HANDLER(kChangesNesterov, (Changes<Nesterov, UpdateKind::kNesterov>), Bind());
XLA_FFI_DEFINE_HANDLER(kChangesAdam, (Changes<Adam, UpdateKind::kAdam>), Bind());
XLA_FFI_DEFINE_HANDLER(kChangesLion, (Changes<Lion, UpdateKind::kLion>), Bind());
XLA_FFI_DEFINE_HANDLER(kStatistics, Statistics, Bind());
XLA_FFI_DEFINE_HANDLER(kNorms, Norms, Bind());
XLA_FFI_DEFINE_HANDLER(kAccumulate, AccumulateGradients, Bind());
XLA_FFI_DEFINE_HANDLER(kLerp, LerpArenas, Bind());
XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack, Bind());
XLA_FFI_DEFINE_HANDLER(kPack, Pack, Bind());
XLA_FFI_DEFINE_HANDLER(kPrologue, Prologue, BindInline());
XLA_FFI_DEFINE_HANDLER(kFinish, Finish<DecodeFinish>, BindInline());
XLA_FFI_DEFINE_HANDLER(kFinishUpdate, Finish<DecodeFinishUpdate>, BindInline());
XLA_FFI_DEFINE_HANDLER(kFinishRatios, Finish<DecodeFinishRatios>, BindInline());

}  // namespace

std::vector<HandlerEntry> CpuHandlers() {
  return {{"jaxrenaissance_update_sgd_v1", "execute", kUpdateSgd},
          {"jaxrenaissance_update_momentum_v1", "execute", kUpdateMomentum},
          {"jaxrenaissance_update_nesterov_v1", "execute", kUpdateNesterov},
          {"jaxrenaissance_update_adam_v1", "execute", kUpdateAdam},
          {"jaxrenaissance_update_lion_v1", "execute", kUpdateLion},
          {"jaxrenaissance_update_norms_lion_v1", "execute", kUpdateNormsLion},
          {"jaxrenaissance_update_norms_sgd_v1", "execute", kUpdateNormsSgd},
          {"jaxrenaissance_update_norms_momentum_v1", "execute", kUpdateNormsMomentum},
          {"jaxrenaissance_update_norms_nesterov_v1", "execute", kUpdateNormsNesterov},
          {"jaxrenaissance_update_norms_adam_v1", "execute", kUpdateNormsAdam},
          {"jaxrenaissance_changes_sgd_v1", "execute", kChangesSgd},
          {"jaxrenaissance_changes_momentum_v1", "execute", kChangesMomentum},
          {"jaxrenaissance_changes_nesterov_v1", "execute", kChangesNesterov},
          {"jaxrenaissance_changes_adam_v1", "execute", kChangesAdam},
          {"jaxrenaissance_changes_lion_v1", "execute", kChangesLion},
          {"jaxrenaissance_statistics_v1", "execute", kStatistics},
          {"jaxrenaissance_norms_v1", "execute", kNorms},
          {"jaxrenaissance_accumulate_v1", "execute", kAccumulate},
          {"jaxrenaissance_lerp_v1", "execute", kLerp},
          {"jaxrenaissance_unpack_v1", "execute", kUnpack},
          {"jaxrenaissance_pack_v1", "execute", kPack},
          {"jaxrenaissance_prologue_v1", "execute", kPrologue},
          {"jaxrenaissance_finish_v1", "execute", kFinish},
          {"jaxrenaissance_finish_update_v1", "execute", kFinishUpdate},
          {"jaxrenaissance_finish_ratios_v1", "execute", kFinishRatios}};
}

const char* CpuInstructionSet() { return BestCpuKernels().name; }

}  // namespace jaxrenaissance
