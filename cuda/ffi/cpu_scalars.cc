// The CPU's handlers of what advances the scalars: prologue, and finish in its three forms.
#include "core/prologue.h"
#include "core/reduction.h"
#include "cpu/denormals.h"
#include "ffi/calls.h"
#include "ffi/cpu_program.h"

namespace jaxrenaissance {
namespace {

template <typename S>
void DeriveGroups(const StepDecision& decision, int64_t num_groups, S* floats) {
  for (int64_t group = 0; group < num_groups; ++group)
    DeriveGroup(decision, floats + RowStart(group));
}

ffi::Error Prologue(const CpuProgram* program, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
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
ffi::Error Finish(const CpuProgram* program, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  const FinishOperands operands = kDecode(decoder);
  if (!decoder.ok()) return decoder.error();
  KeepSubnormals keep;
  for (int64_t member = 0; member < operands.members; ++member)
    (operands.is_double ? FinishMember<double> : FinishMember<float>)(operands, member);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kPrologue, Prologue, BindCpuInline());
XLA_FFI_DEFINE_HANDLER(kFinish, Finish<DecodeFinish>, BindCpuInline());
XLA_FFI_DEFINE_HANDLER(kFinishUpdate, Finish<DecodeFinishUpdate>, BindCpuInline());
XLA_FFI_DEFINE_HANDLER(kFinishRatios, Finish<DecodeFinishRatios>, BindCpuInline());

}  // namespace

std::vector<CpuTarget> CpuScalarsTargets() {
  return {{"jaxrenaissance_prologue_v1", kPrologue},
          {"jaxrenaissance_finish_v1", kFinish},
          {"jaxrenaissance_finish_update_v1", kFinishUpdate},
          {"jaxrenaissance_finish_ratios_v1", kFinishRatios}};
}

}  // namespace jaxrenaissance
