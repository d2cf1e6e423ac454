// The CPU's handlers of what updates: update and changes.
#include <cstddef>
#include <cstring>

#include "core/update.h"
#include "ffi/cpu_elements.h"
#include "ffi/cpu_sweeps.h"

namespace jaxrenaissance {
namespace {

// How much work an element is: SGD's has no moments.
template <typename Rule>
constexpr Work kWork = Rule::kMoments == 0 ? Work::kLight : Work::kHeavy;

template <typename Rule, UpdateKind kKind>
ffi::Future Update(ffi::ThreadPool pool, const CpuProgram* program, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  UpdateCall call = DecodeUpdate(decoder, Rule::kMoments);
  if (!decoder.ok()) return Failed(decoder.error());
  const auto& kernels =
      BestCpuKernels()
          .update[call.layout.is_double][call.floats.is_double][static_cast<int>(kKind)];
  // Backwards: the statistics pass has just left the last gradients of each share in the cache.
  const Sweep sweep{pool, program->NumChunks(), kWork<Rule>, Order::kBackwards};
  return ForEachChunk(sweep, [program, call = std::move(call), &kernels](int64_t chunk) {
    ForEachStretch(
        *program, chunk, [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
          if (FloatAt(call.floats, member * call.floats.stride + kApply) == 0) return;
          TypedStretch own =
              StretchOf(call.layout, call.floats, call.operands, member, segment, low, high);
          const std::optional<double> ratio = RatioOf(call, member, segment);
          own.stretch.ratio = ratio ? &*ratio : nullptr;
          kernels[static_cast<int>(own.type)](own.stretch);
        });
  });
}

constexpr int64_t kBlock = 1024;  // elements

// Bytes, since they hold elements of either type.
struct alignas(64) Block {
  std::byte bytes[kBlock * sizeof(double)];
};

// What the weights are where an optimizer does not look at them.
const Block kZeros = {};

// Leaves of another type than the arena's go through a block that stays in the cache, so that every
// pair of types is not a loop of its own.
template <typename Rule, UpdateKind kKind>
ffi::Future Changes(ffi::ThreadPool pool, const CpuProgram* program, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  ChangesCall call = DecodeChanges(decoder, Rule::kMoments);
  if (!decoder.ok()) return Failed(decoder.error());
  // Backwards, as the update.
  const Sweep sweep{pool, program->NumChunks(), kWork<Rule>, Order::kBackwards};
  return ForEachChunk(sweep, [program, call = std::move(call)](int64_t chunk) {
    Block wide, narrow;
    const bool is_double = call.layout.is_double;
    const LeafType arena_type = call.layout.type;
    const auto& change =
        BestCpuKernels().change[is_double][call.floats.is_double][static_cast<int>(kKind)];
    const auto step = [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
      const Leaf& to = call.changes[segment.leaf];
      void* target = LeafElement(to, member, segment, low);
      void* changes = to.type == arena_type ? target : narrow.bytes;
      if (FloatAt(call.floats, member * call.floats.stride + kApply) == 0) {
        memset(changes, 0, static_cast<size_t>((high - low) * ArenaItem(is_double)));
      } else {
        TypedStretch own =
            StretchOf(call.layout, call.floats, call.operands, member, segment, low, high);
        own.stretch.changes = changes;
        own.stretch.weights = const_cast<std::byte*>(kZeros.bytes);
        if (!call.weights.empty()) {
          const Leaf& weight = call.weights[segment.leaf];
          own.stretch.weights = LeafElement(weight, member, segment, low);
          if (weight.type != arena_type) {
            ConverterOf(weight.type, arena_type)(own.stretch.weights, wide.bytes, high - low);
            own.stretch.weights = wide.bytes;
          }
        }
        const std::optional<double> ratio = RatioOf(call, member, segment);
        own.stretch.ratio = ratio ? &*ratio : nullptr;
        change[static_cast<int>(own.type)](own.stretch);
      }
      if (changes != target) ConverterOf(arena_type, to.type)(changes, target, high - low);
    };
    ForEachStretch(*program, chunk,
                   [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
                     for (; low < high; low += kBlock)
                       step(member, segment, low, std::min(low + kBlock, high));
                   });
  });
}

XLA_FFI_DEFINE_HANDLER(kUpdateSgd, (Update<Sgd, UpdateKind::kSgd>), BindCpu());
XLA_FFI_DEFINE_HANDLER(kUpdateMomentum, (Update<Momentum, UpdateKind::kMomentum>), BindCpu());
XLA_FFI_DEFINE_HANDLER(kUpdateNesterov, (Update<Nesterov, UpdateKind::kNesterov>), BindCpu());
XLA_FFI_DEFINE_HANDLER(kUpdateAdam, (Update<Adam, UpdateKind::kAdam>), BindCpu());
XLA_FFI_DEFINE_HANDLER(kUpdateLion, (Update<Lion, UpdateKind::kLion>), BindCpu());
XLA_FFI_DEFINE_HANDLER(kChangesSgd, (Changes<Sgd, UpdateKind::kSgd>), BindCpu());
XLA_FFI_DEFINE_HANDLER(kChangesMomentum, (Changes<Momentum, UpdateKind::kMomentum>), BindCpu());
XLA_FFI_DEFINE_HANDLER(kChangesNesterov, (Changes<Nesterov, UpdateKind::kNesterov>), BindCpu());
XLA_FFI_DEFINE_HANDLER(kChangesAdam, (Changes<Adam, UpdateKind::kAdam>), BindCpu());
XLA_FFI_DEFINE_HANDLER(kChangesLion, (Changes<Lion, UpdateKind::kLion>), BindCpu());

}  // namespace

std::vector<CpuTarget> CpuUpdateTargets() {
  return {{"jaxrenaissance_update_sgd_v1", kUpdateSgd},
          {"jaxrenaissance_update_momentum_v1", kUpdateMomentum},
          {"jaxrenaissance_update_nesterov_v1", kUpdateNesterov},
          {"jaxrenaissance_update_adam_v1", kUpdateAdam},
          {"jaxrenaissance_update_lion_v1", kUpdateLion},
          {"jaxrenaissance_changes_sgd_v1", kChangesSgd},
          {"jaxrenaissance_changes_momentum_v1", kChangesMomentum},
          {"jaxrenaissance_changes_nesterov_v1", kChangesNesterov},
          {"jaxrenaissance_changes_adam_v1", kChangesAdam},
          {"jaxrenaissance_changes_lion_v1", kChangesLion}};
}

}  // namespace jaxrenaissance
