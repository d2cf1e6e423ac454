"""What crosses the links between devices: gradients and weights, in arenas.

Everything here is called inside of `Placement.over_devices`, on what one device holds.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .ops import pack, pack_piece, unpack
from .pieces import cutting_layout, gathering, whole_layout
from .plan import MemoryPlan

Arenas = tuple[jax.Array, ...]


def own_pieces(plan: MemoryPlan, leaves: Sequence[Sequence[Any]], *, backend: str) -> Arenas:
    """Each device's arenas, from leaves of which all devices have the same.

    Args:
        leaves: for each arena its leaves, in its order.
    """
    placement = plan.placement
    if placement is None or placement.form != "zero1":
        return tuple(
            pack(layout, own, backend=backend)
            for layout, own in zip(plan.arenas, leaves, strict=True)
        )
    index = jax.lax.axis_index(placement.axes)
    return tuple(
        pack_piece(
            cutting_layout(layout, plan.leaves_of(i), plan.shards),
            own,
            index,
            shards=plan.shards,
            backend=backend,
        )
        for i, (layout, own) in enumerate(zip(plan.arenas, leaves, strict=True))
    )


def cut(plan: MemoryPlan, wholes: Sequence[jax.Array]) -> Arenas:
    """This device's pieces of whole arenas."""
    placement: Any = plan.placement
    index = jax.lax.axis_index(placement.axes)
    return tuple(
        jax.lax.dynamic_slice(whole, (index * layout.size,), (layout.size,))
        for layout, whole in zip(plan.arenas, wholes, strict=True)
    )


def whole_arenas(
    plan: MemoryPlan,
    leaves: Sequence[Sequence[Any]],
    *,
    dtype: np.dtype | None = None,
    backend: str,
) -> Arenas:
    """The leaves packed as all devices' pieces side by side, in a dtype or the arenas' own."""
    return tuple(
        pack(
            whole_layout(layout, plan.leaves_of(i), plan.shards, _narrower(layout.dtype, dtype)),
            own,
            backend=backend,
        )
        for i, (layout, own) in enumerate(zip(plan.arenas, leaves, strict=True))
    )


def _narrower(own: np.dtype, asked: np.dtype | None) -> np.dtype:
    return own if asked is None or own == np.float64 else asked


def gathered_leaves(
    plan: MemoryPlan, arenas: Arenas, dtypes: Sequence[Sequence[np.dtype]], *, backend: str
) -> list[list[jax.Array]]:
    """For each arena its leaves on every device, which cross the links in their own dtypes."""
    placement: Any = plan.placement
    result = []
    for i, (layout, arena) in enumerate(zip(plan.arenas, arenas, strict=True)):
        how = gathering(layout, plan.leaves_of(i), plan.shards, tuple(dtypes[i]))
        buffers = [arena]
        if how.narrowing is not None:
            buffers = unpack(
                how.narrowing, arena, [whole.dtype for whole in how.wholes], backend=backend
            )
        leaves: list[Any] = [None] * len(layout.leaves)
        for buffer, whole, members in zip(buffers, how.wholes, how.members, strict=True):
            everything = jax.lax.all_gather(buffer, placement.axes, tiled=True, to="invarying")
            own = unpack(whole, everything, [whole.dtype] * len(members), backend=backend)
            for position, leaf in zip(members, own, strict=True):
                leaves[position] = leaf
        result.append(leaves)
    return result


def summed(plan: MemoryPlan, wholes: Sequence[jax.Array]) -> Arenas:
    """The sums over all devices of whole arenas: of each its piece, or with "replicated" all."""
    placement: Any = plan.placement
    if placement.form == "replicated":
        sums = [jax.lax.psum(x, placement.axes) for x in wholes]
    else:
        # One without elements cannot be scattered.
        sums = [
            jax.lax.psum_scatter(x, placement.axes, tiled=True) if x.size else x for x in wholes
        ]
    return tuple(x.astype(layout.dtype) for x, layout in zip(sums, plan.arenas, strict=True))
