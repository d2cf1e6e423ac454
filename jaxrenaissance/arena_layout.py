"""ArenaLayout: how leaves lie in one arena, as aligned segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import numpy as np

from .regions import Region

SEGMENT_BYTES = 128
"""Every segment of float32 or float64 starts on a multiple of this many bytes."""

_ARENA_OF = {
    "float32": np.dtype("float32"),
    "bfloat16": np.dtype("float32"),
    "float16": np.dtype("float32"),
    "float64": np.dtype("float64"),
}
ARENA_DTYPES = tuple(dict.fromkeys(_ARENA_OF.values()))
"""The dtypes that arenas have, in their order in a plan."""


@dataclass(frozen=True)
class Leaf:
    """One trained leaf and its place.

    Attributes:
        path: its components joined by "/".
        shape, dtype: as in the tree, stacked axes included.
        region: its region in series W.
        rule: which rule put it there.
        group: index into `MemoryPlan.groups`.
        stacked: how many leading axes come from a scan or vmap; each slice is a segment.
        arena: index into `MemoryPlan.arenas`.
        offset: where its first segment starts, in elements of the arena.
        size: its elements, without padding.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    region: Region
    rule: str
    group: int
    stacked: int
    arena: int
    offset: int
    size: int


@dataclass(frozen=True, eq=False, repr=False)
class ArenaLayout:
    """The layout of one arena: static, hashable, equal by identity first and by content then.

    Attributes:
        dtype: float32 or float64. For what travels between devices, `pack` and `unpack` also work
            with arenas of bfloat16 and float16; no plan has such.
        size: elements; a multiple of `line_elements(dtype)` for every shard.
        leaves: indices into `MemoryPlan.leaves` in arena order: by region, then as in the tree.
        shapes: the leaves' shapes, in arena order.
        segments: int64 [n, 5], read-only, in increasing start. Columns: start, size (elements),
            leaf (its position in arena order), offset inside the leaf (elements), group. A stacked
            leaf has a row for each slice; a leaf without elements has none. In a layout for `pack`
            and `unpack` alone, any rows may cover a leaf, in any order of their leaf offsets.
    """

    dtype: np.dtype
    size: int
    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    segments: np.ndarray

    def __post_init__(self) -> None:
        self.segments.flags.writeable = False

    @property
    def nbytes(self) -> int:
        """Bytes of one series."""
        return self.size * self.dtype.itemsize

    @cached_property
    def _hash(self) -> int:
        return hash((self.dtype, self.size, self.leaves, self.shapes, self.segments.tobytes()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ArenaLayout):
            return NotImplemented
        return (
            hash(self) == hash(other)
            and (self.dtype, self.size) == (other.dtype, other.size)
            and (self.leaves, self.shapes) == (other.leaves, other.shapes)
            and np.array_equal(self.segments, other.segments)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Leaves the cached hash behind: strings hash differently in another process.
        return ArenaLayout, (self.dtype, self.size, self.leaves, self.shapes, self.segments)

    def __repr__(self) -> str:
        counts = f"{len(self.leaves)} leaves, {len(self.segments)} segments"
        return f"ArenaLayout({self.dtype}[{self.size}], {counts})"


def arena_dtype(leaf: Any) -> np.dtype | None:
    """The dtype of the arena that holds a leaf, from its shape and dtype; None if none does."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return None
    return _ARENA_OF.get(leaf.dtype.name)  # By name: bfloat16 and keys are not NumPy's own.


def line_elements(dtype: np.dtype) -> int:
    """Every segment starts on a multiple of this many elements.

    In arenas of bfloat16 and float16 it is that of float32, so the same offsets serve both.
    """
    return SEGMENT_BYTES // max(dtype.itemsize, 4)


def round_up(size: int, unit: int) -> int:
    """The least multiple of a unit that is not less than a size."""
    return -(-size // unit) * unit


def lay_out(
    unit: int,
    shapes: Sequence[tuple[int, ...]],
    axes: Sequence[int],
    groups: Sequence[int],
) -> tuple[list[int], int, np.ndarray]:
    """Offsets of the leaves, the size of all, and the segments, from the leaves in arena order."""
    counts = np.array([prod(s[:n]) for s, n in zip(shapes, axes, strict=True)], np.int64)
    sizes = np.array([prod(s[n:]) for s, n in zip(shapes, axes, strict=True)], np.int64)
    strides = -(-sizes // unit) * unit
    ends = np.cumsum(counts * strides)
    offsets = ends - counts * strides

    rows = np.where(sizes > 0, counts, 0)
    leaf = np.repeat(np.arange(len(shapes)), rows)
    piece = np.arange(len(leaf)) - (np.cumsum(rows) - rows)[leaf]  # Which slice of its leaf.
    columns = (
        offsets[leaf] + piece * strides[leaf],
        sizes[leaf],
        leaf,
        piece * sizes[leaf],
        np.array(groups)[leaf],
    )
    return offsets.tolist(), int(ends[-1]), np.stack(columns, axis=1).astype(np.int64)
