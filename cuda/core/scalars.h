// The slots of the two scalar arenas, as jaxrenaissance/scalars.py documents them. A test compares
// the two lists.
#pragma once

#include "core/config.h"

namespace jaxrenaissance {

constexpr int kHeader = 32;
constexpr int kRow = 16;

enum HeaderSlot : int {
  kApply = 0,
  kGradFactor = 1,
  kMaxValue = 2,
  kOneMinusEma = 3,
  kMaxNorm = 4,
  kLossScale = 5,
  kGrowth = 6,
  kBackoff = 7,
  kMinScale = 8,
  kMaxScale = 9,
  kGradNorm = 10,
  kClip = 11,
  kParamNorm = 12,
  kUpdateNorm = 13,
  kEmaWeight = 14,
  kEmaWeightLow = 15,
  kBlocks = 16,
  kMinNorm = 17,
  kMaxRatio = 18,
};

enum GroupSlot : int {
  kLearningRate = 0,
  kWeightDecay = 1,
  kL2 = 2,
  kMomentum = 3,
  kOneMinusB1 = 4,
  kOneMinusB2 = 5,
  kEps = 6,
  kEpsRoot = 7,
  kLrScale = 8,
  kTrust = 9,
  kLrWd = 10,
  kC1 = 11,
  kC2 = 12,
  kLr = 13,
  kLrInMoment = 14,
};

constexpr int kInts = 16;

enum IntSlot : int {
  kStep = 0,
  kCalls = 1,
  kSkipped = 2,
  kConsecutiveSkips = 3,
  kFirstBad = 4,
  kLastBadLeaf = 5,
  kLastBadCall = 6,
  kHasNan = 7,
  kMicro = 8,
  kEvery = 9,
  kCycleBad = 10,
  kGoodSteps = 11,
  kGrowthInterval = 12,
};

constexpr int32_t kNoLeaf = INT32_MAX;

// Where a group's row starts.
JR_HD constexpr int64_t RowStart(int64_t group) { return kHeader + group * kRow; }

}  // namespace jaxrenaissance
