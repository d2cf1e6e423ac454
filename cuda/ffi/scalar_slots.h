// The list of scalar slots, for the test that compares it with jaxrenaissance/scalars.py.
#pragma once

#include <utility>
#include <vector>

#include "core/scalars.h"

namespace jaxrenaissance {

inline std::vector<std::pair<const char*, int>> ScalarSlots() {
  return {{"ROW", kRow},
          {"APPLY", kApply},
          {"GRAD_FACTOR", kGradFactor},
          {"LEARNING_RATE", kLearningRate},
          {"WEIGHT_DECAY", kWeightDecay},
          {"L2", kL2},
          {"MOMENTUM", kMomentum},
          {"ONE_MINUS_B1", kOneMinusB1},
          {"ONE_MINUS_B2", kOneMinusB2},
          {"EPS", kEps},
          {"EPS_ROOT", kEpsRoot},
          {"LR_WD", kLrWd},
          {"C1", kC1},
          {"C2", kC2},
          {"INTS", kInts},
          {"STEP", kStep},
          {"CALLS", kCalls},
          {"SKIPPED", kSkipped},
          {"CONSECUTIVE_SKIPS", kConsecutiveSkips},
          {"FIRST_BAD", kFirstBad},
          {"LAST_BAD_LEAF", kLastBadLeaf},
          {"LAST_BAD_CALL", kLastBadCall},
          {"HAS_NAN", kHasNan},
          {"NO_LEAF", kNoLeaf}};
}

}  // namespace jaxrenaissance
