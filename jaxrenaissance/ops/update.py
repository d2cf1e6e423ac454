"""update: all weights and moments of one arena, in one launch."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from ..plan import ArenaLayout
from ..reference import update as reference
from .checks import check_arena, check_floats, gradient_operands
from .primitive import Op

# Kind -> how many moments it keeps. Adam and AdamW are one kind: L2 and decoupled decay are two
# slots of the scalars.
MOMENTS = {"sgd": 0, "momentum": 1, "nesterov": 1, "adam": 2}


def _result_types(
    kind: str, *, layout: ArenaLayout, from_arena: bool
) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [((layout.size,), layout.dtype)] * (1 + MOMENTS[kind])


def _op(kind: str) -> Op:
    series = 1 + MOMENTS[kind]
    return Op(
        f"update_{kind}",
        result_types=functools.partial(_result_types, kind),
        reference=functools.partial(reference, kind, series),
        aliases=lambda **static: {1 + i: i for i in range(series)},
        attributes=lambda *, layout, from_arena: {"from_arena": from_arena},
    )


_ops = {kind: _op(kind) for kind in MOMENTS}


def update(
    kind: str,
    layout: ArenaLayout,
    floats: jax.Array,
    weights: jax.Array,
    moments: Sequence[jax.Array],
    gradients: Sequence[jax.Array] | jax.Array,
    *,
    backend: str,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    r"""One step of an elementwise optimizer on every leaf of an arena.

    With g the gradient times GRAD_FACTOR, then :math:`g \leftarrow g + \text{l2} \cdot w`, and all
    scalars from the leaf's group:

    - sgd: :math:`u = g`
    - momentum: :math:`m \leftarrow \beta m + g,\ u = m`
    - nesterov: :math:`m \leftarrow \beta m + g,\ u = \beta m + g`
    - adam: :math:`m \leftarrow \beta_1 m + (1-\beta_1) g,\ v \leftarrow \beta_2 v + (1-\beta_2)
      g^2,\ u = m c_1 / (\sqrt{v c_2 + \text{eps\_root}} + \text{eps})`, and u = 0 where that is 0/0

    and :math:`w \leftarrow w - (\text{lr} \cdot \text{wd} \cdot w + \text{lr} \cdot u)`: the decay
    and the update are added up before they are rounded into the weight. Nothing is written where
    APPLY is 0.

    Args:
      kind: "sgd", "momentum", "nesterov" or "adam".
      layout: the arenas' layout.
      floats: the scalars that the prologue derived.
      weights: [layout.size], of the layout's dtype; updated in place where donated, like the
        moments.
      moments: none, one or two arrays like ``weights``.
      gradients: the leaves in arena order, in mixed dtypes, or one arena.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The new weights and the new moments.

    Raises:
      ValueError: an operand does not fit the layout or the kind.
    """
    if kind not in MOMENTS:
        raise ValueError(f"kind: got {kind!r}, wanted one of {', '.join(MOMENTS)}")
    check_floats(floats, layout)
    check_arena("weights", weights, layout)
    if len(moments) != MOMENTS[kind]:
        raise ValueError(f"moments: {kind} has {MOMENTS[kind]}, got {len(moments)}")
    for i, moment in enumerate(moments):
        check_arena(f"moments[{i}]", moment, layout)
    operands, from_arena = gradient_operands(layout, gradients)
    new_weights, *new_moments = _ops[kind](
        floats, weights, *moments, *operands, layout=layout, from_arena=from_arena, backend=backend
    )
    return new_weights, tuple(new_moments)
