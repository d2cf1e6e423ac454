"""The S region: the slots of the two scalar arenas that every op shares.

A state carries two small arrays. ``floats`` holds every number an update uses, so that a new value
is new data and never a new program; ``ints`` holds the counters. Both live on the device, and one
op, the prologue, advances them.

``floats`` is 1-D: a header of ``HEADER`` slots, then one row of ``ROW`` slots of hyperparameters
for each group of leaves. Its dtype is float32, or float64 where the plan has float64 leaves. The
slots below are the ABI that the native modules are compiled with; a test compares the two.
"""

import numpy as np

HEADER = 32
ROW = 16

# The header: what an update reads, all in one vector. No bound is infinity.
APPLY = 0  # 1 where this call updates, 0 where it is skipped or only adds to a cycle
GRAD_FACTOR = 1  # every gradient is multiplied by it inside the update: clip / (loss scale * count)
MAX_VALUE = 2  # gradients are clamped to it after GRAD_FACTOR
ONE_MINUS_EMA = 3  # 1 - decay of the average of the weights

MAX_NORM = 4

# The header: loss scaling. All are 1 where there is none.
LOSS_SCALE = 5
GROWTH = 6
BACKOFF = 7
MIN_SCALE = 8
MAX_SCALE = 9

# The header: what was measured. Norms are of unscaled, unclipped gradients.
GRAD_NORM = 10
CLIP = 11
PARAM_NORM = 12
UPDATE_NORM = 13

# 1 - the product of all EMA decays so far, what a debiased average is divided by. Two numbers, as
# one float32 loses it: near 0 at first, and near 1 later.
EMA_WEIGHT = 14
EMA_WEIGHT_LOW = 15

BLOCKS = 16  # a counter of CUDA blocks, as integer bits; 0 between launches

# Trust ratios: below MIN_NORM a norm gives the ratio 1, and no ratio is above MAX_RATIO.
MIN_NORM = 17
MAX_RATIO = 18

# A group's row: what the user sets.
LEARNING_RATE = 0
WEIGHT_DECAY = 1  # decoupled: w <- w (1 - lr wd)
L2 = 2  # added to the gradient: g <- g + l2 w
MOMENTUM = 3
ONE_MINUS_B1 = (
    4  # 1 - beta, not beta: float32(1 - .99999) keeps seven digits, 1 - float32(.99999) only three
)
ONE_MINUS_B2 = 5
EPS = 6
EPS_ROOT = 7
LR_SCALE = 8  # a group's factor on the learning rate
TRUST = 9  # LARS's coefficient, 1 for LAMB; 0 where there is no trust ratio

# A group's row: what the prologue derives.
LR_WD = 10  # lr * wd
C1 = 11  # 1 / (1 - b1^t)
C2 = 12  # 1 / (1 - b2^t)
LR = 13  # the learning rate as it is used: with the group's factor

LR_IN_MOMENT = 14  # 1 where the learning rate is part of what the momentum adds up, as in LARS

# ``ints``: int32 counters.
INTS = 16
STEP = 0  # updates made
CALLS = 1  # calls, skipped ones included
SKIPPED = 2
CONSECUTIVE_SKIPS = 3
FIRST_BAD = 4  # statistics writes the first leaf with a non-finite gradient; the prologue resets it
LAST_BAD_LEAF = 5
LAST_BAD_CALL = 6
HAS_NAN = 7  # 1 where the last call had a non-finite gradient
MICRO = 8  # micro-batches in the running cycle
EVERY = 9  # micro-batches a cycle: 1 without accumulation
CYCLE_BAD = 10  # 1 where a micro-batch of the running cycle had a non-finite gradient
GOOD_STEPS = 11  # updates since the loss scale changed
GROWTH_INTERVAL = 12  # updates until the loss scale grows

NO_LEAF = np.iinfo(np.int32).max


def initial_ints() -> np.ndarray:
    """The counters of a state that has not been stepped: int32 of shape (INTS,)."""
    ints = np.zeros(INTS, np.int32)
    ints[FIRST_BAD] = NO_LEAF
    ints[[LAST_BAD_LEAF, LAST_BAD_CALL]] = -1
    ints[EVERY] = 1
    ints[GROWTH_INTERVAL] = np.iinfo(np.int32).max
    return ints


def initial_floats(num_groups: int, dtype: np.dtype) -> np.ndarray:
    """The float scalars without any hyperparameter: nothing bounded, scaled or averaged."""
    floats = np.zeros(floats_size(num_groups), dtype)
    floats[[APPLY, GRAD_FACTOR, CLIP]] = 1
    floats[[LOSS_SCALE, GROWTH, BACKOFF, MIN_SCALE, MAX_SCALE]] = 1
    floats[[MAX_VALUE, MAX_NORM, MAX_RATIO]] = np.inf
    floats[[float_index(group, LR_SCALE) for group in range(num_groups)]] = 1
    return floats


def float_index(group: int, slot: int) -> int:
    """Where ``slot`` of group number ``group`` lies in ``floats``."""
    return HEADER + group * ROW + slot


def floats_size(num_groups: int) -> int:
    """The number of elements of ``floats``."""
    return HEADER + num_groups * ROW
