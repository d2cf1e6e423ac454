"""update: all weights and moments of one arena, in one launch."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from ..arena_layout import ArenaLayout
from ..reference import update as reference
from .checks import check_arena, check_floats, check_ratios, gradient_operands
from .primitive import Op

# Kind -> how many moments it keeps. Adam and AdamW are one kind: L2 and decoupled decay are two
# slots of the scalars.
MOMENTS = {"sgd": 0, "momentum": 1, "nesterov": 1, "adam": 2, "lion": 1}


def _result_types(
    kind: str, *, layout: ArenaLayout, from_arena: bool, ema: bool, ratios: bool, gated: bool
) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [((layout.size,), layout.dtype)] * (1 + MOMENTS[kind] + ema)


def _op(kind: str) -> Op:
    series = 1 + MOMENTS[kind]
    return Op(
        f"update_{kind}",
        result_types=functools.partial(_result_types, kind),
        reference=functools.partial(reference, kind, series),
        aliases=lambda *, ema, **static: {1 + i: i for i in range(series + ema)},
        attributes=lambda *, layout, **static: static,
        merged=lambda *, ratios, **static: not ratios,
    )


_ops = {kind: _op(kind) for kind in MOMENTS}


def check_moments(kind: str, moments: Sequence[jax.Array], layout: ArenaLayout) -> None:
    """Raises unless the moments are those of this kind."""
    if kind not in MOMENTS:
        raise ValueError(f"kind: got {kind!r}, wanted one of {', '.join(MOMENTS)}")
    if len(moments) != MOMENTS[kind]:
        raise ValueError(f"moments: {kind} has {MOMENTS[kind]}, got {len(moments)}")
    for i, moment in enumerate(moments):
        check_arena(f"moments[{i}]", moment, layout)


def update_operands(
    kind: str,
    layout: ArenaLayout,
    floats: jax.Array,
    weights: jax.Array,
    moments: Sequence[jax.Array],
    gradients: Sequence[jax.Array] | jax.Array,
) -> tuple[tuple[jax.Array, ...], bool]:
    """The gradients as operands, and whether they are an arena; raises unless all fits the kind."""
    check_moments(kind, moments, layout)
    check_floats(floats, layout)
    check_arena("weights", weights, layout)
    return gradient_operands(layout, gradients)


def update(
    kind: str,
    layout: ArenaLayout,
    floats: jax.Array,
    weights: jax.Array,
    moments: Sequence[jax.Array],
    gradients: Sequence[jax.Array] | jax.Array,
    *,
    ema: jax.Array | None = None,
    ratios: jax.Array | None = None,
    gated: bool = False,
    backend: str,
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None]:
    r"""One step of an elementwise optimizer on every leaf of an arena.

    With g the gradient times GRAD_FACTOR, clamped to ±MAX_VALUE, then :math:`g \leftarrow g +
    \text{l2} \cdot w`, and the other scalars from the leaf's group:

    - sgd: :math:`u = g`
    - momentum: :math:`m \leftarrow \beta m + g,\ u = m`
    - nesterov: :math:`m \leftarrow \beta m + g,\ u = \beta m + g`
    - adam: :math:`m \leftarrow \beta_1 m + (1-\beta_1) g,\ v \leftarrow \beta_2 v + (1-\beta_2)
      g^2,\ u = m c_1 / (\sqrt{v c_2 + \text{eps\_root}} + \text{eps})`, and u = 0 where that is 0/0
    - lion: :math:`u = \text{sign}(\beta_1 m + (1-\beta_1) g),\ m \leftarrow \beta_2 m + (1-\beta_2)
      g`

    and :math:`w \leftarrow w - (\text{lr} \cdot \text{wd} \cdot w + \text{lr} \cdot u)`: the decay
    and the update are added up before they are rounded into the weight. The average follows the new
    weights: :math:`e \leftarrow e + \text{ONE\_MINUS\_EMA} (w - e)`, exactly w where that factor
    is 1. Nothing is written where APPLY is 0.

    A trust ratio is a factor on lr. Where LR_IN_MOMENT is set, the momentum adds up the product of
    both with g, and then :math:`w \leftarrow w - (\text{lr} \cdot \text{wd} \cdot w + u)`.

    Args:
      kind: "sgd", "momentum", "nesterov", "adam" or "lion".
      layout: the arenas' layout.
      floats: the scalars that the prologue derived.
      weights: [layout.size], of the layout's dtype; updated in place where donated, like the
        moments.
      moments: none, one or two arrays like ``weights``.
      gradients: the leaves in arena order, in mixed dtypes, or one arena.
      ema: the average of the weights, an array like ``weights``; updated in place where donated.
      ratios: trust ratios, [segments] of the dtype of ``floats``.
      gated: APPLY is looked at before anything is loaded. Faster where most calls do not update.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The new weights, the new moments and the new average, None without one.

    Raises:
      ValueError: an operand does not fit the layout or the kind.
    """
    operands, from_arena = update_operands(kind, layout, floats, weights, moments, gradients)
    if ratios is not None:
        check_ratios(ratios, floats, layout)
        operands = (ratios, *operands)
    if ema is not None:
        check_arena("ema", ema, layout)
        operands = (ema, *operands)
    results = _ops[kind](
        floats,
        weights,
        *moments,
        *operands,
        layout=layout,
        from_arena=from_arena,
        ema=ema is not None,
        ratios=ratios is not None,
        gated=gated,
        backend=backend,
    )
    new_ema = results.pop() if ema is not None else None
    return results[0], tuple(results[1:]), new_ema
