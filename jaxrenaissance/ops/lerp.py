"""lerp: arenas moved towards another, by a factor for each group."""

from collections.abc import Sequence

import jax
import numpy as np

from ..arena_layout import ArenaLayout
from ..reference import lerp as reference
from .checks import check_arena, check_array, gradient_operands, num_groups
from .primitive import Op

_SOURCES = {"leaves": 0, "arena": 1, "zero": 2}
"""What the source is given as, and its number in the ABI."""


def _result_types(
    *, layout: ArenaLayout, targets: int, source: str
) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [((layout.size,), layout.dtype)] * targets


_lerp = Op(
    "lerp",
    result_types=_result_types,
    reference=reference,
    aliases=lambda *, targets, **static: {1 + i: i for i in range(targets)},
    attributes=lambda *, layout, targets, source: {
        "targets": targets,
        "source": _SOURCES[source],
    },
)


def lerp(
    layout: ArenaLayout,
    taus: jax.Array,
    targets: Sequence[jax.Array],
    source: Sequence[jax.Array] | jax.Array | None,
    *,
    backend: str,
) -> tuple[jax.Array, ...]:
    r"""Every target moves towards the source: :math:`a \leftarrow a + \tau (b - a)`.

    Exactly b where :math:`\tau` is 1, also over a NaN; and untouched where it is 0.

    Args:
      layout: the layout of all the arenas.
      taus: a number for each group of the layout's segments, [groups or more], of its dtype.
      targets: one arena or two; updated in place where donated.
      source: leaves in arena order, in mixed dtypes; an arena; or None for zero.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The targets, moved.

    Raises:
      ValueError: an operand does not fit the layout.
    """
    least, shape = num_groups(layout), getattr(taus, "shape", ())
    if len(shape) != 1 or shape[0] < least:
        raise ValueError(f"taus: got shape {list(shape)}, wanted [{least}], or more")
    check_array("taus", taus, shape, (layout.dtype,))
    if len(targets) not in (1, 2):
        raise ValueError(f"targets: got {len(targets)}, wanted one arena or two")
    for i, target in enumerate(targets):
        check_arena(f"targets[{i}]", target, layout)
    operands, kind = (), "zero"
    if source is not None:
        operands, from_arena = gradient_operands(layout, source, "source")
        kind = "arena" if from_arena else "leaves"
    return tuple(
        _lerp(
            taus,
            *targets,
            *operands,
            layout=layout,
            targets=len(targets),
            source=kind,
            backend=backend,
        )
    )
