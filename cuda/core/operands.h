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

}  // namespace jaxrenaissance
