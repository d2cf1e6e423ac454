"""changes: one step that hands out what is to be added to the weights, in one launch.

It is the update of optax's contract, where the weights are leaves of the user's own.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from ..arena_layout import ArenaLayout
from ..reference import changes as reference
from .checks import check_floats, check_leaf_dtypes, check_leaves, check_ratios
from .primitive import Op
from .update import MOMENTS, check_moments


def _result_types(
    kind: str, *, layout: ArenaLayout, weights: bool, ratios: bool, dtypes: tuple[np.dtype, ...]
) -> list[tuple[tuple[int, ...], np.dtype]]:
    moments = [((layout.size,), layout.dtype)] * MOMENTS[kind]
    return [*moments, *zip(layout.shapes, dtypes, strict=True)]


def _op(kind: str) -> Op:
    return Op(
        f"changes_{kind}",
        result_types=functools.partial(_result_types, kind),
        reference=functools.partial(reference, kind, MOMENTS[kind]),
        aliases=lambda **static: {1 + i: i for i in range(MOMENTS[kind])},
        attributes=lambda *, weights, ratios, **static: {"weights": weights, "ratios": ratios},
        merged=lambda *, ratios, **static: not ratios,
    )


_ops = {kind: _op(kind) for kind in MOMENTS}


def changes(
    kind: str,
    layout: ArenaLayout,
    floats: jax.Array,
    moments: Sequence[jax.Array],
    gradients: Sequence[jax.Array],
    weights: Sequence[jax.Array] | None,
    dtypes: Sequence[np.dtype],
    *,
    ratios: jax.Array | None = None,
    backend: str,
) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
    r"""One step of an elementwise optimizer, as `update` has it, for weights that are leaves.

    Where `update` has :math:`w \leftarrow w - (\text{lr} \cdot \text{wd} \cdot w + \text{lr} \cdot
    u)`, the change is :math:`-(\text{lr} \cdot \text{wd} \cdot w + \text{lr} \cdot u)`, rounded to
    its own dtype, and not as the new weight is. Where APPLY is 0 it is zero, and no moment is
    written.

    Args:
      kind, layout, floats, ratios: as for `update`.
      moments: as for `update`; updated in place where donated.
      gradients: the leaves in arena order, in mixed dtypes.
      weights: likewise. None: as if all were zero, for an optimizer that does not look at them.
      dtypes: of the changes: for each leaf, float32, bfloat16 or float16; or float64 where the
        arena is.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The new moments; then the changes, leaf i of shape ``layout.shapes[i]`` and dtype
      ``dtypes[i]``.

    Raises:
      ValueError: an operand does not fit the layout or the kind.
    """
    check_moments(kind, moments, layout)
    check_floats(floats, layout)
    check_leaves("gradients", gradients, layout)
    if weights is not None:
        check_leaves("weights", weights, layout)
    dtypes = tuple(np.dtype(d) for d in dtypes)
    check_leaf_dtypes("dtypes", dtypes, layout)
    operands = (*gradients, *(weights or ()))
    if ratios is not None:
        check_ratios(ratios, floats, layout)
        operands = (ratios, *operands)
    if not layout.shapes:
        return tuple(moments), []
    results = _ops[kind](
        floats,
        *moments,
        *operands,
        layout=layout,
        weights=weights is not None,
        ratios=ratios is not None,
        dtypes=dtypes,
        backend=backend,
    )
    count = MOMENTS[kind]
    return tuple(results[:count]), results[count:]
