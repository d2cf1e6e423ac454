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
    r"""Decides whether this call updates, counts it, and derives the scalars of every group.

    A call belongs to a cycle of EVERY micro-batches and is bad where ``ints[FIRST_BAD]`` names a
    leaf. The last call of a cycle sets GRAD_FACTOR = 1 / (LOSS_SCALE * count) and then updates:
    APPLY = 1, STEP goes up; or, where a call of the cycle was bad, is skipped: SKIPPED and
    CONSECUTIVE_SKIPS go up. After a skip LOSS_SCALE is :math:`\max(\text{scale} \cdot
    \text{BACKOFF}, \text{MIN\_SCALE})`, after GROWTH_INTERVAL updates in a row :math:`\min(
    \text{scale} \cdot \text{GROWTH}, \text{MAX\_SCALE})`. An update adds to the weight of the
    average, :math:`c \leftarrow c + \text{ONE\_MINUS\_EMA} (1 - c)`, which EMA_WEIGHT and
    EMA_WEIGHT_LOW hold as a sum.

    With t the updates made after this call, in float64 on native backends: LR = LEARNING_RATE *
    LR_SCALE, LR_WD = LR * WEIGHT_DECAY, C1 = 1/(1 - b1^t), C2 = 1/(1 - b2^t).

    Args:
      floats: float32 or float64 [HEADER + groups * ROW]; updated in place where donated.
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
