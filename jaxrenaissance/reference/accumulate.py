"""accumulate in jax.numpy."""

import jax
import jax.numpy as jnp

from .. import scalars
from ..arena_layout import ArenaLayout
from .norms import norms_of
from .packing import to_arena, to_leaves, unpack
from .statistics import lower_first_bad


def accumulate(
    ints: jax.Array,
    accumulator: jax.Array,
    *gradients: jax.Array,
    layout: ArenaLayout,
    first_leaf: int,
    flag: bool,
    norms: bool,
    from_arena: bool,
) -> list[jax.Array]:
    """The counters, the sum and, where `norms`, the norms of the sum's segments."""
    gradient = to_arena(gradients, layout, from_arena)
    first = ints[scalars.MICRO] == 0
    total = jnp.where(first, gradient, accumulator + gradient)
    if flag:
        # A sum that overflows is this micro-batch's fault, one that was not finite is not.
        overflows = ~jnp.isfinite(total) & (first | jnp.isfinite(accumulator))
        bad = ~jnp.isfinite(gradient) | overflows
        masks = unpack(bad, layout=layout, dtypes=(bad.dtype,) * len(layout.shapes))
        ints = lower_first_bad(ints, masks, first_leaf)
    if not norms:
        return [ints, total]
    return [ints, total, norms_of(layout, to_leaves((total,), layout, True))]
