"""finish, finish_update and finish_ratios in jax.numpy."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import scalars as s
from .norms import norm
from .prologue import advance, divisor
from .trust import LAMB, trust_ratios


def finish(
    floats: jax.Array,
    ints: jax.Array,
    *operands: jax.Array,
    num_floats: int,
    dtype: np.dtype,
    sizes: tuple[int, ...],
    segments: tuple[int, ...],
    gradients: int,
    by_segment: bool,
    trust: int,
) -> list[jax.Array]:
    """The prologue with the norms of all segments; then these, and what is asked for by segment.

    ``operands`` are the norms, then with trust ratios the segments' groups.
    """
    norms, groups = operands[: len(segments)], operands[len(segments) :]
    divided_by = divisor(floats, ints)
    new_floats, new_ints = advance(floats, ints, _total(norms[:gradients]))
    weights = norms[gradients : 2 * gradients] if trust else norms[gradients:]
    if weights:
        new_floats = new_floats.at[s.PARAM_NORM].set(_total(weights).astype(dtype))
    numbers = []
    if by_segment:
        numbers += [(x / divided_by.astype(x.dtype)).astype(dtype) for x in norms[:gradients]]
    if trust:
        series = [norms[k * gradients : (k + 1) * gradients] for k in range(1 + trust)]
        numbers += [
            trust_ratios(trust, new_floats, own, *of_arena)
            for own, *of_arena in zip(groups, *series, strict=True)
        ]
    return [new_floats, new_ints, *norms, *numbers]


def finish_update(
    floats: jax.Array,
    *norms: jax.Array,
    num_floats: int,
    dtype: np.dtype,
    sizes: tuple[int, ...],
    segments: tuple[int, ...],
) -> list[jax.Array]:
    """The scalars with the norm of the update, and the norms of its segments."""
    update_norm = jnp.where(floats[s.APPLY] != 0, _total(norms).astype(dtype), 0)
    return [floats.at[s.UPDATE_NORM].set(update_norm), *norms]


def finish_ratios(
    floats: jax.Array,
    *operands: jax.Array,
    num_floats: int,
    dtype: np.dtype,
    sizes: tuple[int, ...],
    segments: tuple[int, ...],
    gradients: int,
) -> list[jax.Array]:
    """The scalars, the norms of updates and weights by segment, and the ratios of these.

    ``operands`` are the norms, then the segments' groups.
    """
    norms, groups = operands[: len(segments)], operands[len(segments) :]
    arenas = zip(groups, norms[:gradients], norms[gradients:], strict=True)
    return [floats, *norms, *(trust_ratios(LAMB, floats, *arena) for arena in arenas)]


def _total(norms: Sequence[jax.Array]) -> jax.Array:
    return norm(jnp.concatenate(norms)) if norms else jnp.zeros(())
