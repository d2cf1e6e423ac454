// Operands as a handler passes them on to either backend's kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "core/convert.h"
#include "core/segments.h"

namespace jaxrenaissance {

// The elementwise update rules, in the order of the tables that are indexed by them.
enum class UpdateKind : int { kSgd = 0, kMomentum = 1, kNesterov = 2, kAdam = 3 };
constexpr int kUpdateKinds = 4;
constexpr int kLeafTypes = 4;

// One leaf. `stride` is the distance in elements between members of a batch; 0 where all members
// share the leaf.
struct Leaf {
  void* data;
  int64_t stride;
  LeafType type;
};

// The scalars of a batch; a stride of 0 shares them.
struct Floats {
  const void* data;
  int64_t stride;
  bool is_double;
  int64_t num_groups;
};

// A batch of arenas of one layout. The segments lie in host memory, with the compiled program.
struct Layout {
  const Segment* segments;
  int64_t num_segments;
  int64_t size;  // elements of one member's arena
  bool is_double;
  int64_t members;
};

// Gradients are leaves, or one arena (then `leaves` is empty).
struct GradientOperands {
  bool from_arena;
  std::vector<Leaf> leaves;
  const void* arena;
  int64_t arena_stride;
};

// What an update reads and writes. Unused moments, and the average where there is none, are null.
struct UpdateOperands {
  void* weights;
  void* moments[2];
  void* ema;
  GradientOperands gradients;
  bool gated;  // whether most calls do not update, so that the flag is worth waiting for
};

// Where a reduction leaves its partials; see core/reduction.h. Null data: nobody asked for them.
struct Workspace {
  int32_t* data;
  int64_t stride;  // words between members
  int64_t num_segments;
  int64_t num_partials;
};

// One pass over gradients: finds non-finite ones where `flag` is set, adds to the accumulator where
// it is not null.
struct NormsOperands {
  int32_t* ints;
  void* accumulator;
  GradientOperands gradients;
  int32_t first_leaf;
  bool flag;
  Workspace workspace;
};

constexpr int kMaxArenas = 2;

// Those of the gradients, then those of the weights where their norm is asked for.
struct Workspaces {
  Workspace each[2 * kMaxArenas];
  int count;
  int gradients;
};

// Without `ints`, the norm of the update is all there is to finish. `norms` are by segment of each
// gradient arena, or null.
struct FinishOperands {
  void* floats;
  bool is_double;
  int64_t num_groups;
  int32_t* ints;
  int64_t members;
  Workspaces workspaces;
  void* norms[kMaxArenas];
};

constexpr int kMaxTargets = 2;

enum class LerpSource : int { kLeaves = 0, kArena = 1, kZero = 2 };

struct LerpOperands {
  const void* taus;  // one a group
  int64_t taus_stride;
  std::vector<void*> targets;
  LerpSource source;
  std::vector<Leaf> leaves;
  const void* arena;
  int64_t arena_stride;
};

}  // namespace jaxrenaissance
