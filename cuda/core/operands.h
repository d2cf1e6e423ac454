// Operands as a handler passes them on to either backend's kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/convert.h"
#include "core/segments.h"
#include "core/trust.h"

namespace jaxrenaissance {

// The elementwise update rules, in the order of the tables that are indexed by them.
enum class UpdateKind : int { kSgd = 0, kMomentum = 1, kNesterov = 2, kAdam = 3, kLion = 4 };
constexpr int kUpdateKinds = 5;
constexpr int kLeafTypes = 4;

// What every execution of a program finds of a leaf. `stride` is the distance in elements between
// members of a batch; 0 where all members share the leaf.
struct LeafForm {
  int64_t stride;
  LeafType type;
};

struct Leaf {
  void* data;
  int64_t stride;
  LeafType type;
};

// Leaves in arena order: their addresses, and their forms, which stay with the program.
struct Leaves {
  std::vector<void*> data;
  const LeafForm* forms;

  bool empty() const { return data.empty(); }
  int64_t size() const { return static_cast<int64_t>(data.size()); }
  Leaf operator[](int64_t i) const {
    return {data[static_cast<size_t>(i)], forms[i].stride, forms[i].type};
  }
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
  int64_t size;   // elements of one member's arena
  LeafType type;  // kBf16 and kF16 in pack and unpack alone
  bool is_double;
  int64_t members;
};

// Which piece of its leaves a member packs, of `shards`, each as long as a segment; 0 shards: whole
// leaves. A segment's leaf_offset is then that of a slice, and its group how many elements the
// pieces together have more than the slice.
struct PieceIndex {
  const int32_t* data;
  int64_t stride;  // between members; 0 where they share it
  int64_t shards;

  JR_HD int64_t Of(int64_t member) const {
    const int64_t index = data[member * stride];
    return index < 0 ? 0 : index < shards ? index : shards - 1;
  }
};

// Gradients are leaves, or one arena (then `leaves` is empty).
struct GradientOperands {
  bool from_arena;
  Leaves leaves;
  const void* arena;
  int64_t arena_stride;
};

// What an update reads and writes. Unused moments, the average and the trust ratios where there are
// none, are null.
struct UpdateOperands {
  void* weights;
  void* moments[2];
  void* ema;
  const void* ratios;  // one a segment, of the scalars' type
  int64_t ratios_stride;
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

// What a pass sums up: squares of gradients; those of weights, and products of both, for trust
// ratios.
constexpr int kMaxSums = 3;

// One pass over gradients: finds non-finite ones where `flag` is set, adds to the accumulator where
// it is not null, and sums up the weights' part where these are not null.
struct NormsOperands {
  int32_t* ints;
  void* accumulator;
  const void* weights;
  int64_t weights_stride;
  GradientOperands gradients;
  int32_t first_leaf;
  bool flag;
  Workspace workspaces[kMaxSums];
};

constexpr int kMaxArenas = 2;

// Those of the gradients, an arena each; then those of the weights, where their norm is asked for
// or there are trust ratios; then those of the products, where these want them.
struct Workspaces {
  Workspace each[kMaxSums * kMaxArenas];
  int count;
  int gradients;
};

// The range of the weights' workspaces.
inline std::pair<int, int> WeightsOf(const Workspaces& all) {
  const int arenas = all.gradients > 0 ? all.gradients : kMaxArenas;
  return {all.gradients, std::min(all.count, all.gradients + arenas)};
}

// What there is to finish.
enum class FinishKind : int { kGradients = 0, kUpdateNorm = 1, kRatios = 2 };

// `ints` of gradients alone. `norms` and `ratios` are by segment of each gradient arena, or null.
struct FinishOperands {
  FinishKind kind;
  void* floats;
  bool is_double;
  int64_t num_groups;
  int32_t* ints;
  int64_t members;
  Workspaces workspaces;
  void* norms[kMaxArenas];
  TrustRule trust;
  const int32_t* groups[kMaxArenas];  // of each segment, for trust ratios
  void* ratios[kMaxArenas];
};

constexpr int kMaxTargets = 2;

enum class LerpSource : int { kLeaves = 0, kArena = 1, kZero = 2 };

struct LerpOperands {
  const void* taus;  // one a group
  int64_t taus_stride;
  std::vector<void*> targets;
  LerpSource source;
  Leaves leaves;
  const void* arena;
  int64_t arena_stride;
};

}  // namespace jaxrenaissance
