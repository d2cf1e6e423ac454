"""accumulate: the gradients of a cycle of micro-batches, added up in an arena."""

from collections.abc import Sequence

import jax
import numpy as np

from .. import scalars
from ..arena_layout import ArenaLayout
from ..reference import accumulate as reference
from ..reference.words import results_in_words
from ..workspaces import workspace_size
from .checks import check_arena, check_ints, gradient_operands
from .primitive import Op


def _result_types(
    *, layout: ArenaLayout, first_leaf: int, flag: bool, norms: bool, from_arena: bool
) -> list[tuple[tuple[int, ...], np.dtype]]:
    int32 = np.dtype("int32")
    workspace = [((workspace_size(layout),), int32)] if norms else []
    return [((scalars.INTS,), int32), ((layout.size,), layout.dtype), *workspace]


_accumulate = Op(
    "accumulate",
    result_types=_result_types,
    reference=reference,
    lowered=results_in_words(reference, 2),
    aliases=lambda **static: {0: 0, 1: 1},
    attributes=lambda *, layout, **static: static,
    merged=lambda **static: False,
)


def accumulate(
    layout: ArenaLayout,
    ints: jax.Array,
    accumulator: jax.Array,
    gradients: Sequence[jax.Array] | jax.Array,
    *,
    first_leaf: int = 0,
    flag: bool,
    norms: bool,
    backend: str,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """A cycle's first micro-batch, where ``ints[MICRO]`` is 0, is stored; the others are added.

    So what a cycle before has left in the accumulator, NaN or not, never reaches the next. The
    prologue counts the micro-batch, after this.

    Args:
      layout: the layout of the arena that the gradients belong to.
      ints: int32[INTS], the state's counters; updated in place where donated.
      accumulator: [layout.size], of the layout's dtype; updated in place where donated.
      gradients: the leaves in arena order, in mixed dtypes, or one arena of this layout.
      first_leaf: the number of this layout's first leaf, where a plan has two arenas.
      flag: whether FIRST_BAD is lowered to the first leaf with a non-finite gradient, or with a
        sum that this gradient makes overflow.
      norms: whether a workspace with the sums of squares of the sum is wanted, as `norms` has it.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The counters, the sum, and the workspace for `finish` or None.

    Raises:
      ValueError: an operand does not fit the layout.
    """
    check_ints(ints)
    check_arena("accumulator", accumulator, layout)
    operands, from_arena = gradient_operands(layout, gradients)
    new_ints, total, *workspace = _accumulate(
        ints,
        accumulator,
        *operands,
        layout=layout,
        first_leaf=first_leaf,
        flag=flag,
        norms=norms,
        from_arena=from_arena,
        backend=backend,
    )
    return new_ints, total, workspace[0] if norms else None
