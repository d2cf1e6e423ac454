"""norms in jax.numpy, and the workspaces that carry them to `finish`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..plan import ArenaLayout
from ..workspaces import workspace_size
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
    """The counters, with FIRST_BAD lowered where `flag`, and the workspace."""
    leaves = to_leaves(gradients, layout, from_arena)
    if flag:
        ints = lower_first_bad(ints, [~jnp.isfinite(x) for x in leaves], first_leaf)
    return [ints, workspace_of(layout, leaves)]


def workspace_of(layout: ArenaLayout, leaves: Sequence[jax.Array]) -> jax.Array:
    """The norm of every segment, as the first words of a workspace."""
    dtype = _dtype()
    of_blocks = [
        norm(leaves[block.leaf].astype(dtype).reshape(block.slices, block.size))
        for block in blocks(layout)
    ]
    words = jnp.zeros(0, np.int32)
    if of_blocks:
        values = jnp.concatenate(of_blocks)
        words = jax.lax.bitcast_convert_type(values, np.int32).reshape(-1)
    return jnp.pad(words, (0, workspace_size(layout) - words.size))


def norms_of(workspace: jax.Array, segments: int) -> jax.Array:
    """The norms that `workspace_of` has written, one a segment."""
    dtype = _dtype()
    words = workspace[: segments * (dtype.itemsize // 4)]
    if dtype == np.float64:
        words = words.reshape(segments, 2)
    return jax.lax.bitcast_convert_type(words, dtype)


def norm(x: jax.Array) -> jax.Array:
    """The norm over the last axis: no square overflows, none is lost in underflow."""
    # XLA may divide by multiplying with the reciprocal, which is not to be subnormal.
    tiny = jnp.finfo(x.dtype).tiny
    scale = jnp.clip(jnp.max(jnp.abs(x), axis=-1, initial=0), tiny, 1 / tiny)
    return scale * jnp.sqrt(jnp.sum(jnp.square(x / scale[..., None]), axis=-1))


def _dtype() -> np.dtype:
    # Whatever dtypes the arenas have: all norms of a state are added up.
    return np.dtype(jax.dtypes.canonicalize_dtype(np.float64))
