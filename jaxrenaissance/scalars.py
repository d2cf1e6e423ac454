"""The S region: the slots of the two scalar arenas that every op shares.

A state carries two small arrays. ``floats`` holds every number an update uses, so that a new value
is new data and never a new program; ``ints`` holds the counters. Both live on the device, and one
op, the prologue, advances them.

``floats`` is 1-D with ``1 + num_groups`` rows of ``ROW`` slots: a header row, then one row of
hyperparameters for each group of leaves. Its dtype is float32, or float64 where the plan has
float64 leaves. The slots below are the ABI that the native modules are compiled with; a test
compares the two.
"""

import numpy as np

ROW = 16

# The header row.
APPLY = 0  # 1 where this step updates, 0 where it is skipped
GRAD_FACTOR = 1  # every gradient is multiplied by it inside the update

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

# A group's row: what the prologue derives.
LR_WD = 10  # lr * wd
C1 = 11  # 1 / (1 - b1^t)
C2 = 12  # 1 / (1 - b2^t)

# ``ints``: int32 counters.
INTS = 16
STEP = 0  # updates made
CALLS = 1  # calls, skipped ones included
SKIPPED = 2
CONSECUTIVE_SKIPS = 3
FIRST_BAD = 4  # statistics writes the first leaf with a non-finite gradient; the prologue resets it
LAST_BAD_LEAF = 5
LAST_BAD_CALL = 6
HAS_NAN = 7  # 1 where the last call was skipped

NO_LEAF = np.iinfo(np.int32).max


def initial_ints() -> np.ndarray:
    """The counters of a state that has not been stepped: int32 of shape (INTS,)."""
    ints = np.zeros(INTS, np.int32)
    ints[FIRST_BAD] = NO_LEAF
    ints[[LAST_BAD_LEAF, LAST_BAD_CALL]] = -1
    return ints


def float_index(group: int, slot: int) -> int:
    """Where ``slot`` of group number ``group`` lies in ``floats``."""
    return (1 + group) * ROW + slot


def floats_size(num_groups: int) -> int:
    """The number of elements of ``floats``."""
    return (1 + num_groups) * ROW
