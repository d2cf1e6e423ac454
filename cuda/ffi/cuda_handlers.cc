// The CUDA FFI handlers: decode, check, and launch on the stream that XLA gives.
#include <cuda_runtime_api.h>

#include <atomic>

#include "ffi/calls.h"
#include "ffi/handlers.h"
#include "ffi/preload.h"
#include "kernels/launch.h"

namespace jaxrenaissance {

// What the handlers keep with a compiled program.
struct CudaProgram : Program {
  static ffi::TypeId id;

  TableCache tables;

  void Prepare() {}
};

ffi::TypeId CudaProgram::id = XLA_FFI_UNKNOWN_TYPE_ID;

namespace {

constexpr ffi::TypeInfo kProgramInfo = ffi::MakeTypeInfo<CudaProgram>();

ffi::Error Checked(cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  cudaGetLastError();  // it is reported here; it must not surface in somebody else's next call
  if (error == cudaErrorInvalidValue) {
    return ffi::Error::InvalidArgument(
        "jaxrenaissance: a launch was refused: the segments do not follow each other, a batch has "
        "more than 2^31 blocks, or a member's leaf more than 2^32 elements");
  }
  return ffi::Error::Internal(std::string("jaxrenaissance: CUDA: ") + cudaGetErrorString(error));
}

std::atomic<int64_t> executions{0};

ffi::Error Launched(cudaError_t error) {
  if (error == cudaSuccess) executions.fetch_add(1, std::memory_order_relaxed);
  return Checked(error);
}

template <UpdateKind kKind, int kMoments>
ffi::Error Update(cudaStream_t stream, const CudaProgram* program, ffi::RemainingArgs args,
                  ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  const UpdateCall call = DecodeUpdate(decoder, kMoments);
  if (!decoder.ok()) return decoder.error();
  return Launched(
      LaunchUpdate(kKind, call.layout, call.floats, call.operands, program->tables, stream));
}

template <UpdateKind kKind, int kMoments>
ffi::Error Changes(cudaStream_t stream, const CudaProgram* program, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  const ChangesCall call = DecodeChanges(decoder, kMoments);
  if (!decoder.ok()) return decoder.error();
  return Launched(LaunchChanges(kKind, call.layout, call.floats, call.operands, call.weights,
                                call.changes, program->tables, stream));
}

template <UpdateKind kKind, int kMoments>
ffi::Error UpdateNorms(cudaStream_t stream, const CudaProgram* program, ffi::RemainingArgs args,
                       ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  const UpdateNormsCall call = DecodeUpdateNorms(decoder, kMoments);
  if (!decoder.ok()) return decoder.error();
  return Launched(LaunchUpdateNorms(kKind, call.layout, call.floats, call.operands, call.workspace,
                                    call.of_weights, program->tables, stream));
}

template <NormsCall (*kDecode)(Decoder&)>
ffi::Error Norms(cudaStream_t stream, const CudaProgram* program, ffi::RemainingArgs args,
                 ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  const NormsCall call = kDecode(decoder);
  if (!decoder.ok()) return decoder.error();
  return Launched(LaunchNorms(call.layout, call.operands, program->tables, stream));
}

template <FinishOperands (*kDecode)(Decoder&)>
ffi::Error Finish(cudaStream_t stream, const CudaProgram* program, ffi::RemainingArgs args,
                  ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  const FinishOperands operands = kDecode(decoder);
  if (!decoder.ok()) return decoder.error();
  return Launched(LaunchFinish(operands, stream));
}

ffi::Error Lerp(cudaStream_t stream, const CudaProgram* program, ffi::RemainingArgs args,
                ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  const LerpCall call = DecodeLerp(decoder);
  if (!decoder.ok()) return decoder.error();
  return Launched(LaunchLerp(call.layout, call.operands, program->tables, stream));
}

ffi::Error Statistics(cudaStream_t stream, const CudaProgram* program, ffi::RemainingArgs args,
                      ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  const StatisticsCall call = DecodeStatistics(decoder);
  const int64_t first_leaf = decoder.Attribute(&Attributes::first_leaf);
  if (!decoder.ok()) return decoder.error();
  return Launched(LaunchStatistics(call.layout, call.gradients, static_cast<int32_t>(first_leaf),
                                   call.ints, program->tables, stream));
}

ffi::Error Unpack(cudaStream_t stream, const CudaProgram* program, ffi::RemainingArgs args,
                  ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  const UnpackCall call = DecodeUnpack(decoder);
  if (!decoder.ok()) return decoder.error();
  return Launched(LaunchUnpack(call.layout, call.arena, call.arena_stride, call.leaves,
                               program->tables, stream));
}

template <PackCall (*kDecode)(Decoder&)>
ffi::Error Pack(cudaStream_t stream, const CudaProgram* program, ffi::RemainingArgs args,
                ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  const PackCall call = kDecode(decoder);
  if (!decoder.ok()) return decoder.error();
  return Launched(
      LaunchPack(call.layout, call.leaves, call.piece, call.arena, program->tables, stream));
}

ffi::Error Prologue(cudaStream_t stream, const CudaProgram* program, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  const PrologueCall call = DecodePrologue(decoder);
  if (!decoder.ok()) return decoder.error();
  return Launched(LaunchPrologue(call.is_double, call.floats, call.ints, call.num_groups,
                                 decoder.members(), stream));
}

template <cudaError_t (*kPreload)()>
ffi::ErrorOr<std::unique_ptr<CudaProgram>> InstantiateLoaded(ffi::Dictionary attributes) {
  PreloadOnDevices<kPreload>();
  return Instantiate<CudaProgram>(attributes);
}

template <UpdateKind kKind>
cudaError_t PreloadUpdateOf() {
  return PreloadUpdate(kKind);
}

template <UpdateKind kKind>
cudaError_t PreloadChangesOf() {
  return PreloadChanges(kKind);
}

template <UpdateKind kKind>
cudaError_t PreloadUpdateNormsOf() {
  return PreloadUpdateNorms(kKind);
}

auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::State<CudaProgram>>()
      .RemainingArgs()
      .RemainingRets();
}

#define JR_DEFINE_OP(op, impl, preload)                                                    \
  XLA_FFI_DEFINE_HANDLER(kInstantiate##op, InstantiateLoaded<preload>, BindInstantiate()); \
  XLA_FFI_DEFINE_HANDLER(kExecute##op, impl, Bind(), {ffi::Traits::kCmdBufferCompatible})

#define JR_DEFINE_RULE(rule, moments)                                          \
  JR_DEFINE_OP(Update##rule, (Update<UpdateKind::k##rule, moments>),           \
               PreloadUpdateOf<UpdateKind::k##rule>);                          \
  JR_DEFINE_OP(Changes##rule, (Changes<UpdateKind::k##rule, moments>),         \
               PreloadChangesOf<UpdateKind::k##rule>);                         \
  JR_DEFINE_OP(UpdateNorms##rule, (UpdateNorms<UpdateKind::k##rule, moments>), \
               PreloadUpdateNormsOf<UpdateKind::k##rule>)

JR_DEFINE_RULE(Sgd, 0);
JR_DEFINE_RULE(Momentum, 1);
JR_DEFINE_RULE(Nesterov, 1);
JR_DEFINE_RULE(Adam, 2);
JR_DEFINE_RULE(Lion, 1);
JR_DEFINE_OP(Statistics, Statistics, PreloadStatistics);
JR_DEFINE_OP(Norms, Norms<DecodeNorms>, PreloadNorms);
JR_DEFINE_OP(Accumulate, Norms<DecodeAccumulate>, PreloadAccumulate);
JR_DEFINE_OP(Finish, Finish<DecodeFinish>, PreloadFinish);
JR_DEFINE_OP(FinishUpdate, Finish<DecodeFinishUpdate>, PreloadFinish);
JR_DEFINE_OP(FinishRatios, Finish<DecodeFinishRatios>, PreloadFinish);
JR_DEFINE_OP(Lerp, Lerp, PreloadLerp);
JR_DEFINE_OP(Unpack, Unpack, PreloadPacking);
JR_DEFINE_OP(Pack, Pack<DecodePack>, PreloadPacking);
JR_DEFINE_OP(PackPiece, Pack<DecodePackPiece>, PreloadPacking);
JR_DEFINE_OP(Prologue, Prologue, PreloadPrologue);

}  // namespace

int64_t CudaExecutions() { return executions.load(std::memory_order_relaxed); }

#define JR_ENTRIES(name, op)                                         \
  {"jaxrenaissance_" name "_v1", "instantiate", kInstantiate##op}, { \
    "jaxrenaissance_" name "_v1", "execute", kExecute##op            \
  }

std::vector<HandlerEntry> CudaHandlers() {
  return {JR_ENTRIES("update_sgd", UpdateSgd),
          JR_ENTRIES("update_momentum", UpdateMomentum),
          JR_ENTRIES("update_nesterov", UpdateNesterov),
          JR_ENTRIES("update_adam", UpdateAdam),
          JR_ENTRIES("update_lion", UpdateLion),
          JR_ENTRIES("update_norms_sgd", UpdateNormsSgd),
          JR_ENTRIES("update_norms_momentum", UpdateNormsMomentum),
          JR_ENTRIES("update_norms_nesterov", UpdateNormsNesterov),
          JR_ENTRIES("update_norms_adam", UpdateNormsAdam),
          JR_ENTRIES("update_norms_lion", UpdateNormsLion),
          JR_ENTRIES("changes_sgd", ChangesSgd),
          JR_ENTRIES("changes_momentum", ChangesMomentum),
          JR_ENTRIES("changes_nesterov", ChangesNesterov),
          JR_ENTRIES("changes_adam", ChangesAdam),
          JR_ENTRIES("changes_lion", ChangesLion),
          JR_ENTRIES("statistics", Statistics),
          JR_ENTRIES("norms", Norms),
          JR_ENTRIES("accumulate", Accumulate),
          JR_ENTRIES("finish", Finish),
          JR_ENTRIES("finish_update", FinishUpdate),
          JR_ENTRIES("finish_ratios", FinishRatios),
          JR_ENTRIES("lerp", Lerp),
          JR_ENTRIES("unpack", Unpack),
          JR_ENTRIES("pack", Pack),
          JR_ENTRIES("pack_piece", PackPiece),
          JR_ENTRIES("prologue", Prologue)};
}

StateType CudaState() { return {"jaxrenaissance_cuda_program", &CudaProgram::id, &kProgramInfo}; }

}  // namespace jaxrenaissance
