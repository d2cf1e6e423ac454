"""The prologue in plain Python: counters and scalars by their names, floats in float64."""

import numpy as np
from arenas import group_rows

from jaxrenaissance import scalars as s


def expected_prologue(floats, ints, norm=None):
    """The scalars after a call. `norm` is that of the gradients as given, where it is known."""
    new, counts = floats.astype(np.float64), ints.copy()
    bad = ints[s.FIRST_BAD] != s.NO_LEAF
    micro = int(ints[s.MICRO]) + 1
    cycle_bad = bad or ints[s.CYCLE_BAD] != 0
    complete = micro >= ints[s.EVERY]
    counts[s.CALLS] += 1
    counts[s.HAS_NAN] = bad
    if bad:
        counts[s.LAST_BAD_LEAF], counts[s.LAST_BAD_CALL] = ints[s.FIRST_BAD], ints[s.CALLS]
    counts[s.FIRST_BAD] = s.NO_LEAF
    counts[s.MICRO] = 0 if complete else micro
    counts[s.CYCLE_BAD] = 0 if complete else cycle_bad
    apply = complete and not cycle_bad
    new[s.APPLY] = apply
    if complete:
        scale = new[s.LOSS_SCALE]
        divisor = scale * max(micro, 1)
        clip = 1.0
        if norm is not None:
            new[s.GRAD_NORM] = norm / divisor
            if new[s.GRAD_NORM] > new[s.MAX_NORM]:
                clip = new[s.MAX_NORM] / new[s.GRAD_NORM]
            new[s.CLIP] = clip
        new[s.GRAD_FACTOR] = clip / divisor
        if apply:
            counts[s.STEP] += 1
            counts[s.CONSECUTIVE_SKIPS] = 0
            counts[s.GOOD_STEPS] += 1
            if counts[s.GOOD_STEPS] >= counts[s.GROWTH_INTERVAL]:
                new[s.LOSS_SCALE] = min(scale * new[s.GROWTH], new[s.MAX_SCALE])
                counts[s.GOOD_STEPS] = 0
            c = new[s.EMA_WEIGHT] + new[s.EMA_WEIGHT_LOW]
            c = c + new[s.ONE_MINUS_EMA] * (1 - c)
            new[s.EMA_WEIGHT] = c.astype(floats.dtype)
            new[s.EMA_WEIGHT_LOW] = c - new[s.EMA_WEIGHT]
        else:
            counts[s.SKIPPED] += 1
            counts[s.CONSECUTIVE_SKIPS] += 1
            new[s.LOSS_SCALE] = max(scale * new[s.BACKOFF], new[s.MIN_SCALE])
            counts[s.GOOD_STEPS] = 0
    t = max(int(counts[s.STEP]), 1)
    for row in group_rows(new):
        row[s.LR] = row[s.LEARNING_RATE] * row[s.LR_SCALE]
        row[s.LR_WD] = row[s.LR] * row[s.WEIGHT_DECAY]
        for slot, beta in (s.C1, s.ONE_MINUS_B1), (s.C2, s.ONE_MINUS_B2):
            row[slot] = 1 / (1 - power(1 - row[beta], t)) if row[beta] else 1.0
    return new.astype(floats.dtype), counts


def power(beta, t):
    """By repeated squaring, which all native backends do alike."""
    result = np.float64(1)
    while t:
        if t & 1:
            result = result * beta
        beta, t = beta * beta, t >> 1
    return result
