// The list of scalar slots, for the test that compares it with jaxrenaissance/scalars.py.
#pragma once

#include <utility>
#include <vector>

#include "core/scalars.h"

namespace jaxrenaissance {

inline std::vector<std::pair<const char*, int>> ScalarSlots() {
  return {{"HEADER", kHeader},
          {"ROW", kRow},
          {"APPLY", kApply},
          {"GRAD_FACTOR", kGradFactor},
          {"MAX_VALUE", kMaxValue},
          {"MAX_NORM", kMaxNorm},
          {"ONE_MINUS_EMA", kOneMinusEma},
          {"LOSS_SCALE", kLossScale},
          {"GROWTH", kGrowth},
          {"BACKOFF", kBackoff},
          {"MIN_SCALE", kMinScale},
          {"MAX_SCALE", kMaxScale},
          {"GRAD_NORM", kGradNorm},
          {"CLIP", kClip},
          {"PARAM_NORM", kParamNorm},
          {"UPDATE_NORM", kUpdateNorm},
          {"EMA_WEIGHT", kEmaWeight},
          {"EMA_WEIGHT_LOW", kEmaWeightLow},
          {"BLOCKS", kBlocks},
          {"MIN_NORM", kMinNorm},
          {"MAX_RATIO", kMaxRatio},
          {"LEARNING_RATE", kLearningRate},
          {"WEIGHT_DECAY", kWeightDecay},
          {"L2", kL2},
          {"MOMENTUM", kMomentum},
          {"ONE_MINUS_B1", kOneMinusB1},
          {"ONE_MINUS_B2", kOneMinusB2},
          {"EPS", kEps},
          {"EPS_ROOT", kEpsRoot},
          {"LR_SCALE", kLrScale},
          {"TRUST", kTrust},
          {"LR_WD", kLrWd},
          {"C1", kC1},
          {"C2", kC2},
          {"LR", kLr},
          {"LR_IN_MOMENT", kLrInMoment},
          {"INTS", kInts},
          {"STEP", kStep},
          {"CALLS", kCalls},
          {"SKIPPED", kSkipped},
          {"CONSECUTIVE_SKIPS", kConsecutiveSkips},
          {"FIRST_BAD", kFirstBad},
          {"LAST_BAD_LEAF", kLastBadLeaf},
          {"LAST_BAD_CALL", kLastBadCall},
          {"HAS_NAN", kHasNan},
          {"MICRO", kMicro},
          {"EVERY", kEvery},
          {"CYCLE_BAD", kCycleBad},
          {"GOOD_STEPS", kGoodSteps},
          {"GROWTH_INTERVAL", kGrowthInterval},
          {"NO_LEAF", kNoLeaf}};
}

}  // namespace jaxrenaissance
