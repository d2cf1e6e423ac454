"""finish and finish_update in jax.numpy."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import scalars as s
from .norms import norm
from .prologue import advance, divisor


def finish(
    floats: jax.Array,
    ints: jax.Array,
    *norms: jax.Array,
    num_floats: int,
    dtype: np.dtype,
    sizes: tuple[int, ...],
    segments: tuple[int, ...],
    gradients: int,
    by_segment: bool,
) -> list[jax.Array]:
    """The prologue with the norms of all segments; then these, and those to give to the user."""
    divided_by = divisor(floats, ints)
    new_floats, new_ints = advance(floats, ints, _total(norms[:gradients]))
    if norms[gradients:]:
        param_norm = _total(norms[gradients:]).astype(dtype)
        new_floats = new_floats.at[s.PARAM_NORM].set(param_norm)
    unscaled = []
    if by_segment:
        unscaled = [(x / divided_by.astype(x.dtype)).astype(dtype) for x in norms[:gradients]]
    return [new_floats, new_ints, *norms, *unscaled]


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


def _total(norms: Sequence[jax.Array]) -> jax.Array:
    return norm(jnp.concatenate(norms)) if norms else jnp.zeros(())
