// The CPU's FFI handlers: decode, check, and hand chunks of the arena to XLA's thread pool.
#include <cstring>

#include "core/prologue.h"
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
    const int64_t item = ArenaItem(call.layout.is_double);
    ForEachStretch(
        call.layout, chunk, [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
          const int64_t first_float = member * call.floats.stride;
          if (FloatAt(call.floats, first_float + kApply) == 0) return;
          const int64_t offset = (member * call.layout.size + low) * item;
          LeafType type;
          const void* gradient =
              GradientElement(call.gradients, call.layout.is_double, member, segment, low, type);
          kernels[static_cast<int>(type)](
              {Offset(call.weights, offset),
               {Offset(call.moments[0], offset), Offset(call.moments[1], offset)},
               gradient,
               high - low,
               Offset(call.floats.data, first_float * ArenaItem(call.floats.is_double)),
               segment.group});
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

ffi::Error Prologue(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  const PrologueCall call = DecodePrologue(decoder);
  if (!decoder.ok()) return decoder.error();
  KeepSubnormals keep;
  const auto run = [&](auto* floats) {
    const int64_t stride = (1 + call.num_groups) * kRow;
    for (int64_t member = 0; member < decoder.members(); ++member, floats += stride) {
      int32_t* ints = call.ints + member * kInts;
      const StepDecision decision = DecideStep(ints);
      AdvanceCounters(decision, ints);
      floats[kApply] = decision.apply ? 1 : 0;
      for (int64_t group = 0; group < call.num_groups; ++group) {
        DeriveGroup(decision, floats + (1 + group) * kRow);
      }
    }
  };
  if (call.is_double) {
    run(static_cast<double*>(call.floats));
  } else {
    run(static_cast<float*>(call.floats));
  }
  return ffi::Error::Success();
}

auto Bind() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs();
}

XLA_FFI_DEFINE_HANDLER(kUpdateSgd, (Update<Sgd, UpdateKind::kSgd>), Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateMomentum, (Update<Momentum, UpdateKind::kMomentum>), Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateNesterov, (Update<Nesterov, UpdateKind::kNesterov>), Bind());
XLA_FFI_DEFINE_HANDLER(kUpdateAdam, (Update<Adam, UpdateKind::kAdam>), Bind());
XLA_FFI_DEFINE_HANDLER(kStatistics, Statistics, Bind());
XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack, Bind());
XLA_FFI_DEFINE_HANDLER(kPack, Pack, Bind());
XLA_FFI_DEFINE_HANDLER(kPrologue, Prologue,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace

std::vector<HandlerEntry> CpuHandlers() {
  return {{"jaxrenaissance_update_sgd_v1", "execute", kUpdateSgd},
          {"jaxrenaissance_update_momentum_v1", "execute", kUpdateMomentum},
          {"jaxrenaissance_update_nesterov_v1", "execute", kUpdateNesterov},
          {"jaxrenaissance_update_adam_v1", "execute", kUpdateAdam},
          {"jaxrenaissance_statistics_v1", "execute", kStatistics},
          {"jaxrenaissance_unpack_v1", "execute", kUnpack},
          {"jaxrenaissance_pack_v1", "execute", kPack},
          {"jaxrenaissance_prologue_v1", "execute", kPrologue}};
}

const char* CpuInstructionSet() { return BestCpuKernels().name; }

}  // namespace jaxrenaissance
