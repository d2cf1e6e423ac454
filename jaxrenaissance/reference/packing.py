"""unpack, pack and pack_piece in jax.numpy."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arena_layout import ArenaLayout, line_elements, round_up


class Block(NamedTuple):
    """Segments that follow each other in the arena and in a leaf.

    They are as many slices of `size` elements, from `offset` of the leaf on, and `stride` apart in
    the arena.
    """

    leaf: int
    offset: int
    start: int
    slices: int
    size: int
    stride: int

    @property
    def end(self) -> int:
        """Where the last slice's last line ends."""
        return self.start + self.slices * self.stride

    def of(self, leaf: jax.Array) -> jax.Array:
        """[slices, size]: the leaf's part."""
        count = self.slices * self.size
        if count < leaf.size:
            leaf = jax.lax.slice(leaf.reshape(-1), (self.offset,), (self.offset + count,))
        return leaf.reshape(self.slices, self.size)


@functools.lru_cache(maxsize=64)
def blocks(layout: ArenaLayout) -> tuple[Block, ...]:
    """The segments in their order, as few blocks: one for each leaf whose slices lie in order."""
    line = line_elements(layout.dtype)
    found: list[Block] = []
    for start, size, leaf, offset, _ in layout.segments.tolist():
        if found:
            last = found[-1]
            next_offset = last.offset + last.slices * last.size
            if (start, size, leaf, offset) == (last.end, last.size, last.leaf, next_offset):
                found[-1] = last._replace(slices=last.slices + 1)
                continue
        found.append(Block(leaf, offset, start, 1, size, round_up(size, line)))
    return tuple(found)


def unpack(
    arena: jax.Array, *, layout: ArenaLayout, dtypes: tuple[np.dtype, ...]
) -> list[jax.Array]:
    """The leaves of an arena, in arena order."""
    parts: list[list[jax.Array]] = [[] for _ in layout.shapes]
    for block in sorted(blocks(layout)):  # by leaf and offset
        stretch = jax.lax.slice(arena, (block.start,), (block.end,))
        elements = stretch.reshape(block.slices, block.stride)[:, : block.size]
        parts[block.leaf].append(elements.reshape(-1))
    return [
        jnp.concatenate(own or [jnp.zeros(0, arena.dtype)]).reshape(shape).astype(dtype)
        for own, shape, dtype in zip(parts, layout.shapes, dtypes, strict=True)
    ]


def pack(*leaves: jax.Array, layout: ArenaLayout) -> list[jax.Array]:
    """An arena made of leaves in arena order; padding is zero."""
    stretches = []
    for block in blocks(layout):
        elements = block.of(leaves[block.leaf]).astype(layout.dtype)
        padded = jnp.pad(elements, ((0, 0), (0, block.stride - block.size)))
        stretches.append(padded.reshape(-1))
    return [_arena_of(layout, stretches, layout.dtype)]


def pack_piece(
    index: jax.Array, *leaves: jax.Array, layout: ArenaLayout, shards: int
) -> list[jax.Array]:
    """Piece `index` of the leaves; padding is zero."""
    stretches, end = [], 0
    for i, leaf in enumerate(leaves):
        rows = layout.segments[layout.segments[:, 2] == i]
        for _, size, _, _, missing in rows[:1].tolist():  # A leaf's slices are of one size.
            slices = leaf.reshape(len(rows), shards * size - missing)
            pieces = jnp.pad(slices, ((0, 0), (0, missing))).reshape(len(rows), shards, size)
            own = jax.lax.dynamic_index_in_dim(pieces, index, 1, keepdims=False)
            stride = round_up(size, line_elements(layout.dtype))
            padded = jnp.pad(own.astype(layout.dtype), ((0, 0), (0, stride - size)))
            stretches.append(padded.reshape(-1))
            end += padded.size
    return [jnp.concatenate([*stretches, jnp.zeros(layout.size - end, layout.dtype)])]


def spread(layout: ArenaLayout, by_segment: jax.Array) -> jax.Array:
    """An arena with a segment's number at all its elements, and on the rest of its last line."""
    stretches, first = [], 0
    for block in blocks(layout):
        own = by_segment[first : first + block.slices, None]
        stretches.append(jnp.broadcast_to(own, (block.slices, block.stride)).reshape(-1))
        first += block.slices
    return _arena_of(layout, stretches, by_segment.dtype)


def _arena_of(layout: ArenaLayout, stretches: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    """The blocks' stretches where they lie in the arena, and zero elsewhere."""
    parts, end = [], 0
    for block, stretch in zip(blocks(layout), stretches, strict=True):
        if block.start > end:
            parts.append(jnp.zeros(block.start - end, dtype))
        parts.append(stretch)
        end = block.end
    return jnp.concatenate([*parts, jnp.zeros(layout.size - end, dtype)])


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
