// The CUDA FFI handlers: decode, check, and launch on the stream that XLA gives.
#include <cuda_runtime_api.h>

#include <atomic>

#include "core/scalars.h"
#include "ffi/calls.h"
#include "ffi/handlers.h"
#include "kernels/launch.h"
#include "kernels/tuning.h"

namespace jaxrenaissance {
namespace {

ffi::Error Checked(cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  cudaGetLastError();  // the error is ours and reported; it must not surface in somebody else's
                       // next call
  return ffi::Error::Internal(std::string("jaxrenaissance: CUDA: ") + cudaGetErrorString(error));
}

constexpr int64_t kTables = 2;  // tiles, segments

Sweep MakeSweep(Decoder& decoder, const Layout& layout) {
  return {
      static_cast<const Tile*>(decoder.Table(0)), layout.segments, layout.size, layout.members, 0,
      (layout.size + kTile - 1) / kTile};
}

Leaves Spread(std::vector<Leaf> leaves, ffi::Span<const int64_t> tile_ranges) {
  Leaves result{std::move(leaves), {}};
  const int64_t count = static_cast<int64_t>(result.leaves.size());
  for (size_t i = 0; 2 * i + 1 < tile_ranges.size(); ++i) {
    const int64_t first = static_cast<int64_t>(i) * kLargeTable;
    result.ranges.push_back({first, std::min<int64_t>(kLargeTable, count - first),
                             tile_ranges[2 * i], tile_ranges[2 * i + 1]});
  }
  return result;
}

// A block of threads a member and tile: what a grid cannot hold is refused rather than launched in
// part.
ffi::Error CheckGrid(const Sweep& sweep) {
  if (sweep.tiles * sweep.members <= INT32_MAX) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(
      "jaxrenaissance: the batch of arenas is larger than one grid of blocks");
}

template <UpdateKind kKind, int kMoments>
ffi::Error Update(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  int64_t members, ffi::Span<const int64_t> shared,
                  ffi::Span<const int64_t> tile_ranges, int64_t from_arena) {
  Decoder decoder(args, rets, kTables, members, shared);
  UpdateCall call = DecodeUpdate(decoder, kMoments, from_arena != 0);
  const Sweep sweep = MakeSweep(decoder, call.layout);
  if (!decoder.ok()) return decoder.error();
  if (ffi::Error error = CheckGrid(sweep); error.failure()) return error;
  const Leaves leaves = Spread(std::move(call.gradients.leaves), tile_ranges);
  return Checked(LaunchUpdate(kKind, call.is_double, sweep,
                              {call.floats,
                               call.weights,
                               {call.moments[0], call.moments[1]},
                               {call.gradients.from_arena ? nullptr : &leaves, call.gradients.arena,
                                call.gradients.arena_stride}},
                              stream));
}

ffi::Error Statistics(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      int64_t members, ffi::Span<const int64_t> shared,
                      ffi::Span<const int64_t> tile_ranges, int64_t from_arena, int64_t first_leaf,
                      int64_t size, int64_t is_double) {
  Decoder decoder(args, rets, kTables, members, shared);
  StatisticsCall call = DecodeStatistics(decoder, from_arena != 0, size, is_double != 0);
  const Sweep sweep = MakeSweep(decoder, call.layout);
  if (!decoder.ok()) return decoder.error();
  if (ffi::Error error = CheckGrid(sweep); error.failure()) return error;
  const Leaves leaves = Spread(std::move(call.gradients.leaves), tile_ranges);
  return Checked(LaunchStatistics(call.is_double, sweep,
                                  {call.gradients.from_arena ? nullptr : &leaves,
                                   call.gradients.arena, call.gradients.arena_stride},
                                  static_cast<int32_t>(first_leaf), call.ints, stream));
}

ffi::Error Unpack(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  int64_t members, ffi::Span<const int64_t> shared,
                  ffi::Span<const int64_t> tile_ranges) {
  Decoder decoder(args, rets, kTables, members, shared);
  PackingCall call = DecodeUnpack(decoder);
  const Sweep sweep = MakeSweep(decoder, call.layout);
  if (!decoder.ok()) return decoder.error();
  if (ffi::Error error = CheckGrid(sweep); error.failure()) return error;
  return Checked(LaunchUnpack(call.is_double, sweep, call.arena,
                              Spread(std::move(call.leaves), tile_ranges), stream));
}

ffi::Error Pack(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                int64_t members, ffi::Span<const int64_t> shared,
                ffi::Span<const int64_t> tile_ranges) {
  Decoder decoder(args, rets, kTables, members, shared);
  PackingCall call = DecodePack(decoder);
  const Sweep sweep = MakeSweep(decoder, call.layout);
  if (!decoder.ok()) return decoder.error();
  if (ffi::Error error = CheckGrid(sweep); error.failure()) return error;
  return Checked(LaunchPack(call.is_double, sweep, Spread(std::move(call.leaves), tile_ranges),
                            call.arena, stream));
}

ffi::Error Prologue(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t members, ffi::Span<const int64_t> shared, int64_t num_floats) {
  Decoder decoder(args, rets, 0, members, shared);
  const PrologueCall call = DecodePrologue(decoder, num_floats);
  if (!decoder.ok()) return decoder.error();
  if (members == 0) return ffi::Error::Success();
  return Checked(
      LaunchPrologue(call.is_double, call.floats, call.ints, call.num_groups, members, stream));
}

// XLA asks before every execution: devices whose kernels are loaded are remembered.
template <typename F>
ffi::Error OncePerDevice(std::atomic<uint64_t>& done, const F& preload) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return Checked(error);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (done.load(std::memory_order_acquire) & bit) return ffi::Error::Success();
  const cudaError_t error = preload();
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_release);
  return Checked(error);
}

