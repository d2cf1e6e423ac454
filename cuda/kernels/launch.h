// The host side of the kernels: plain structs in, cudaError_t out, launches on the given stream and
// nothing else.
#pragma once

#include <cuda_runtime_api.h>

#include "core/operands.h"
#include "kernels/table_cache.h"

namespace jaxrenaissance {

// One launch, or several where there are more segments than one table holds. cudaErrorInvalidValue:
// the segments do not follow each other line by line (for unpack and pack there may be lines
// between them), or the batch is larger than a grid. `tables` are those of the compiled program
// that the launch belongs to.
cudaError_t LaunchUpdate(UpdateKind kind, const Layout& layout, const Floats& floats,
                         const UpdateOperands& operands, const TableCache& tables,
                         cudaStream_t stream);
cudaError_t LaunchChanges(UpdateKind kind, const Layout& layout, const Floats& floats,
                          const UpdateOperands& operands, const Leaves& weights,
                          const Leaves& changes, const TableCache& tables, cudaStream_t stream);
cudaError_t LaunchUpdateNorms(UpdateKind kind, const Layout& layout, const Floats& floats,
                              const UpdateOperands& operands, const Workspace& workspace,
                              int32_t* of_weights, const TableCache& tables, cudaStream_t stream);
cudaError_t LaunchUnpack(const Layout& layout, const void* arena, int64_t arena_stride,
                         const Leaves& leaves, const TableCache& tables, cudaStream_t stream);
cudaError_t LaunchPack(const Layout& layout, const Leaves& leaves, const PieceIndex& piece,
                       void* arena, const TableCache& tables, cudaStream_t stream);
cudaError_t LaunchStatistics(const Layout& layout, const GradientOperands& gradients,
                             int32_t first_leaf, int32_t* ints, const TableCache& tables,
                             cudaStream_t stream);
cudaError_t LaunchNorms(const Layout& layout, const NormsOperands& operands,
                        const TableCache& tables, cudaStream_t stream);
cudaError_t LaunchFinish(const FinishOperands& operands, cudaStream_t stream);
cudaError_t LaunchLerp(const Layout& layout, const LerpOperands& operands, const TableCache& tables,
                       cudaStream_t stream);
cudaError_t LaunchPrologue(bool is_double, void* floats, int32_t* ints, int64_t num_groups,
                           int64_t members, cudaStream_t stream);

// Load every kernel of an op on the current device, so that lazy loading never falls into a stream
// capture.
cudaError_t PreloadUpdate(UpdateKind kind);
cudaError_t PreloadChanges(UpdateKind kind);
cudaError_t PreloadUpdateNorms(UpdateKind kind);
cudaError_t PreloadPacking();
cudaError_t PreloadStatistics();
cudaError_t PreloadNorms();
cudaError_t PreloadAccumulate();
cudaError_t PreloadFinish();
cudaError_t PreloadLerp();
cudaError_t PreloadPrologue();

}  // namespace jaxrenaissance
