"""statistics in jax.numpy."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import scalars
from ..arena_layout import ArenaLayout
from .packing import to_leaves


def statistics(
    ints: jax.Array, *gradients: jax.Array, layout: ArenaLayout, first_leaf: int, from_arena: bool
) -> list[jax.Array]:
    """The counters with FIRST_BAD lowered to the first leaf that has a non-finite element."""
    leaves = to_leaves(gradients, layout, from_arena)
    return [lower_first_bad(ints, [~jnp.isfinite(x) for x in leaves], first_leaf)]


def lower_first_bad(ints: jax.Array, bad: Sequence[jax.Array], first_leaf: int) -> jax.Array:
    """The counters with FIRST_BAD lowered to the first leaf of which an element is bad."""
    numbers = first_leaf + np.arange(len(bad), dtype=np.int32)
    any_bad = jnp.stack([jnp.any(x) for x in bad])
    first = jnp.min(jnp.where(any_bad, numbers, np.int32(scalars.NO_LEAF)))
    return ints.at[scalars.FIRST_BAD].min(first)
