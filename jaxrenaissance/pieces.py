"""How the arenas of several devices fit together where each holds a piece of every segment.

A segment of n elements is cut into as many pieces of equal size as there are devices, whole lines
each; the last ones may be shorter, or empty, and are zeros to their end. So all devices have one
layout, and what works on an arena works on a device's piece of it. Packing, and what is gathered
from all devices, is of *whole* arenas: the pieces of the first device, then those of the second.
"""

import functools
from math import prod
from typing import NamedTuple

import numpy as np

from .arena_layout import SEGMENT_BYTES, ArenaLayout, Leaf, round_up


def piece_shape(
    shape: tuple[int, ...], stacked: int, shards: int, dtype: np.dtype
) -> tuple[tuple[int, ...], int]:
    """The shape of what a device holds of a leaf, and how many of its axes are stacked."""
    slices, size = prod(shape[:stacked]), prod(shape[stacked:])
    size = round_up(-(-size // shards), SEGMENT_BYTES // dtype.itemsize)
    return ((slices, size), 1) if stacked else ((size,), 0)


@functools.lru_cache(maxsize=64)
def whole_layout(
    layout: ArenaLayout, leaves: tuple[Leaf, ...], shards: int, dtype: np.dtype
) -> ArenaLayout:
    """All devices' pieces side by side, as segments of the leaves.

    Args:
        layout: of a piece.
        leaves: of the arena, in its order.
        shards: how many pieces there are.
        dtype: of the whole arena.
    """
    rows = _rows_of_all(layout.segments, leaves, layout.size, shards)
    shapes = tuple(leaf.shape for leaf in leaves)
    return ArenaLayout(np.dtype(dtype), layout.size * shards, layout.leaves, shapes, rows)


@functools.lru_cache(maxsize=64)
def cutting_layout(layout: ArenaLayout, leaves: tuple[Leaf, ...], shards: int) -> ArenaLayout:
    """A piece whose segments are of leaves that every device has whole; arguments as above.

    A segment's offset is that of its slice, whichever piece is asked for, and its group says how
    many elements all pieces of the slice have more than it.
    """
    start, length, leaf, _, _ = layout.segments.T
    sizes, offsets = _slices_of(layout.segments, leaves)
    rows = np.stack([start, length, leaf, offsets, shards * length - sizes], axis=1)
    shapes = tuple(x.shape for x in leaves)
    return ArenaLayout(layout.dtype, layout.size, layout.leaves, shapes, rows)


class Gathering(NamedTuple):
    """How pieces become the leaves of all devices: by way of one buffer for each dtype.

    Attributes:
        narrowing: from a piece to its parts of the buffers, which are its leaves; None where the
            piece is the one buffer as it is.
        wholes: of each gathered buffer.
        members: for each buffer its leaves, by their positions in the arena.
    """

    narrowing: ArenaLayout | None
    wholes: tuple[ArenaLayout, ...]
    members: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=64)
def gathering(
    layout: ArenaLayout, leaves: tuple[Leaf, ...], shards: int, dtypes: tuple[np.dtype, ...]
) -> Gathering:
    """How to gather the leaves of an arena in these dtypes; arguments as in `whole_layout`."""
    each = tuple(dict.fromkeys(dtypes))
    if each == (layout.dtype,):
        whole = whole_layout(layout, leaves, shards, layout.dtype)
        return Gathering(None, (whole,), (tuple(range(len(leaves))),))
    narrow = layout.segments.copy()
    wholes, members, sizes = [], [], []
    for k, dtype in enumerate(each):
        own = [i for i in range(len(leaves)) if dtypes[i] == dtype]
        rows = np.flatnonzero(np.isin(layout.segments[:, 2], own))
        lines = -(-layout.segments[rows, 1] // _LINE) * _LINE
        places = np.cumsum(lines) - lines
        size = int(lines.sum())
        narrow[rows, 2], narrow[rows, 3] = k, places
        buffer = layout.segments[rows].copy()
        buffer[:, 0] = places
        numbers = {i: n for n, i in enumerate(own)}
        buffer[:, 2] = [numbers[i] for i in buffer[:, 2].tolist()]
        some = tuple(leaves[i] for i in own)
        wholes.append(
            ArenaLayout(
                dtype,
                size * shards,
                tuple(range(len(own))),
                tuple(leaf.shape for leaf in some),
                _rows_of_all(buffer, some, size, shards),
            )
        )
        members.append(tuple(own))
        sizes.append((size,))
    narrowing = ArenaLayout(
        layout.dtype, layout.size, tuple(range(len(each))), tuple(sizes), narrow
    )
    return Gathering(narrowing, tuple(wholes), tuple(members))


_LINE = 32
"""Segments of a buffer start on multiples of this many elements, whatever its dtype."""


def _rows_of_all(piece: np.ndarray, leaves: tuple[Leaf, ...], size: int, shards: int) -> np.ndarray:
    """The segments of as many pieces of `size` elements; each is a part of a leaf's slice."""
    start, length, leaf, _, group = piece.T
    sizes, offsets = _slices_of(piece, leaves)
    rows = []
    for d in range(shards):
        own = np.clip(sizes - d * length, 0, length)
        place = d * size + start
        row = np.stack([place, own, leaf, offsets + d * length, group], axis=1)
        rows.append(row[own > 0])
    return np.concatenate(rows).astype(np.int64)


def _slices_of(piece: np.ndarray, leaves: tuple[Leaf, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of each segment of a piece, the slice that it is of: its size, and its offset in its leaf."""
    _, length, leaf, offset, _ = piece.T
    sizes = np.array([prod(x.shape[x.stacked :]) for x in leaves], np.int64)[leaf]
    # The offset inside a piece's leaf says of which.
    return sizes, offset // np.maximum(length, 1) * sizes
