"""update in jax.numpy."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import scalars as s
from ..plan import ArenaLayout
from .packing import pack


def update(
    kind: str,
    series: int,
    floats: jax.Array,
    *operands: jax.Array,
    layout: ArenaLayout,
    from_arena: bool,
) -> list[jax.Array]:
    """The new weights and moments. ``operands`` are weights, moments, then the gradients."""
    states, gradients = operands[:series], operands[series:]
    gradient = gradients[0] if from_arena else pack(*gradients, layout=layout)[0]
    values = floats.astype(layout.dtype)
    factor, apply = values[s.GRAD_FACTOR], values[s.APPLY] != 0
    pieces: list[list[jax.Array]] = [[] for _ in states]
    for low, high, group in _runs(layout):
        row = values[s.float_index(group, 0) : s.float_index(group, s.ROW)]
        new = _STEPS[kind](row, gradient[low:high] * factor, *(x[low:high] for x in states))
        for piece, x in zip(pieces, new, strict=True):
            piece.append(x)
    if not pieces[0]:
        return list(states)
    return [
        jnp.where(apply, jnp.concatenate(piece), old)
        for piece, old in zip(pieces, states, strict=True)
    ]


def _runs(layout: ArenaLayout) -> list[tuple[int, int, int]]:
    """The arena as stretches of one group: (low, high, group).

    Padding is all zero and stays so under every update.
    """
    groups = layout.segments[:, 4]
    if not len(groups):
        return []
    firsts = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
    edges = [0, *layout.segments[firsts[1:], 0].tolist(), layout.size]
    return list(zip(edges[:-1], edges[1:], groups[firsts].tolist(), strict=True))


def _new_weights(row: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
    return w - (row[s.LR_WD] * w + row[s.LEARNING_RATE] * u)


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
    denominator = jnp.sqrt(v * row[s.C2] + row[s.EPS_ROOT]) + row[s.EPS]
    # eps = 0 and a gradient that has always been zero: no update, rather than 0/0.
    unmoved = (m == 0) & (denominator == 0)
    u = jnp.where(unmoved, 0, m * row[s.C1]) / jnp.where(unmoved, 1, denominator)
    return _new_weights(row, w, u), m, v


_STEPS = {"sgd": _sgd, "momentum": _momentum, "nesterov": _nesterov, "adam": _adam}
