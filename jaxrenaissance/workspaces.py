"""What `norms` leaves for `finish`: one array of int32 words an arena, opaque in between.

A native backend writes, of each segment, sums of squares in float64 over stretches of ``PARTIAL``
elements; before these, the number of each segment's first sum, and that of all. The size is part of
the ABI.

The xla backend leaves floats, a norm a segment, and of products a cosine, as integers would cut off
derivatives; where it stands in for a primitive, their bits are the first words.
"""

import jax
import numpy as np

from .arena_layout import ArenaLayout

PARTIAL = 8192


def workspace_size(layout: ArenaLayout) -> int:
    """The words of an arena's workspace."""
    partials = int((-(-layout.segments[:, 1] // PARTIAL)).sum())
    return partials_start(len(layout.segments)) + 2 * partials


def least_size(segments: int) -> int:
    """The words where every one of so many segments has a single sum."""
    return partials_start(segments) + 2 * segments


def partials_start(segments: int) -> int:
    """The words before the sums."""
    return (segments + 2) // 2 * 2


def norm_dtype() -> np.dtype:
    """The dtype of the xla backend's norms: float64 where JAX has it, whatever the arenas are.

    All norms of a state are added up.
    """
    return np.dtype(jax.dtypes.canonicalize_dtype(np.float64))
