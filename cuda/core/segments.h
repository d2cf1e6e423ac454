// The segment table: where each leaf, or each slice of a stacked leaf, lies in an arena. Rows as
// ArenaLayout.segments has them.
#pragma once

#include "core/config.h"

namespace jaxrenaissance {

struct Segment {
  int64_t start;        // in the arena, elements
  int64_t size;         // elements
  int64_t leaf;         // position among the leaves, in arena order
  int64_t leaf_offset;  // of the segment's first element within the leaf
  int64_t group;
};
static_assert(sizeof(Segment) == 5 * sizeof(int64_t));

// The last of segments [low, high) that starts at or before `position`; `low` if none does.
JR_HD int64_t FindSegment(const Segment* segments, int64_t low, int64_t high, int64_t position) {
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (segments[middle].start <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace jaxrenaissance
