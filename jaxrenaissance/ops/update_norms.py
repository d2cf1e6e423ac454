"""update_norms: sums of squares of what an update will add to the weights."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from ..plan import ArenaLayout
from ..reference import update_norms as reference
from ..reference.words import results_in_words
from ..workspaces import workspace_size
from .primitive import Op
from .update import MOMENTS, update_operands


def _result_types(
    *, layout: ArenaLayout, from_arena: bool
) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [((workspace_size(layout),), np.dtype("int32"))]


def _op(kind: str) -> Op:
    series = 1 + MOMENTS[kind]
    own_reference = functools.partial(reference, kind, series)
    return Op(
        f"update_norms_{kind}",
        result_types=_result_types,
        reference=own_reference,
        lowered=results_in_words(own_reference, 0),
        attributes=lambda *, layout, from_arena: {"from_arena": from_arena},
        # The kernels are those of the update, which has each member's own states.
        unshared=range(1, 1 + series),
        merged=False,
    )


_ops = {kind: _op(kind) for kind in MOMENTS}


def update_norms(
    kind: str,
    layout: ArenaLayout,
    floats: jax.Array,
    weights: jax.Array,
    moments: Sequence[jax.Array],
    gradients: Sequence[jax.Array] | jax.Array,
    *,
    backend: str,
) -> jax.Array:
    """Sums of squares, for every segment, of the new weights minus the old.

    It runs between the prologue and the update, with the same operands as the latter, and changes
    none of them.

    Args:
      kind, layout, floats, weights, moments, gradients: as for `update`.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      A workspace for `finish_update`, as `norms` has it.

    Raises:
      ValueError: an operand does not fit the layout or the kind.
    """
    operands, from_arena = update_operands(kind, layout, floats, weights, moments, gradients)
    return _ops[kind](
        floats, weights, *moments, *operands, layout=layout, from_arena=from_arena, backend=backend
    )[0]
