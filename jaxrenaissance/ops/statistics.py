"""statistics: one pass over the gradients before the update."""

from collections.abc import Sequence

import jax
import numpy as np

from .. import scalars
from ..arena_layout import ArenaLayout
from ..reference import statistics as reference
from .checks import check_ints, gradient_operands
from .primitive import Op


def _result_types(
    *, layout: ArenaLayout, first_leaf: int, from_arena: bool
) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [((scalars.INTS,), np.dtype("int32"))]


_statistics = Op(
    "statistics",
    result_types=_result_types,
    reference=reference,
    aliases=lambda **static: {0: 0},
    attributes=lambda *, layout, first_leaf, from_arena: {
        "first_leaf": first_leaf,
        "from_arena": from_arena,
    },
)


def statistics(
    layout: ArenaLayout,
    ints: jax.Array,
    gradients: Sequence[jax.Array] | jax.Array,
    *,
    first_leaf: int = 0,
    backend: str,
) -> jax.Array:
    """Finds non-finite gradients.

    ``ints[FIRST_BAD]`` becomes the smaller of itself and the first bad leaf's number.

    Args:
      layout: the layout of the arena that the gradients belong to.
      ints: int32[INTS], the state's counters; updated in place where donated.
      gradients: the leaves in arena order (mixed float32, bfloat16, float16; float64 beside a
        float64 arena), or one arena of this layout.
      first_leaf: the number of this layout's first leaf, where a plan has two arenas.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The counters with FIRST_BAD updated; the prologue acts on it and resets it.

    Raises:
      ValueError: an operand does not fit the layout.
    """
    check_ints(ints)
    operands, from_arena = gradient_operands(layout, gradients)
    return _statistics(
        ints,
        *operands,
        layout=layout,
        first_leaf=first_leaf,
        from_arena=from_arena,
        backend=backend,
    )[0]
