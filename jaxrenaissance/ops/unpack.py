"""unpack: an arena to its leaves, in one launch."""

from collections.abc import Sequence

import jax
import numpy as np

from ..arena_layout import ArenaLayout
from ..reference import unpack as reference
from .checks import check_arena, check_leaf_dtypes
from .primitive import Op


def _result_types(
    *, layout: ArenaLayout, dtypes: tuple[np.dtype, ...]
) -> list[tuple[tuple[int, ...], np.dtype]]:
    return list(zip(layout.shapes, dtypes, strict=True))


_unpack = Op("unpack", result_types=_result_types, reference=reference, narrow=True)


def unpack(
    layout: ArenaLayout, arena: jax.Array, dtypes: Sequence[np.dtype], *, backend: str
) -> list[jax.Array]:
    """Leaf i is its part of the arena, rounded to nearest even to ``dtypes[i]``.

    An arena of bfloat16 or float16 is widened to float32 before; a leaf of the arena's own dtype
    keeps its bits.

    Args:
      layout: the arena's layout; of any dtype that `ArenaLayout` names.
      arena: [layout.size], of the layout's dtype.
      dtypes: for each leaf, float32, bfloat16 or float16; or float64 where the arena is.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The leaves in arena order, leaf i of shape ``layout.shapes[i]`` and dtype ``dtypes[i]``.

    Raises:
      ValueError: the arena or a dtype does not fit the layout.
    """
    check_arena("arena", arena, layout)
    dtypes = tuple(np.dtype(d) for d in dtypes)
    check_leaf_dtypes("dtypes", dtypes, layout)
    if not layout.shapes:
        return []
    return _unpack(arena, layout=layout, dtypes=dtypes, backend=backend)
