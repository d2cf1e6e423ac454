// The CPU's handlers of what moves: unpack, pack, pack_piece and lerp.
#include <cstring>

#include "ffi/cpu_elements.h"
#include "ffi/cpu_sweeps.h"

namespace jaxrenaissance {
namespace {

ffi::Future Unpack(ffi::ThreadPool pool, const CpuProgram* program, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  UnpackCall call = DecodeUnpack(decoder);
  if (!decoder.ok()) return Failed(decoder.error());
  const Sweep sweep{pool, program->NumChunks(), Work::kLight};
  return ForEachChunk(sweep, [program, call = std::move(call)](int64_t chunk) {
    ForEachStretch(
        *program, chunk, [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
          const Leaf& leaf = call.leaves[segment.leaf];
          const LeafType type = call.layout.type;
          const int64_t offset = (member * call.arena_stride + low) * LeafTypeSize(type);
          ConverterOf(type, leaf.type)(Offset(call.arena, offset),
                                       LeafElement(leaf, member, segment, low), high - low);
        });
  });
}

template <PackCall (*kDecode)(Decoder&)>
ffi::Future Pack(ffi::ThreadPool pool, const CpuProgram* program, ffi::RemainingArgs args,
                 ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  PackCall call = kDecode(decoder);
  if (!decoder.ok()) return Failed(decoder.error());
  const Sweep sweep{pool, program->NumChunks(), Work::kLight};
  return ForEachChunk(sweep, [program, call = std::move(call)](int64_t chunk) {
    const int64_t item = LeafTypeSize(call.layout.type);
    const int64_t chunks_of_member = program->chunks_of_member();
    const int64_t member_of_chunk = chunk / chunks_of_member;
    int64_t written = (chunk % chunks_of_member) * kChunk;
    const int64_t end = std::min(written + kChunk, call.layout.size);
    const auto zero_until = [&](int64_t position) {
      if (position <= written) return;
      memset(Offset(call.arena, (member_of_chunk * call.layout.size + written) * item), 0,
             static_cast<size_t>((position - written) * item));
    };
    ForEachStretch(*program, chunk,
                   [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
                     zero_until(low);
                     const Leaf& leaf = call.leaves[segment.leaf];
                     int64_t from = low, count = high - low;
                     if (call.piece.shards > 0) {
                       from += call.piece.Of(member) * segment.size;
                       const int64_t slice = call.piece.shards * segment.size - segment.group;
                       count = std::clamp<int64_t>(segment.start + slice - from, 0, count);
                     }
                     ConverterOf(leaf.type, call.layout.type)(
                         LeafElement(leaf, member, segment, from),
                         Offset(call.arena, (member * call.layout.size + low) * item), count);
                     written = low + count;
                   });
    zero_until(end);
  });
}

ffi::Future LerpArenas(ffi::ThreadPool pool, const CpuProgram* program, ffi::RemainingArgs args,
                       ffi::RemainingRets rets) {
  Decoder decoder(args, rets, *program);
  LerpCall call = DecodeLerp(decoder);
  if (!decoder.ok()) return Failed(decoder.error());
  const Sweep sweep{pool, program->NumChunks(), Work::kLight};
  return ForEachChunk(sweep, [program, call = std::move(call)](int64_t chunk) {
    const LerpOperands& operands = call.operands;
    const bool is_double = call.layout.is_double;
    const int64_t item = ArenaItem(is_double);
    ForEachStretch(
        *program, chunk, [&](int64_t member, const Segment& segment, int64_t low, int64_t high) {
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

XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack, BindCpu());
XLA_FFI_DEFINE_HANDLER(kPack, Pack<DecodePack>, BindCpu());
XLA_FFI_DEFINE_HANDLER(kPackPiece, Pack<DecodePackPiece>, BindCpu());
XLA_FFI_DEFINE_HANDLER(kLerp, LerpArenas, BindCpu());

}  // namespace

std::vector<CpuTarget> CpuPackingTargets() {
  return {{"jaxrenaissance_unpack_v1", kUnpack},
          {"jaxrenaissance_pack_v1", kPack},
          {"jaxrenaissance_pack_piece_v1", kPackPiece},
          {"jaxrenaissance_lerp_v1", kLerp}};
}

}  // namespace jaxrenaissance
