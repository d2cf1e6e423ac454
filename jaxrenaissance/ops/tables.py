"""The constant tables that native handlers read: where segments lie, which ones a tile covers.

They depend on the plan alone, so they are constants of the compiled program, uploaded once.
"""

import enum
import functools

import numpy as np

from .. import native
from ..plan import ArenaLayout

# A tile that lies within one segment: columns are the leaf's element offset (low and high word),
# the leaf, the group. A tile that does not: first and last segment, -1, unused. A tile of padding
# only names the segment before it; where there is no segment at all, last < first.
TILE_COLUMNS = 4


class NativeTables(enum.Enum):
    """Which tables an op's handlers take."""

    NONE = "none"
    LAYOUT = "layout"

    def arrays(self, layout: ArenaLayout | None, platform: str) -> list[np.ndarray]:
        """The tables in the handlers' order, as int32: an int64 is two words, so x64 may be off."""
        if self is NativeTables.NONE:
            return []
        assert layout is not None
        segments = [layout.segments.view(np.int32)]
        if platform == "cuda":
            return [tile_table(layout, native.tuning()["tile"]), *segments]
        return segments


@functools.lru_cache(maxsize=64)
def tile_table(layout: ArenaLayout, tile: int) -> np.ndarray:
    """What each stretch of ``tile`` elements of the arena covers: int32 (tiles, TILE_COLUMNS)."""
    start, size, leaf, leaf_offset, group = layout.segments.T
    tiles = -(-layout.size // tile)
    low = np.arange(tiles, dtype=np.int64) * tile
    high = np.minimum(low + tile, layout.size)
    first = np.searchsorted(start + size, low, side="right")
    last = np.searchsorted(start, high, side="left") - 1
    table = np.empty((tiles, TILE_COLUMNS), np.int32)
    empty = (last < first) & (last >= 0)
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = np.where(empty, last, first), last, -1, 0
    if len(start):
        f = np.minimum(first, len(start) - 1)
        whole = (first == last) & (start[f] <= low) & (start[f] + size[f] >= low + tile)
        offset = (leaf_offset[f] + low - start[f])[whole]
        table[whole, 0] = (offset & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        table[whole, 1] = (offset >> 32).astype(np.int32)
        table[whole, 2] = leaf[f][whole]
        table[whole, 3] = group[f][whole]
    return table


@functools.lru_cache(maxsize=64)
def tile_ranges(layout: ArenaLayout, tile: int, max_leaves: int) -> np.ndarray:
    """Which tiles each launch sweeps, where a launch takes at most ``max_leaves`` leaves.

    int64 of shape (2 * launches,): first tile and number of tiles of each launch.
    """
    tiles = -(-layout.size // tile)
    starts, leaves = layout.segments[:, 0], layout.segments[:, 2]
    ranges = []
    for first_leaf in range(0, len(layout.shapes), max_leaves):
        low, high = np.searchsorted(leaves, [first_leaf, first_leaf + max_leaves])
        first = int(starts[low]) // tile if first_leaf and low < len(starts) else 0
        last_launch = first_leaf + max_leaves >= len(layout.shapes)
        end = tiles if last_launch or high >= len(starts) else -(-int(starts[high]) // tile)
        ranges += [first, max(end - first, 0)]
    return np.array(ranges, np.int64)
