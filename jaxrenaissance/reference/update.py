"""update, changes and update_norms in jax.numpy."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import scalars as s
from ..arena_layout import ArenaLayout
from .groups import runs
from .lerp import towards
from .norms import norms_of
from .packing import pack, spread, to_arena, to_leaves, unpack


def update(
    kind: str,
    series: int,
    floats: jax.Array,
    *operands: jax.Array,
    layout: ArenaLayout,
    from_arena: bool,
    ema: bool,
    ratios: bool,
    gated: bool,
) -> list[jax.Array]:
    """The new weights, moments and average.

    ``operands`` are these, then the trust ratios, then the gradients. ``gated`` is about what a
    kernel loads; the results are the same.
    """
    olds, rest = operands[: series + ema], operands[series + ema :]
    gradient = to_arena(rest[ratios:], layout, from_arena)
    _, change, *moments = _step(
        kind, layout, floats, olds[:series], gradient, rest[0] if ratios else None
    )
    new = [olds[0] + change, *moments]
    if ema:
        rate = floats[s.ONE_MINUS_EMA].astype(layout.dtype)
        new.append(towards(olds[series], new[0], rate))
    apply = floats[s.APPLY] != 0
    return [jnp.where(apply, x, old) for x, old in zip(new, olds, strict=True)]


def changes(
    kind: str,
    num_moments: int,
    floats: jax.Array,
    *operands: jax.Array,
    layout: ArenaLayout,
    weights: bool,
    ratios: bool,
    dtypes: tuple[np.dtype, ...],
) -> list[jax.Array]:
    """The new moments, then what is to be added to each weight.

    ``operands`` are the moments, the trust ratios, the gradients, then the weights.
    """
    olds, rest = operands[:num_moments], operands[num_moments:]
    leaves = rest[ratios:]
    gradient = pack(*leaves[: len(dtypes)], layout=layout)[0]
    before = pack(*leaves[len(dtypes) :], layout=layout)[0] if weights else jnp.zeros_like(gradient)
    _, change, *moments = _step(
        kind, layout, floats, (before, *olds), gradient, rest[0] if ratios else None
    )
    apply = floats[s.APPLY] != 0
    moments = [jnp.where(apply, x, old) for x, old in zip(moments, olds, strict=True)]
    return [*moments, *unpack(jnp.where(apply, change, 0), layout=layout, dtypes=dtypes)]


def update_norms(
    kind: str,
    series: int,
    floats: jax.Array,
    *operands: jax.Array,
    layout: ArenaLayout,
    from_arena: bool,
    direction: bool,
    ratios: bool,
) -> list[jax.Array]:
    """The norms, by segment, of what an update adds to the weights.

    With ``direction``, those of the update before its learning rate, and those of the weights.
    """
    states, rest = operands[:series], operands[series:]
    gradient = to_arena(rest[ratios:], layout, from_arena)
    before, change, *_ = _step(kind, layout, floats, states, gradient, rest[0] if ratios else None)
    arenas = (before, states[0]) if direction else ((states[0] + change) - states[0],)
    return [norms_of(layout, to_leaves((arena,), layout, True)) for arena in arenas]


class _Rates(NamedTuple):
    """The learning rate: where it is a factor."""

    update: jax.Array
    decay: jax.Array
    moment: jax.Array | float  # of what the momentum adds up


def _step(
    kind: str,
    layout: ArenaLayout,
    floats: jax.Array,
    states: Sequence[jax.Array],
    gradient: jax.Array,
    ratios: jax.Array | None,
) -> list[jax.Array]:
    """The update before its learning rate, decay included; what is to be added to the weights; then
    the new moments."""
    values = floats.astype(layout.dtype)
    bound = values[s.MAX_VALUE]
    # What is not finite would reach the derivatives of a call that is skipped, as 0 times NaN.
    gradient = jnp.where(values[s.APPLY] != 0, gradient, 0)
    gradient = jnp.clip(gradient * values[s.GRAD_FACTOR], -bound, bound)
    ratio = None if ratios is None else spread(layout, ratios.astype(layout.dtype))
    pieces: list[list[jax.Array]] = [[] for _ in range(1 + len(states))]
    for low, high, group in runs(layout):
        row = values[s.float_index(group, 0) : s.float_index(group, s.ROW)]
        rates = _rates(row, None if ratio is None else ratio[low:high])
        w, *moments = (x[low:high] for x in states)
        u, *moments = _DIRECTIONS[kind](row, rates, gradient[low:high], w, *moments)
        change = -(rates.decay * w + rates.update * u)
        before = u + row[s.WEIGHT_DECAY] * w
        for piece, x in zip(pieces, (before, change, *moments), strict=True):
            piece.append(x)
    if not pieces[0]:
        return [jnp.zeros_like(states[0]), jnp.zeros_like(states[0]), *states[1:]]
    return [jnp.concatenate(piece) for piece in pieces]


def _rates(row: jax.Array, ratio: jax.Array | None) -> _Rates:
    rate, decay = row[s.LR], row[s.LR_WD]
    if ratio is None:
        return _Rates(rate, decay, 1.0)
    in_moment = row[s.LR_IN_MOMENT] != 0
    return _Rates(
        update=jnp.where(in_moment, 1, rate * ratio),
        decay=jnp.where(in_moment, decay, decay * ratio),
        moment=jnp.where(in_moment, rate * ratio, 1),
    )


def _sgd(row: jax.Array, rates: _Rates, g: jax.Array, w: jax.Array) -> Sequence[jax.Array]:
    return (g + row[s.L2] * w,)


def _momentum(
    row: jax.Array, rates: _Rates, g: jax.Array, w: jax.Array, m: jax.Array
) -> Sequence[jax.Array]:
    m = row[s.MOMENTUM] * m + rates.moment * (g + row[s.L2] * w)
    return m, m


def _nesterov(
    row: jax.Array, rates: _Rates, g: jax.Array, w: jax.Array, m: jax.Array
) -> Sequence[jax.Array]:
    g = rates.moment * (g + row[s.L2] * w)
    m = row[s.MOMENTUM] * m + g
    return row[s.MOMENTUM] * m + g, m


def _adam(
    row: jax.Array, rates: _Rates, g: jax.Array, w: jax.Array, m: jax.Array, v: jax.Array
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
    return jnp.where(unmoved, 0, m * row[s.C1]) / jnp.where(unmoved, 1, denominator), m, v


def _lion(
    row: jax.Array, rates: _Rates, g: jax.Array, w: jax.Array, m: jax.Array
) -> Sequence[jax.Array]:
    g = g + row[s.L2] * w
    omb1, omb2 = row[s.ONE_MINUS_B1], row[s.ONE_MINUS_B2]
    return jnp.sign((1 - omb1) * m + omb1 * g), (1 - omb2) * m + omb2 * g


_DIRECTIONS = {
    "sgd": _sgd,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "adam": _adam,
    "lion": _lion,
}