template <UpdateKind kKind>
ffi::Error InitializeUpdate(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  static std::atomic<uint64_t> done{0};
  return OncePerDevice(done, [] { return PreloadUpdate(kKind); });
}

ffi::Error InitializePacking(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  static std::atomic<uint64_t> done{0};
  return OncePerDevice(done, PreloadPacking);
}

ffi::Error InitializeStatistics(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  static std::atomic<uint64_t> done{0};
  return OncePerDevice(done, PreloadStatistics);
}

ffi::Error InitializePrologue(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  static std::atomic<uint64_t> done{0};
  return OncePerDevice(done, PreloadPrologue);
}

auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("members")
      .Attr<ffi::Span<const int64_t>>("shared");
}

auto BindSweep() { return Bind().Attr<ffi::Span<const int64_t>>("tile_ranges"); }

auto BindInitialize() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs();
}

#define JR_DEFINE(name, impl, binding) \
  XLA_FFI_DEFINE_HANDLER(name, impl, binding, {ffi::Traits::kCmdBufferCompatible})

JR_DEFINE(kUpdateSgd, (Update<UpdateKind::kSgd, 0>), BindSweep().Attr<int64_t>("from_arena"));
JR_DEFINE(kUpdateMomentum, (Update<UpdateKind::kMomentum, 1>),
          BindSweep().Attr<int64_t>("from_arena"));
JR_DEFINE(kUpdateNesterov, (Update<UpdateKind::kNesterov, 1>),
          BindSweep().Attr<int64_t>("from_arena"));
JR_DEFINE(kUpdateAdam, (Update<UpdateKind::kAdam, 2>), BindSweep().Attr<int64_t>("from_arena"));
JR_DEFINE(kStatistics, Statistics,
          BindSweep()
              .Attr<int64_t>("from_arena")
              .Attr<int64_t>("first_leaf")
              .Attr<int64_t>("size")
              .Attr<int64_t>("is_double"));
JR_DEFINE(kUnpack, Unpack, BindSweep());
JR_DEFINE(kPack, Pack, BindSweep());
JR_DEFINE(kPrologue, Prologue, Bind().Attr<int64_t>("num_floats"));

XLA_FFI_DEFINE_HANDLER(kInitializeSgd, InitializeUpdate<UpdateKind::kSgd>, BindInitialize());
XLA_FFI_DEFINE_HANDLER(kInitializeMomentum, InitializeUpdate<UpdateKind::kMomentum>,
                       BindInitialize());
XLA_FFI_DEFINE_HANDLER(kInitializeNesterov, InitializeUpdate<UpdateKind::kNesterov>,
                       BindInitialize());
XLA_FFI_DEFINE_HANDLER(kInitializeAdam, InitializeUpdate<UpdateKind::kAdam>, BindInitialize());
XLA_FFI_DEFINE_HANDLER(kInitializePacking, InitializePacking, BindInitialize());
XLA_FFI_DEFINE_HANDLER(kInitializeStatistics, InitializeStatistics, BindInitialize());
XLA_FFI_DEFINE_HANDLER(kInitializePrologue, InitializePrologue, BindInitialize());

}  // namespace

std::vector<HandlerEntry> CudaHandlers() {
  return {{"jaxrenaissance_update_sgd_v1", "execute", kUpdateSgd},
          {"jaxrenaissance_update_sgd_v1", "initialize", kInitializeSgd},
          {"jaxrenaissance_update_momentum_v1", "execute", kUpdateMomentum},
          {"jaxrenaissance_update_momentum_v1", "initialize", kInitializeMomentum},
          {"jaxrenaissance_update_nesterov_v1", "execute", kUpdateNesterov},
          {"jaxrenaissance_update_nesterov_v1", "initialize", kInitializeNesterov},
          {"jaxrenaissance_update_adam_v1", "execute", kUpdateAdam},
          {"jaxrenaissance_update_adam_v1", "initialize", kInitializeAdam},
          {"jaxrenaissance_statistics_v1", "execute", kStatistics},
          {"jaxrenaissance_statistics_v1", "initialize", kInitializeStatistics},
          {"jaxrenaissance_unpack_v1", "execute", kUnpack},
          {"jaxrenaissance_unpack_v1", "initialize", kInitializePacking},
          {"jaxrenaissance_pack_v1", "execute", kPack},
          {"jaxrenaissance_pack_v1", "initialize", kInitializePacking},
          {"jaxrenaissance_prologue_v1", "execute", kPrologue},
          {"jaxrenaissance_prologue_v1", "initialize", kInitializePrologue}};
}

std::vector<std::pair<const char*, int>> CudaTuning() {
  return {{"tile", kTile}, {"max_leaves", kLargeTable}};
}

}  // namespace jaxrenaissance
