"""The table that the native handlers read: where each segment of an arena lies.

It depends on the plan alone and is an attribute of the call, so the handlers decode it once and
keep it in host memory with the compiled program; the CUDA kernels get it by value in their
parameters.
"""

import functools

import numpy as np

from ..arena_layout import ArenaLayout

_DTYPES = ("float32", "float64", "bfloat16", "float16")  # in the order of their codes


@functools.lru_cache(maxsize=64)
def layout_attribute(layout: ArenaLayout, merged: bool = True) -> np.ndarray:
    """int64: the arena's size, its dtype's code, then start, size, leaf, leaf offset, group of
    each segment. Merged: slices of a stacked leaf that follow each other without padding are
    one, which is all the same to an op that works element by element."""
    header = np.array([layout.size, _DTYPES.index(layout.dtype.name)], np.int64)
    segments = _merged(layout.segments) if merged else layout.segments
    return np.concatenate([header, segments.reshape(-1)])


def _merged(segments: np.ndarray) -> np.ndarray:
    start, size, leaf, leaf_offset, group = segments.T
    continues = np.zeros(len(segments), bool)
    continues[1:] = (
        (start[1:] == start[:-1] + size[:-1])
        & (leaf[1:] == leaf[:-1])
        & (leaf_offset[1:] == leaf_offset[:-1] + size[:-1])
        & (group[1:] == group[:-1])
    )
    firsts = np.flatnonzero(~continues)
    merged = segments[firsts].copy()
    if len(firsts):
        merged[:, 1] = np.add.reduceat(size, firsts)
    return merged
