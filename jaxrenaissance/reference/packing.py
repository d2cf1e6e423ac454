"""unpack and pack in jax.numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ..plan import ArenaLayout


def unpack(
    arena: jax.Array, *, layout: ArenaLayout, dtypes: tuple[np.dtype, ...]
) -> list[jax.Array]:
    """The leaves of an arena, in arena order."""
    stretches: list[list[jax.Array]] = [[] for _ in layout.shapes]
    for start, size, leaf, _, _ in layout.segments.tolist():
        stretches[leaf].append(jax.lax.slice(arena, (start,), (start + size,)))
    leaves = []
    for parts, shape, dtype in zip(stretches, layout.shapes, dtypes, strict=True):
        if not parts:
            parts = [jnp.zeros((0,), arena.dtype)]
        flat = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        leaves.append(flat.reshape(shape).astype(dtype))
    return leaves


def pack(*leaves: jax.Array, layout: ArenaLayout) -> list[jax.Array]:
    """An arena made of leaves in arena order; padding is zero."""
    flat = [
        leaf.astype(layout.dtype).reshape(math.prod(shape))
        for leaf, shape in zip(leaves, layout.shapes, strict=True)
    ]
    parts, end = [], 0
    for start, size, leaf, leaf_offset, _ in layout.segments.tolist():
        parts.append(jnp.zeros(start - end, layout.dtype))
        parts.append(jax.lax.slice(flat[leaf], (leaf_offset,), (leaf_offset + size,)))
        end = start + size
    parts.append(jnp.zeros(layout.size - end, layout.dtype))
    return [jnp.concatenate([part for part in parts if part.size] or parts[:1])]
