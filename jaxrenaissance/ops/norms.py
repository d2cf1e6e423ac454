"""norms: one pass over the gradients that finds what is not finite and adds up squares.

For trust ratios the same pass adds up those of the weights, and products of both.
"""

from collections.abc import Sequence

import jax
import numpy as np

from .. import scalars
from ..arena_layout import ArenaLayout
from ..reference import norms as reference
from ..reference.words import results_in_words
from ..workspaces import workspace_size
from .checks import check_arena, check_ints, gradient_operands
from .primitive import Op


def _result_types(
    *, layout: ArenaLayout, first_leaf: int, flag: bool, weights: int, from_arena: bool
) -> list[tuple[tuple[int, ...], np.dtype]]:
    int32 = np.dtype("int32")
    return [((scalars.INTS,), int32), *[((workspace_size(layout),), int32)] * (1 + weights)]


_norms = Op(
    "norms",
    result_types=_result_types,
    reference=reference,
    lowered=results_in_words(reference, 1),
    aliases=lambda **static: {0: 0},
    attributes=lambda *, layout, **static: static,
    merged=lambda **static: False,
)


def norms(
    layout: ArenaLayout,
    ints: jax.Array,
    gradients: Sequence[jax.Array] | jax.Array,
    *,
    weights: jax.Array | None = None,
    products: bool = False,
    first_leaf: int = 0,
    flag: bool,
    backend: str,
) -> tuple[jax.Array, ...]:
    """Sums of squares of every segment, and non-finite gradients as `statistics` finds them.

    Native backends add up in float64, in an order that depends on a segment's size alone.

    Args:
      layout: the layout of the arena that the gradients belong to.
      ints: int32[INTS], the state's counters; updated in place where donated.
      gradients: the leaves in arena order (mixed float32, bfloat16, float16; float64 beside a
        float64 arena), or one arena of this layout.
      weights: the arena, where its sums are wanted, too.
      products: whether the sums of gradients times weights are, beside those of the weights.
      first_leaf: the number of this layout's first leaf, where a plan has two arenas.
      flag: whether FIRST_BAD is set. Where it is not, the counters stay as they are.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The counters, and for `finish` the workspaces of the gradients, of the weights and of the
      products, those that are wanted: each int32[workspace_size(layout)], or with "xla" float64 or
      without x64 float32 [segments], of norms, and for products of the cosines between both.

    Raises:
      ValueError: an operand does not fit the layout, or there are products and no weights.
    """
    check_ints(ints)
    operands, from_arena = gradient_operands(layout, gradients)
    if weights is not None:
        check_arena("weights", weights, layout)
        operands = (weights, *operands)
    elif products:
        raise ValueError("products: they are with the weights, and weights is None")
    return tuple(
        _norms(
            ints,
            *operands,
            layout=layout,
            first_leaf=first_leaf,
            flag=flag,
            weights=0 if weights is None else 1 + products,
            from_arena=from_arena,
            backend=backend,
        )
    )
