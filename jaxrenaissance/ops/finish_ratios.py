"""finish_ratios: LAMB's trust ratios, from what `update_norms` has prepared."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..reference import finish_ratios as reference
from ..reference.words import operands_in_words
from .checks import check_floats, check_trust, check_workspaces
from .primitive import Op


def _result_types(
    *,
    num_floats: int,
    dtype: np.dtype,
    sizes: tuple[int, ...],
    segments: tuple[int, ...],
    gradients: int,
) -> list[tuple[tuple[int, ...], np.dtype]]:
    workspaces = [((size,), np.dtype("int32")) for size in sizes]
    return [((num_floats,), dtype), *workspaces, *(((n,), dtype) for n in segments[:gradients])]


_finish_ratios = Op(
    "finish_ratios",
    result_types=_result_types,
    reference=reference,
    lowered=operands_in_words(reference, 1),
    # The scalars too: blocks that finish together are counted in them.
    aliases=lambda *, sizes, **static: {i: i for i in range(1 + len(sizes))},
    attributes=lambda *, segments, gradients, **static: {
        "segments": segments,
        "gradients": gradients,
    },
)


def finish_ratios(
    floats: jax.Array,
    workspaces: Sequence[jax.Array],
    segments: Sequence[int],
    groups: Sequence[jax.Array | np.ndarray],
    *,
    backend: str,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    r"""The trust ratios of all segments, from the norms of the weights and of the update.

    With u the update before its learning rate, decay included, and TRUST of the segment's group,

    .. math::
        r = \min\left(\frac{\text{TRUST} \lVert w \rVert}{\lVert u \rVert},
            \text{MAX\_RATIO}\right)

    and 1 where TRUST is 0, where a norm is 0 or less than MIN_NORM, and where the call updates
    nothing.

    Args:
      floats: the scalars that the prologue derived; updated in place where donated.
      workspaces: from `update_norms` with `direction`: those of the updates, one an arena, then
        those of the weights. They are used up.
      segments: how many segments each workspace's layout has.
      groups: for each arena int32[segments], the groups of its segments: constants, the same for
        all members of a batch.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The scalars as they were, and for each arena its ratios, [segments] of their dtype.

    Raises:
      ValueError: an operand has another shape or dtype.
    """
    check_floats(floats)
    check_workspaces(workspaces, segments, backend)
    check_trust(workspaces, segments, groups, len(groups), series=2)
    if not workspaces:
        return floats, ()
    new_floats, *rest = _finish_ratios(
        floats,
        *workspaces,
        *map(jnp.asarray, groups),
        num_floats=floats.shape[0],
        dtype=np.dtype(floats.dtype),
        sizes=tuple(x.shape[0] for x in workspaces),
        segments=tuple(segments),
        gradients=len(groups),
        backend=backend,
    )
    return new_floats, tuple(rest[len(workspaces) :])
