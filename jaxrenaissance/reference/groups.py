"""Which group's numbers apply where in an arena."""

import numpy as np

from ..arena_layout import ArenaLayout


def runs(layout: ArenaLayout) -> list[tuple[int, int, int]]:
    """The arena as stretches of one group: (low, high, group).

    Padding is all zero and stays so under every op.
    """
    groups = layout.segments[:, 4]
    if not len(groups):
        return []
    firsts = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
    edges = [0, *layout.segments[firsts[1:], 0].tolist(), layout.size]
    return list(zip(edges[:-1], edges[1:], groups[firsts].tolist(), strict=True))
