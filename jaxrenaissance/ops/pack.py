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


_pack = Op("pack", result_types=_result_types, reference=reference)


def pack(layout: ArenaLayout, leaves: Sequence[jax.Array], *, backend: str) -> jax.Array:
    """A new arena that holds the leaves, widened to its dtype; the padding between them is zero.

    Args:
      layout: the arena's layout.
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
