// The host side of the kernels: plain structs in, cudaError_t out, launches on the given stream and
// nothing else.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "core/operands.h"

namespace jaxrenaissance {

struct Tile;

// A sweep over an arena: one block a tile, for each member of a batch.
struct Sweep {
  const Tile* table;
  const Segment* segments;
  int64_t size;     // elements of one member's arena
  int64_t members;  // of the batch
  int64_t first_tile;
  int64_t tiles;
};

// Consecutive leaves that share a launch, and the tiles that hold them.
struct LeafRange {
  int64_t first_leaf, num_leaves, first_tile, tiles;
};

// Leaves beside an arena, and how they are spread over launches: one launch where they fit in one
// table.
struct Leaves {
  std::vector<Leaf> leaves;
  std::vector<LeafRange> ranges;
};

// Gradients are leaves, or (leaves == nullptr) an arena; its stride is 0 where a batch shares it.
struct Gradients {
  const Leaves* leaves;
  const void* arena;
  int64_t arena_stride;
};

struct UpdateOperands {
  Floats floats;
  void* weights;
  void* moments[2];
  Gradients gradients;
};

// `is_double`: the arena is float64.
cudaError_t LaunchUpdate(UpdateKind kind, bool is_double, const Sweep& sweep,
                         const UpdateOperands& operands, cudaStream_t stream);
cudaError_t LaunchUnpack(bool is_double, const Sweep& sweep, const void* arena,
                         const Leaves& leaves, cudaStream_t stream);
cudaError_t LaunchPack(bool is_double, const Sweep& sweep, const Leaves& leaves, void* arena,
                       cudaStream_t stream);
cudaError_t LaunchStatistics(bool is_double, const Sweep& sweep, const Gradients& gradients,
                             int32_t first_leaf, int32_t* ints, cudaStream_t stream);
cudaError_t LaunchPrologue(bool is_double, void* floats, int32_t* ints, int64_t num_groups,
                           int64_t members, cudaStream_t stream);

// Load every kernel of an op on the current device, so that lazy loading never falls into a stream
// capture.
cudaError_t PreloadUpdate(UpdateKind kind);
cudaError_t PreloadPacking();
cudaError_t PreloadStatistics();
cudaError_t PreloadPrologue();

}  // namespace jaxrenaissance
