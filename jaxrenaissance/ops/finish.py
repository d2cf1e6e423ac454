"""finish: the prologue, with the norms that `norms` has prepared, and LARS's trust ratios."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import scalars
from ..reference import finish as reference
from ..reference.words import operands_in_words
from .checks import check_floats, check_ints, check_trust, check_workspaces
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
    trust: int,
) -> list[tuple[tuple[int, ...], np.dtype]]:
    int32 = np.dtype("int32")
    scalar_arrays = [((num_floats,), dtype), ((scalars.INTS,), int32)]
    numbers = [((count,), dtype) for count in segments[:gradients]] * (by_segment + (trust != 0))
    return [*scalar_arrays, *(((size,), int32) for size in sizes), *numbers]


_finish = Op(
    "finish",
    result_types=_result_types,
    reference=reference,
    lowered=operands_in_words(reference, 2),
    # The workspaces too: blocks that finish together pass sums on in them.
    aliases=lambda *, sizes, **static: {i: i for i in range(2 + len(sizes))},
    attributes=lambda *, segments, gradients, by_segment, trust, **static: {
        "segments": segments,
        "gradients": gradients,
        "by_segment": by_segment,
        "trust": trust,
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
    trust: int = 0,
    groups: Sequence[jax.Array | np.ndarray] = (),
    backend: str,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    r"""All that `prologue` does, and the global norms.

    With the loss scale and the count that `prologue` divides by, a cycle's last call sets GRAD_NORM
    = :math:`\lVert g \rVert / (\text{LOSS\_SCALE} \cdot \text{count})`, CLIP = MAX_NORM / GRAD_NORM
    where that norm is larger and 1 elsewhere, and GRAD_FACTOR = CLIP / (LOSS_SCALE * count).
    PARAM_NORM is set where there are workspaces of weights.

    The trust ratio of a segment, with TRUST, L2 and EPS of its group, w its weights and g its
    gradients times GRAD_FACTOR, is

    .. math::
        r = \min\left(\frac{\text{TRUST} \lVert w \rVert}{d}, \text{MAX\_RATIO}\right), \quad
            d = \lVert g \rVert + \text{L2} \lVert w \rVert + \text{EPS} \ \text{or, as optax
            has it,}\ d = \lVert g + \text{L2}\, w \rVert + \text{EPS}

    and 1 where TRUST is 0, where the norm of w or the first in d is 0 or less than MIN_NORM, and
    where the call updates nothing.

    Args:
      floats: float32 or float64 [HEADER + groups * ROW]; updated in place where donated.
      ints: int32[INTS]; updated in place where donated.
      workspaces: from `norms` or `accumulate`: those of the gradients, one an arena, then those of
        the weights, and with trust 2 those of the products. They are used up.
      segments: how many segments each workspace's layout has.
      gradients: how many of the workspaces are the gradients'.
      by_segment: whether the norms of all segments are wanted.
      trust: 1 for trust ratios, 2 for those with d as optax has it, 0 for none.
      groups: with trust ratios, for each workspace of gradients int32[segments], the groups of its
        segments: constants, the same for all members of a batch.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      floats and ints, advanced. Where ``by_segment``, for each workspace of gradients an array
      [segments] of the dtype of ``floats``: the norms of its segments, divided like GRAD_NORM. With
      trust ratios likewise these.

    Raises:
      ValueError: an operand has another shape or dtype, or trust ratios want other workspaces.
    """
    check_floats(floats)
    check_ints(ints)
    check_workspaces(workspaces, segments, backend)
    if not 0 <= gradients <= len(workspaces):
        raise ValueError(f"gradients: got {gradients}, wanted 0 to {len(workspaces)}")
    if trust not in (0, 1, 2):
        raise ValueError(f"trust: got {trust!r}, wanted 0, 1 or 2")
    if trust:
        check_trust(workspaces, segments, groups, gradients, series=1 + trust)
    elif groups:
        raise ValueError("groups: they are for trust ratios, and trust is 0")
    if not workspaces:  # Without leaves, norms are zero and stay so.
        return *prologue(floats, ints, backend=backend), (), ()
    new_floats, new_ints, *rest = _finish(
        floats,
        ints,
        *workspaces,
        *map(jnp.asarray, groups),
        num_floats=floats.shape[0],
        dtype=np.dtype(floats.dtype),
        sizes=tuple(x.shape[0] for x in workspaces),
        segments=tuple(segments),
        gradients=gradients,
        by_segment=by_segment,
        trust=trust,
        backend=backend,
    )
    numbers = tuple(rest[len(workspaces) :])
    count = gradients if by_segment else 0
    return new_floats, new_ints, numbers[:count], numbers[count:]
