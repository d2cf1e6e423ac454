"""Incoming gradients: what of them each device works on, once they are those of all devices."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import collectives, packed, scalars
from .placement import Placement, axes_of, varying_axes
from .plan import MemoryPlan
from .spec import Spec


class Incoming(NamedTuple):
    """What a step works on.

    Attributes:
        ints: the state's counters, which say of how many the gradients are the sum.
        gradients: for each arena its leaves, in its order, or an arena.
        is_looked_at: whether what is not finite has been looked for.
    """

    ints: jax.Array
    gradients: Sequence[Any]
    is_looked_at: bool


def receive(
    spec: Spec,
    plan: MemoryPlan,
    ints: jax.Array,
    leaves: Sequence[Any],
    *,
    each_has_its_own: bool,
) -> Incoming:
    """Gradients as leaves, in the tree's order, of each device's own part of a batch or of all."""
    placement, own = plan.placement, packed.by_arena(plan, leaves)
    if placement is None:
        return Incoming(ints, own, is_looked_at=False)
    if placement.form == "leaves":
        if each_has_its_own:
            check_reduced(plan, leaves)
        return Incoming(ints, own, is_looked_at=False)
    if not (each_has_its_own and _differ(placement, leaves)):
        if placement.form == "zero1":
            own = collectives.own_pieces(plan, own, backend=spec.backend)
        return Incoming(ints, own, is_looked_at=False)
    wholes = collectives.whole_arenas(plan, own, dtype=placement.reduce_dtype, backend=spec.backend)
    sums = collectives.summed(plan, wholes)
    if spec.accumulate:  # Its counters are of micro-batches.
        return Incoming(ints, [x / placement.devices for x in sums], is_looked_at=False)
    # The prologue divides by the count, so that no pass over the gradients does.
    ints = ints.at[scalars.MICRO].set(placement.devices - 1)
    return Incoming(ints, sums, is_looked_at=False)


def receive_sums(
    plan: MemoryPlan,
    ints: jax.Array,
    arenas: Sequence[Any],
    counts: jax.Array,
    *,
    each_has_its_own: bool,
) -> Incoming:
    """The sums of `Gradients`, each device's own or those of all."""
    placement = plan.placement
    bad, count = counts[scalars.FIRST_BAD], counts[scalars.MICRO]
    if each_has_its_own and placement is not None and placement.form != "leaves":
        if _differ(placement, arenas):
            arenas = collectives.summed(plan, arenas)
            bad = jax.lax.pmin(bad, placement.axes)
            count = jax.lax.psum(count, placement.axes)
        elif placement.form == "zero1":
            arenas = collectives.cut(plan, arenas)
    elif each_has_its_own and placement is not None:
        # They are of leaves that devices hold parts of, as many on each, which JAX cannot know.
        bad, count = jax.lax.pmin(bad, placement.axes), jax.lax.pmax(count, placement.axes)
    # As if the sums were the state's own, and their last micro-batch were this call.
    slots = np.array([scalars.FIRST_BAD, scalars.MICRO])
    return Incoming(ints.at[slots].set(jnp.stack([bad, count - 1])), arenas, is_looked_at=True)


def check_reduced(plan: MemoryPlan, leaves: Sequence[Any]) -> None:
    """Raises where devices with one part of a leaf have, for all JAX knows, other gradients.

    Args:
        plan: of a state with "leaves".
        leaves: gradients, in the tree's order.
    """
    placement: Any = plan.placement
    several = {axis for axis in placement.axes if placement.mesh.shape[axis] > 1}
    specs = placement.specs_of(plan.trained)
    for leaf, x, spec in zip(plan.leaves, leaves, specs, strict=True):
        open_axes = sorted(varying_axes(x) & several - axes_of(spec))
        if open_axes and leaf.size:
            raise ValueError(
                f"grads: {leaf.path!r} is sharded as {spec}, and its gradient varies over "
                f'{", ".join(map(repr, open_axes))}: with sharding="leaves" it is yours to '
                "reduce, by jax.lax.pmean over axes that cut the batch, and jax.lax.psum over "
                "those that cut the model"
            )


def _differ(placement: Placement, arrays: Sequence[Any]) -> bool:
    """Whether devices may have other gradients; where nobody knows, they may."""
    if not placement.is_checked():
        return True
    return any(varying_axes(x) & set(placement.axes) for x in arrays)
