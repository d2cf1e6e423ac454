"""Norms of segments that several devices hold together.

Each device has its own sums; all get those of all, and add them up in the same order, so that they
have the same bits. Called inside of `Placement.over_devices`.
"""

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from . import scalars
from .ops.join import Parts, join_workspaces
from .placement import Placement, axes_of
from .plan import MemoryPlan


def join(
    plan: MemoryPlan,
    before: jax.Array,
    ints: jax.Array,
    workspaces: Sequence[jax.Array],
    *,
    products: bool = False,
    backend: str,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The counters with the first bad leaf of all devices, and workspaces of whole segments.

    One collective, or with "xla" two.

    Args:
        before: the state's counters.
        ints: those with the first bad leaf of this device.
        workspaces: for each series those of all arenas, as `norms` and its like leave them.
        products: whether the third series is of products.
        backend: of the ops that left them.
    """
    placement = plan.placement
    if placement is None or placement.form == "replicated":
        return ints, tuple(workspaces)
    found, *stacked = _of_all_devices(placement, [ints[scalars.FIRST_BAD][None], *workspaces])
    ints = before.at[scalars.FIRST_BAD].set(jnp.min(found))
    return ints, _joined(plan, stacked, products=products, backend=backend)


def join_sums(
    plan: MemoryPlan, workspaces: Sequence[jax.Array], *, backend: str
) -> tuple[jax.Array, ...]:
    """As `join`, where nobody has looked for what is not finite."""
    placement = plan.placement
    if placement is None or placement.form == "replicated":
        return tuple(workspaces)
    stacked = _of_all_devices(placement, workspaces)
    return _joined(plan, stacked, products=False, backend=backend)


def _of_all_devices(placement: Placement, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """[devices, size] of each array [size], by one collective a dtype."""
    found: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        own = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        flat = jnp.concatenate([arrays[i] for i in own])
        gathered = jax.lax.all_gather(flat, placement.axes, to="invarying")
        ends = np.cumsum([arrays[i].size for i in own])
        parts = jnp.split(gathered, ends[:-1].tolist(), axis=1)
        found |= dict(zip(own, parts, strict=True))
    return [found[i] for i in range(len(arrays))]


def _joined(
    plan: MemoryPlan, stacked: Sequence[jax.Array], *, products: bool, backend: str
) -> tuple[jax.Array, ...]:
    arenas = len(plan.arenas)
    counting = [_is_first(plan, i) for i in range(arenas)]
    parts = [Parts(plan.arenas[k % arenas], counting[k % arenas]) for k in range(len(stacked))]
    return join_workspaces(parts, stacked, products=products, backend=backend)


def _is_first(plan: MemoryPlan, arena: int) -> np.ndarray:
    """[devices, segments]: whether it is this device's sum that counts, and not a copy's."""
    placement, layout = plan.placement, plan.arenas[arena]
    assert placement is not None
    if placement.form != "leaves":
        return np.ones((placement.devices, len(layout.segments)), bool)
    sizes = [placement.mesh.shape[axis] for axis in placement.axes]
    places = np.stack(np.unravel_index(np.arange(prod(sizes)), sizes), axis=1)
    specs_of_all = placement.specs_of(plan.trained)
    specs = [specs_of_all[i] for i in layout.leaves]
    is_cut = np.array([[axis in axes_of(spec) for axis in placement.axes] for spec in specs], bool)
    by_leaf = ((places[:, None, :] == 0) | is_cut[None]).all(-1)
    return by_leaf[:, layout.segments[:, 2]]
