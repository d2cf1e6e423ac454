"""pack_piece: one of the equal pieces of leaves to an arena, in one launch."""

from collections.abc import Sequence

import jax
import numpy as np

from ..arena_layout import ArenaLayout
from ..reference import pack_piece as reference
from .checks import check_array, check_leaves
from .primitive import Op


def _result_types(*, layout: ArenaLayout, shards: int) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [((layout.size,), layout.dtype)]


_pack_piece = Op(
    "pack_piece",
    result_types=_result_types,
    reference=reference,
    attributes=lambda layout, shards: {"shards": shards},
    merged=lambda layout, shards: False,
    narrow=True,
)


def pack_piece(
    layout: ArenaLayout,
    leaves: Sequence[jax.Array],
    index: jax.Array,
    *,
    shards: int,
    backend: str,
) -> jax.Array:
    """Piece `index` of an arena that holds the leaves; only this part of them is read.

    Args:
      layout: what `pieces.cutting_layout` makes; of any dtype that `ArenaLayout` names.
      leaves: whole; as in `pack`.
      index: int32 [], at least 0 and less than `shards`.
      shards: how many pieces there are.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The piece: [layout.size], of the layout's dtype; a part of what `pack` makes
      with `pieces.whole_layout`.

    Raises:
      ValueError: the index is none, or a leaf does not fit the layout.
    """
    check_array("index", index, (), (np.dtype("int32"),))
    check_leaves("leaves", leaves, layout)
    return _pack_piece(index, *leaves, layout=layout, shards=shards, backend=backend)[0]
