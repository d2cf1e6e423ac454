"""finish_update: the norm of the update, from what `update_norms` has prepared."""

from collections.abc import Sequence

import jax
import numpy as np

from ..reference import finish_update as reference
from ..reference.words import operands_in_words
from .checks import check_floats, check_workspaces
from .primitive import Op


def _result_types(
    *, num_floats: int, dtype: np.dtype, sizes: tuple[int, ...], segments: tuple[int, ...]
) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [((num_floats,), dtype), *(((size,), np.dtype("int32")) for size in sizes)]


_finish_update = Op(
    "finish_update",
    result_types=_result_types,
    reference=reference,
    lowered=operands_in_words(reference, 1),
    aliases=lambda *, sizes, **static: {i: i for i in range(1 + len(sizes))},
    attributes=lambda *, segments, **static: {"segments": segments},
)


def finish_update(
    floats: jax.Array,
    workspaces: Sequence[jax.Array],
    segments: Sequence[int],
    *,
    backend: str,
) -> jax.Array:
    """UPDATE_NORM is the norm of what this call adds to the weights: 0 where APPLY is 0.

    Args:
      floats: the scalars that the prologue derived; updated in place where donated.
      workspaces: from `update_norms`, one an arena. They are used up.
      segments: how many segments each workspace's layout has.
      backend: "auto", "cpu", "cuda" or "xla".

    Returns:
      The scalars with UPDATE_NORM set.

    Raises:
      ValueError: an operand has another shape or dtype.
    """
    check_floats(floats)
    check_workspaces(workspaces, segments, backend)
    if not workspaces:  # Without leaves, nothing moves.
        return floats
    return _finish_update(
        floats,
        *workspaces,
        num_floats=floats.shape[0],
        dtype=np.dtype(floats.dtype),
        sizes=tuple(x.shape[0] for x in workspaces),
        segments=tuple(segments),
        backend=backend,
    )[0]
