// The CUDA FFI handlers: decode, check, and launch on the stream that XLA gives.
#include <cuda_runtime_api.h>

#include <atomic>

#include "ffi/calls.h"
#include "ffi/handlers.h"
#include "kernels/launch.h"

namespace jaxrenaissance {
namespace {

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

template <UpdateKind kKind, int kMoments>
ffi::Error Update(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  const UpdateCall call = DecodeUpdate(decoder, kMoments);
  if (!decoder.ok()) return decoder.error();
  return Checked(LaunchUpdate(kKind, call.layout, call.floats, call.weights, call.moments,
                              call.gradients, stream));
}

ffi::Error Statistics(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  const StatisticsCall call = DecodeStatistics(decoder);
  const int64_t first_leaf = decoder.Attribute<int64_t>("first_leaf");
  if (!decoder.ok()) return decoder.error();
  return Checked(LaunchStatistics(call.layout, call.gradients, static_cast<int32_t>(first_leaf),
                                  call.ints, stream));
}

ffi::Error Unpack(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  const UnpackCall call = DecodeUnpack(decoder);
  if (!decoder.ok()) return decoder.error();
  return Checked(LaunchUnpack(call.layout, call.arena, call.arena_stride, call.leaves, stream));
}

ffi::Error Pack(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  const PackCall call = DecodePack(decoder);
  if (!decoder.ok()) return decoder.error();
  return Checked(LaunchPack(call.layout, call.leaves, call.arena, stream));
}

ffi::Error Prologue(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  Decoder decoder(args, rets, attributes);
  const PrologueCall call = DecodePrologue(decoder);
  if (!decoder.ok()) return decoder.error();
  return Checked(LaunchPrologue(call.is_double, call.floats, call.ints, call.num_groups,
                                decoder.members(), stream));
}

// XLA asks before every execution: devices whose kernels are loaded are remembered.
template <cudaError_t (*kPreload)()>
ffi::Error Initialize(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  static std::atomic<uint64_t> done{0};
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return Checked(error);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (done.load(std::memory_order_acquire) & bit) return ffi::Error::Success();
  const cudaError_t error = kPreload();
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_release);
  return Checked(error);
}

template <UpdateKind kKind>
cudaError_t PreloadUpdateOf() {
  return PreloadUpdate(kKind);
}

auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

auto BindInitialize() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs();
}

#define JR_DEFINE_OP(op, impl, preload)                                                    \
  XLA_FFI_DEFINE_HANDLER(kExecute##op, impl, Bind(), {ffi::Traits::kCmdBufferCompatible}); \
  XLA_FFI_DEFINE_HANDLER(kInitialize##op, Initialize<preload>, BindInitialize())

JR_DEFINE_OP(UpdateSgd, (Update<UpdateKind::kSgd, 0>), PreloadUpdateOf<UpdateKind::kSgd>);
JR_DEFINE_OP(UpdateMomentum, (Update<UpdateKind::kMomentum, 1>),
             PreloadUpdateOf<UpdateKind::kMomentum>);
JR_DEFINE_OP(UpdateNesterov, (Update<UpdateKind::kNesterov, 1>),
             PreloadUpdateOf<UpdateKind::kNesterov>);
JR_DEFINE_OP(UpdateAdam, (Update<UpdateKind::kAdam, 2>), PreloadUpdateOf<UpdateKind::kAdam>);
JR_DEFINE_OP(Statistics, Statistics, PreloadStatistics);
JR_DEFINE_OP(Unpack, Unpack, PreloadPacking);
JR_DEFINE_OP(Pack, Pack, PreloadPacking);
JR_DEFINE_OP(Prologue, Prologue, PreloadPrologue);

}  // namespace

std::vector<HandlerEntry> CudaHandlers() {
  return {{"jaxrenaissance_update_sgd_v1", "execute", kExecuteUpdateSgd},
          {"jaxrenaissance_update_sgd_v1", "initialize", kInitializeUpdateSgd},
          {"jaxrenaissance_update_momentum_v1", "execute", kExecuteUpdateMomentum},
          {"jaxrenaissance_update_momentum_v1", "initialize", kInitializeUpdateMomentum},
          {"jaxrenaissance_update_nesterov_v1", "execute", kExecuteUpdateNesterov},
          {"jaxrenaissance_update_nesterov_v1", "initialize", kInitializeUpdateNesterov},
          {"jaxrenaissance_update_adam_v1", "execute", kExecuteUpdateAdam},
          {"jaxrenaissance_update_adam_v1", "initialize", kInitializeUpdateAdam},
          {"jaxrenaissance_statistics_v1", "execute", kExecuteStatistics},
          {"jaxrenaissance_statistics_v1", "initialize", kInitializeStatistics},
          {"jaxrenaissance_unpack_v1", "execute", kExecuteUnpack},
          {"jaxrenaissance_unpack_v1", "initialize", kInitializeUnpack},
          {"jaxrenaissance_pack_v1", "execute", kExecutePack},
          {"jaxrenaissance_pack_v1", "initialize", kInitializePack},
          {"jaxrenaissance_prologue_v1", "execute", kExecutePrologue},
          {"jaxrenaissance_prologue_v1", "initialize", kInitializePrologue}};
}

}  // namespace jaxrenaissance
