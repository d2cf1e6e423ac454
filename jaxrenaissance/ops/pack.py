"""pack: leaves to an arena, in one launch."""

from collections.abc import Sequence

import jax
import numpy as np

from ..arena_layout import ArenaLayout
from ..reference import pack as reference
from .checks import check_leaves
from .primitive import Op


def _result_types(*, layout: ArenaLayout) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [((layout.size,), layout.dtype)]


_pack = Op("pack", result_types=_result_types, reference=reference, narrow=True)


def pack(layout: ArenaLayout, leaves: Sequence[jax.Array], *, backend: str) -> jax.Array:
    """A new arena that holds the leaves in its dtype; the padding between them is zero.

    An arena of float32 or float64 widens them. One of bfloat16 or float16 rounds them to nearest
    even, by way of float32; a leaf of its own dtype keeps its bits.

    Args:
      layout: the arena's layout; of any dtype that `ArenaLayout` names.
      leaves: in arena order, leaf i of shape ``layout.shapes[i]``; float32, bfloat16, float16, or
        float64 where the arena is.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The arena: [layout.size], of the layout's dtype.

    Raises:
      ValueError: a leaf does not fit the layout.
    """
    check_leaves("leaves", leaves, layout)
    return _pack(*leaves, layout=layout, backend=backend)[0]
