"""update in jax.numpy."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .. import scalars as s
from ..plan import ArenaLayout
from .groups import runs
from .lerp import towards
from .norms import norms_of
from .packing import to_arena, to_leaves


def update(
    kind: str,
    series: int,
    floats: jax.Array,
    *operands: jax.Array,
    layout: ArenaLayout,
    from_arena: bool,
    ema: bool,
    gated: bool,
) -> list[jax.Array]:
    """The new weights, moments and average. ``operands`` are these, then the gradients.

    ``gated`` is about what a kernel loads; the results are the same.
    """
    states, gradients = operands[:series], operands[series + ema :]
    gradient = to_arena(gradients, layout, from_arena)
    new = _step(kind, layout, floats, states, gradient)
    if ema:
        average = operands[series]
        rate = floats[s.ONE_MINUS_EMA].astype(layout.dtype)
        new.append(towards(average, new[0], rate))
    apply = floats[s.APPLY] != 0
    olds = operands[: series + ema]
    return [jnp.where(apply, x, old) for x, old in zip(new, olds, strict=True)]


def update_norms(
    kind: str,
    series: int,
    floats: jax.Array,
    *operands: jax.Array,
    layout: ArenaLayout,
    from_arena: bool,
) -> list[jax.Array]:
    """The norms, by segment, of what an update adds to the weights."""
    states, gradients = operands[:series], operands[series:]
    gradient = to_arena(gradients, layout, from_arena)
    difference = _step(kind, layout, floats, states, gradient)[0] - states[0]
    return [norms_of(layout, to_leaves((difference,), layout, True))]


def _step(
    kind: str,
    layout: ArenaLayout,
    floats: jax.Array,
    states: Sequence[jax.Array],
    gradient: jax.Array,
) -> list[jax.Array]:
    values = floats.astype(layout.dtype)
    bound = values[s.MAX_VALUE]
    # What is not finite would reach the derivatives of a call that is skipped, as 0 times NaN.
    gradient = jnp.where(values[s.APPLY] != 0, gradient, 0)
    gradient = jnp.clip(gradient * values[s.GRAD_FACTOR], -bound, bound)
    pieces: list[list[jax.Array]] = [[] for _ in states]
    for low, high, group in runs(layout):
        row = values[s.float_index(group, 0) : s.float_index(group, s.ROW)]
        new = _STEPS[kind](row, gradient[low:high], *(x[low:high] for x in states))
        for piece, x in zip(pieces, new, strict=True):
            piece.append(x)
    if not pieces[0]:
        return list(states)
    return [jnp.concatenate(piece) for piece in pieces]


def _new_weights(row: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
    return w - (row[s.LR_WD] * w + row[s.LR] * u)


def _sgd(row: jax.Array, g: jax.Array, w: jax.Array) -> Sequence[jax.Array]:
    return (_new_weights(row, w, g + row[s.L2] * w),)


def _momentum(row: jax.Array, g: jax.Array, w: jax.Array, m: jax.Array) -> Sequence[jax.Array]:
    m = row[s.MOMENTUM] * m + (g + row[s.L2] * w)
    return _new_weights(row, w, m), m


def _nesterov(row: jax.Array, g: jax.Array, w: jax.Array, m: jax.Array) -> Sequence[jax.Array]:
    g = g + row[s.L2] * w
    m = row[s.MOMENTUM] * m + g
    return _new_weights(row, w, row[s.MOMENTUM] * m + g), m


def _adam(
    row: jax.Array, g: jax.Array, w: jax.Array, m: jax.Array, v: jax.Array
) -> Sequence[jax.Array]:
    g = g + row[s.L2] * w
    omb1, omb2 = row[s.ONE_MINUS_B1], row[s.ONE_MINUS_B2]
    m = (1 - omb1) * m + omb1 * g
    v = (1 - omb2) * v + omb2 * (g * g)
    squared = v * row[s.C2] + row[s.EPS_ROOT]
    # Where the derivative of the root has no bound, that of the update is due to m alone.
    still = squared == 0
    denominator = jnp.where(still, 0, jnp.sqrt(jnp.where(still, 1, squared))) + row[s.EPS]
    # eps = 0 and a gradient that has always been zero: no update, rather than 0/0.
    unmoved = (m == 0) & (denominator == 0)
    u = jnp.where(unmoved, 0, m * row[s.C1]) / jnp.where(unmoved, 1, denominator)
    return _new_weights(row, w, u), m, v


_STEPS = {"sgd": _sgd, "momentum": _momentum, "nesterov": _nesterov, "adam": _adam}
