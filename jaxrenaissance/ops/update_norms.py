"""update_norms: sums of squares of what an update will add to the weights.

Or, for LAMB's trust ratios, of the update before its learning rate, and of the weights.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from ..arena_layout import ArenaLayout
from ..reference import update_norms as reference
from ..reference.words import results_in_words
from ..workspaces import workspace_size
from .checks import check_ratios
from .primitive import Op
from .update import MOMENTS, update_operands


def _result_types(
    *, layout: ArenaLayout, from_arena: bool, direction: bool, ratios: bool
) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [((workspace_size(layout),), np.dtype("int32"))] * (1 + direction)


def _op(kind: str) -> Op:
    series = 1 + MOMENTS[kind]
    own_reference = functools.partial(reference, kind, series)
    return Op(
        f"update_norms_{kind}",
        result_types=_result_types,
        reference=own_reference,
        lowered=results_in_words(own_reference, 0),
        attributes=lambda *, layout, **static: static,
        # The kernels are those of the update, which has each member's own states.
        unshared=range(1, 1 + series),
        merged=lambda **static: False,
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
    direction: bool = False,
    ratios: jax.Array | None = None,
    backend: str,
) -> tuple[jax.Array, ...]:
    """Sums of squares, for every segment, of the new weights minus the old.

    It runs between the prologue and the update, with the same operands as the latter, and changes
    none of them.

    Args:
      kind, layout, floats, weights, moments, gradients, ratios: as for `update`.
      direction: wanted are the sums of the update before its learning rate, u + WEIGHT_DECAY * w,
        and those of the weights.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      A workspace for `finish_update`; or two for `finish_ratios`. As `norms` has them.

    Raises:
      ValueError: an operand does not fit the layout or the kind.
    """
    operands, from_arena = update_operands(kind, layout, floats, weights, moments, gradients)
    if ratios is not None:
        check_ratios(ratios, floats, layout)
        operands = (ratios, *operands)
    return tuple(
        _ops[kind](
            floats,
            weights,
            *moments,
            *operands,
            layout=layout,
            from_arena=from_arena,
            direction=direction,
            ratios=ratios is not None,
            backend=backend,
        )
    )
