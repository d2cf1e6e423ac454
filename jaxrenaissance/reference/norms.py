"""norms in jax.numpy."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..plan import ArenaLayout
from ..workspaces import norm_dtype
from .packing import blocks, to_leaves
from .statistics import lower_first_bad


def norms(
    ints: jax.Array,
    *gradients: jax.Array,
    layout: ArenaLayout,
    first_leaf: int,
    flag: bool,
    from_arena: bool,
) -> list[jax.Array]:
    """The counters, with FIRST_BAD lowered where `flag`, and the norms of the segments."""
    leaves = to_leaves(gradients, layout, from_arena)
    if flag:
        ints = lower_first_bad(ints, [~jnp.isfinite(x) for x in leaves], first_leaf)
    return [ints, norms_of(layout, leaves)]


def norms_of(layout: ArenaLayout, leaves: Sequence[jax.Array]) -> jax.Array:
    """The norm of every segment."""
    dtype = norm_dtype()
    of_blocks = [
        norm(leaves[block.leaf].astype(dtype).reshape(block.slices, block.size))
        for block in blocks(layout)
    ]
    return jnp.concatenate(of_blocks) if of_blocks else jnp.zeros(0, dtype)


@jax.custom_jvp
def norm(x: jax.Array) -> jax.Array:
    """The norm over the last axis: no square overflows, none is lost in underflow."""
    # XLA may divide by multiplying with the reciprocal, which is not to be subnormal.
    tiny = jnp.finfo(x.dtype).tiny
    scale = jnp.clip(jnp.max(jnp.abs(x), axis=-1, initial=0), tiny, 1 / tiny)
    return scale * jnp.sqrt(jnp.sum(jnp.square(x / scale[..., None]), axis=-1))


@norm.defjvp
def _norm_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    value = norm(x)
    # The derivative is x / norm, and 0 where all is zero. A norm that is not finite belongs to a
    # call that is skipped: a NaN would outlast being multiplied by that call's 0.
    regular = ((value > 0) & jnp.isfinite(value))[..., None]
    unit = jnp.where(regular, x / jnp.where(regular, value[..., None], 1), 0)
    return value, jnp.sum(unit * dx, axis=-1)
