// The CPU's handlers of what looks at gradients and updates: statistics, norms, accumulate and
// update_norms.
#include <array>

#include "core/reduction.h"
#include "core/update.h"
#include "ffi/cpu_elements.h"
#include "ffi/cpu_sweeps.h"

namespace jaxrenaissance {
namespace {

void AtomicMin(int32_t* target, int32_t value) {
  int32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (value < seen && !__atomic_compare_exchange_n(target, &seen, value, true, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {
  }
}

ffi::Future Statistics(ffi::ThreadPool pool, const CpuProgram* program, ffi::RemainingArgs args,
                       ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  StatisticsCall call = DecodeStatistics(decoder);
  const int64_t first_leaf = decoder.Attribute(&Attributes::first_leaf);
  if (!decoder.ok()) return Failed(decoder.error());
  const Sweep sweep{pool, program->NumChunks(), Work::kLight};
  return ForEachChunk(sweep, [program, call = std::move(call), first_leaf](int64_t chunk) {
    ForEachStretch(
        *program, chunk, [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
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

std::array<Workspace, kMaxSums> WorkspacesOf(const NormsOperands& operands) {
  return {operands.workspaces[0], operands.workspaces[1], operands.workspaces[2]};
}

ffi::Future Norms(ffi::ThreadPool pool, const CpuProgram* program, ffi::RemainingArgs args,
                  ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  NormsCall call = DecodeNorms(decoder);
  if (!decoder.ok()) return Failed(decoder.error());
  const auto workspaces = WorkspacesOf(call.operands);
  return ForEachPartial(
      pool, *program, workspaces,
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

ffi::Future AccumulateGradients(ffi::ThreadPool pool, const CpuProgram* program,
                                ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  NormsCall call = DecodeAccumulate(decoder);
  if (!decoder.ok()) return Failed(decoder.error());
  const auto workspaces = WorkspacesOf(call.operands);
  return ForEachPartial(
      pool, *program, workspaces,
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
ffi::Future UpdateNorms(ffi::ThreadPool pool, const CpuProgram* program, ffi::RemainingArgs args,
                        ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
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
  return ForEachPartial(pool, *program, workspaces,
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

XLA_FFI_DEFINE_HANDLER(kStatistics, Statistics, BindCpu());
XLA_FFI_DEFINE_HANDLER(kNorms, Norms, BindCpu());
XLA_FFI_DEFINE_HANDLER(kAccumulate, AccumulateGradients, BindCpu());
XLA_FFI_DEFINE_HANDLER(kUpdateNormsSgd, (UpdateNorms<Sgd, UpdateKind::kSgd>), BindCpu());
XLA_FFI_DEFINE_HANDLER(kUpdateNormsMomentum, (UpdateNorms<Momentum, UpdateKind::kMomentum>),
                       BindCpu());
XLA_FFI_DEFINE_HANDLER(kUpdateNormsNesterov, (UpdateNorms<Nesterov, UpdateKind::kNesterov>),
                       BindCpu());
XLA_FFI_DEFINE_HANDLER(kUpdateNormsAdam, (UpdateNorms<Adam, UpdateKind::kAdam>), BindCpu());
XLA_FFI_DEFINE_HANDLER(kUpdateNormsLion, (UpdateNorms<Lion, UpdateKind::kLion>), BindCpu());

}  // namespace

std::vector<CpuTarget> CpuNormsTargets() {
  return {{"jaxrenaissance_statistics_v1", kStatistics},
          {"jaxrenaissance_norms_v1", kNorms},
          {"jaxrenaissance_accumulate_v1", kAccumulate},
          {"jaxrenaissance_update_norms_sgd_v1", kUpdateNormsSgd},
          {"jaxrenaissance_update_norms_momentum_v1", kUpdateNormsMomentum},
          {"jaxrenaissance_update_norms_nesterov_v1", kUpdateNormsNesterov},
          {"jaxrenaissance_update_norms_adam_v1", kUpdateNormsAdam},
          {"jaxrenaissance_update_norms_lion_v1", kUpdateNormsLion}};
}

}  // namespace jaxrenaissance
