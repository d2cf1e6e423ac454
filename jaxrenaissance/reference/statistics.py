"""statistics in jax.numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from .. import scalars
from ..plan import ArenaLayout
from .packing import unpack


def statistics(
    ints: jax.Array, *gradients: jax.Array, layout: ArenaLayout, first_leaf: int, from_arena: bool
) -> list[jax.Array]:
    """The counters with FIRST_BAD lowered to the first leaf that has a non-finite element."""
    if from_arena:
        gradients = tuple(
            unpack(gradients[0], layout=layout, dtypes=(layout.dtype,) * len(layout.shapes))
        )
    bad = jnp.stack([jnp.any(~jnp.isfinite(g)) for g in gradients])
    numbers = first_leaf + np.arange(len(gradients), dtype=np.int32)
    first = jnp.min(jnp.where(bad, numbers, np.int32(scalars.NO_LEAF)))
    return [ints.at[scalars.FIRST_BAD].min(first)]
