"""unpack and pack in jax.numpy."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arena_layout import SEGMENT_BYTES, ArenaLayout


class Block(NamedTuple):
    """A leaf's stretch of the arena: as many slices of `size` elements, `stride` apart."""

    leaf: int
    start: int
    slices: int
    size: int
    stride: int

    @property
    def end(self) -> int:
        """Where the next leaf starts."""
        return self.start + self.slices * self.stride


@functools.lru_cache(maxsize=64)
def blocks(layout: ArenaLayout) -> tuple[Block, ...]:
    """The leaves that have elements, in arena order: their slices are all segments, in order."""
    segments = layout.segments
    leaves, firsts, counts = np.unique(segments[:, 2], return_index=True, return_counts=True)
    starts = segments[firsts, 0]
    # Slices of a leaf follow each other at one stride, and so does the next leaf.
    ends = np.append(starts[1:], _line_after(layout, segments[-1:, :2].sum()))
    return tuple(
        Block(int(leaf), int(start), int(count), int(size), int(end - start) // int(count))
        for leaf, start, count, size, end in zip(
            leaves, starts, counts, segments[firsts, 1], ends[: len(starts)], strict=True
        )
    )


def _line_after(layout: ArenaLayout, element: int) -> int:
    line = SEGMENT_BYTES // layout.dtype.itemsize
    return -(-int(element) // line) * line


def unpack(
    arena: jax.Array, *, layout: ArenaLayout, dtypes: tuple[np.dtype, ...]
) -> list[jax.Array]:
    """The leaves of an arena, in arena order."""
    leaves = [jnp.zeros(shape, dtype) for shape, dtype in zip(layout.shapes, dtypes, strict=True)]
    for block in blocks(layout):
        stretch = jax.lax.slice(arena, (block.start,), (block.end,))
        elements = stretch.reshape(block.slices, block.stride)[:, : block.size]
        shape, dtype = layout.shapes[block.leaf], dtypes[block.leaf]
        leaves[block.leaf] = elements.reshape(shape).astype(dtype)
    return leaves


def pack(*leaves: jax.Array, layout: ArenaLayout) -> list[jax.Array]:
    """An arena made of leaves in arena order; padding is zero."""
    parts, end = [], 0
    for block in blocks(layout):
        assert block.start == end
        elements = leaves[block.leaf].astype(layout.dtype).reshape(block.slices, block.size)
        padded = jnp.pad(elements, ((0, 0), (0, block.stride - block.size)))
        parts.append(padded.reshape(block.slices * block.stride))
        end = block.end
    return [jnp.concatenate([*parts, jnp.zeros(layout.size - end, layout.dtype)])]


def spread(layout: ArenaLayout, by_segment: jax.Array) -> jax.Array:
    """An arena with a segment's number at all its elements, and on the padding behind them."""
    parts, first = [], 0
    for block in blocks(layout):
        own = by_segment[first : first + block.slices, None]
        parts.append(jnp.broadcast_to(own, (block.slices, block.stride)).reshape(-1))
        first += block.slices
    end = sum(part.size for part in parts)
    return jnp.concatenate([*parts, jnp.zeros(layout.size - end, by_segment.dtype)])


def to_leaves(
    operands: tuple[jax.Array, ...], layout: ArenaLayout, from_arena: bool
) -> tuple[jax.Array, ...]:
    """Gradients as leaves, whichever they are given as."""
    if not from_arena:
        return operands
    dtypes = (layout.dtype,) * len(layout.shapes)
    return tuple(unpack(operands[0], layout=layout, dtypes=dtypes))


def to_arena(operands: tuple[jax.Array, ...], layout: ArenaLayout, from_arena: bool) -> jax.Array:
    """Gradients as an arena, whichever they are given as."""
    return operands[0] if from_arena else pack(*operands, layout=layout)[0]
