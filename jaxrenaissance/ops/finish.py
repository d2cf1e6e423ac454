"""finish: the prologue, with the norms that `norms` has prepared."""

from collections.abc import Sequence

import jax
import numpy as np

from .. import scalars
from ..reference import finish as reference
from ..reference.words import operands_in_words
from .checks import check_floats, check_ints, check_workspaces
from .primitive import Op
from .prologue import prologue


def _result_types(
    *,
    num_floats: int,
    dtype: np.dtype,
    sizes: tuple[int, ...],
    segments: tuple[int, ...],
    gradients: int,
    by_segment: bool,
) -> list[tuple[tuple[int, ...], np.dtype]]:
    int32 = np.dtype("int32")
    scalar_arrays = [((num_floats,), dtype), ((scalars.INTS,), int32)]
    norms = [((count,), dtype) for count in segments[:gradients] if by_segment]
    return [*scalar_arrays, *(((size,), int32) for size in sizes), *norms]


_finish = Op(
    "finish",
    result_types=_result_types,
    reference=reference,
    lowered=operands_in_words(reference, 2),
    # The workspaces too: blocks that finish together pass sums on in them.
    aliases=lambda *, sizes, **static: {i: i for i in range(2 + len(sizes))},
    attributes=lambda *, segments, gradients, by_segment, **static: {
        "segments": segments,
        "gradients": gradients,
        "by_segment": by_segment,
    },
)


def finish(
    floats: jax.Array,
    ints: jax.Array,
    workspaces: Sequence[jax.Array],
    segments: Sequence[int],
    *,
    gradients: int,
    by_segment: bool = False,
    backend: str,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    r"""All that `prologue` does, and the global norms.

    With the loss scale and the count that `prologue` divides by, a cycle's last call sets GRAD_NORM
    = :math:`\lVert g \rVert / (\text{LOSS\_SCALE} \cdot \text{count})`, CLIP = MAX_NORM / GRAD_NORM
    where that norm is larger and 1 elsewhere, and GRAD_FACTOR = CLIP / (LOSS_SCALE * count).
    PARAM_NORM is set where there are workspaces of weights.

    Args:
      floats: float32 or float64 [HEADER + groups * ROW]; updated in place where donated.
      ints: int32[INTS]; updated in place where donated.
      workspaces: from `norms` or `accumulate`: those of the gradients, one an arena, then those of
        the weights. They are used up.
      segments: how many segments each workspace's layout has.
      gradients: how many of the workspaces are the gradients'.
      by_segment: whether the norms of all segments are wanted.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      floats and ints, advanced, and where ``by_segment`` for each workspace of gradients an array
      [segments] of the dtype of ``floats``: the norms of its segments, divided like GRAD_NORM.

    Raises:
      ValueError: an operand has another shape or dtype.
    """
    check_floats(floats)
    check_ints(ints)
    check_workspaces(workspaces, segments, backend)
    if not 0 <= gradients <= len(workspaces):
        raise ValueError(f"gradients: got {gradients}, wanted 0 to {len(workspaces)}")
    if not workspaces:  # Without leaves, norms are zero and stay so.
        return *prologue(floats, ints, backend=backend), ()
    new_floats, new_ints, *rest = _finish(
        floats,
        ints,
        *workspaces,
        num_floats=floats.shape[0],
        dtype=np.dtype(floats.dtype),
        sizes=tuple(x.shape[0] for x in workspaces),
        segments=tuple(segments),
        gradients=gradients,
        by_segment=by_segment,
        backend=backend,
    )
    return new_floats, new_ints, tuple(rest[len(workspaces) :])
