"""prologue: the counters advance, and every scalar that the update needs is derived from them."""

import jax
import numpy as np

from .. import scalars
from ..reference import prologue as reference
from .checks import check_floats, check_ints
from .primitive import Op


def _result_types(*, num_floats: int, dtype: np.dtype) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [((num_floats,), dtype), ((scalars.INTS,), np.dtype("int32"))]


_prologue = Op(
    "prologue",
    result_types=_result_types,
    reference=reference,
    aliases=lambda **static: {0: 0, 1: 1},
)


def prologue(floats: jax.Array, ints: jax.Array, *, backend: str) -> tuple[jax.Array, jax.Array]:
    """Decides whether this step updates, counts it, and derives the scalars of every group.

    Where ``ints[FIRST_BAD]`` names a leaf, the step is skipped: APPLY = 0, SKIPPED and
    CONSECUTIVE_SKIPS go up, STEP stays. Otherwise APPLY = 1 and STEP goes up. With t the step after
    this update, in float64 on native backends: C1 = 1/(1 - b1^t), C2 = 1/(1 - b2^t), LR_WD = lr wd.

    Args:
      floats: float32 or float64 [(1 + groups) * ROW]; updated in place where donated.
      ints: int32[INTS]; updated in place where donated.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The two arrays, advanced.

    Raises:
      ValueError: an operand has another shape or dtype.
    """
    check_floats(floats)
    check_ints(ints)
    dtype, num_floats = np.dtype(floats.dtype), floats.shape[0]
    new_floats, new_ints = _prologue(
        floats, ints, num_floats=num_floats, dtype=dtype, backend=backend
    )
    return new_floats, new_ints
