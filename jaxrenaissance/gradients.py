"""Gradients: sums of micro-batches' gradients, for a scan inside of one step."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from . import collectives, joint_norms, ops, packed, scalars
from .arena_layout import ArenaLayout
from .incoming import check_reduced
from .ops.checks import check_array, check_ints
from .ops.primitive import same_manual_axes
from .pieces import whole_layout
from .placement import axes_of
from .plan import MemoryPlan
from .spec import Spec
from .step import Arenas, first_leaves


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Gradients:
    """The sum of the gradients of some micro-batches; a pytree, so that a scan carries it.

    Made by `TrainState.zero_gradients`, added to by `TrainState.accumulate`, and handed to
    `TrainState.apply_gradients`, which updates with the mean.

    Attributes:
        arenas: one 1-D array an arena: the sums, in the arena's dtype.
        ints: counters like the state's: how many were added, and the first bad leaf.
        plan: of the state that made it.
    """

    arenas: Arenas
    ints: jax.Array
    plan: MemoryPlan = dataclasses.field(metadata={"static": True})

    @property
    def count(self) -> jax.Array:
        """Micro-batches that were added: an int32 scalar."""
        return self.ints[..., scalars.MICRO]

    @property
    def has_nan(self) -> jax.Array:
        """Whether a gradient was not finite, or a sum no longer is: a bool scalar."""
        return self.ints[..., scalars.FIRST_BAD] != scalars.NO_LEAF

    def psum(self, axis_name: Any) -> "Gradients":
        """The sum over the devices, or members, of a mapped axis, inside `jax.shard_map` or vmap.

        For sums that each device made of its own micro-batches, so that they cross the links once:
        `state.apply_gradients(sums.psum("data"))` updates with the mean over all micro-batches of
        all devices. A gradient that is not finite on one of them skips the update on all. (`psum`
        and `pmean` of `jax.lax` know nothing of the counters.)

        A state on a mesh does it by itself, cheaper: `state.apply_gradients(sums)`.

        Args:
            axis_name: the axis, or a tuple of axes.

        Raises:
            ValueError: if devices hold other parts of a leaf along the axis, whose sum is nothing.
        """
        axes = {axis_name} if isinstance(axis_name, str) else set(axis_name)
        placement = self.plan.placement
        for spec in () if placement is None else placement.specs_of(self.plan.trained):
            if axes & axes_of(spec):
                raise ValueError(
                    f"axis_name: along {axis_name!r} leaves are cut, {spec}, and the sum of their "
                    "parts is that of other elements"
                )
        arenas = [jax.lax.psum(arena, axis_name) for arena in self.arenas]
        slots = np.array([scalars.FIRST_BAD, scalars.MICRO])
        first_bad = jax.lax.pmin(self.ints[scalars.FIRST_BAD], axis_name)
        count = jax.lax.psum(self.count, axis_name)
        ints = jnp.asarray(scalars.initial_ints()).at[slots].set(jnp.stack([first_bad, count]))
        return Gradients(tuple(arenas), ints, self.plan)

    def __repr__(self) -> str:
        arenas = ", ".join(f"{arena.dtype}[{arena.size}]" for arena in self.plan.arenas)
        return f"Gradients({arenas or 'none'})"


@jax.jit(static_argnums=0, inline=True)
def zero(plan: MemoryPlan, weights: Arenas, counters: jax.Array) -> Gradients:
    """No micro-batch yet. The weights say on which axes, the state's counters on which device."""
    placement = plan.placement
    if placement is None:
        # What is not read is no operand, and then could not say anything of a device.
        ints = counters * 0 + scalars.initial_ints()
        ints, *arenas = same_manual_axes([ints, *map(jnp.zeros_like, weights)])
        return Gradients(tuple(arenas), ints, plan)
    layouts = _layouts(plan, inside=placement.is_inside())

    def local(counters: jax.Array) -> tuple[jax.Array, Arenas]:
        arenas = tuple(jnp.zeros(layout.size, layout.dtype) for layout in layouts)
        return placement.varying((counters * 0 + scalars.initial_ints(), arenas))

    specs = (PartitionSpec(), placement.arena_spec)
    ints, arenas = placement.over_devices(local, (PartitionSpec(),), specs)(counters)
    return Gradients(arenas, ints, plan)


@jax.jit(static_argnums=0, inline=True)
def add(spec: Spec, sums: Gradients, leaves: Sequence[Any]) -> Gradients:
    """The sums with one micro-batch more, from the trained leaves in the tree's order."""
    plan, placement = sums.plan, sums.plan.placement
    if placement is None:
        ints, arenas = _add(spec, plan, True, sums.ints, sums.arenas, leaves)
        return Gradients(arenas, ints, plan)
    run = functools.partial(_add, spec, plan, placement.is_inside())
    specs = (PartitionSpec(), placement.arena_spec)
    operands = (*specs, placement.specs_of(plan.trained))
    ints, arenas = placement.over_devices(run, operands, specs)(sums.ints, sums.arenas, leaves)
    return Gradients(arenas, ints, plan)


def _add(
    spec: Spec,
    plan: MemoryPlan,
    each_has_its_own: bool,
    ints: jax.Array,
    arenas: Arenas,
    leaves: Sequence[Any],
) -> tuple[jax.Array, Arenas]:
    """See `add`; on one device. Its own gradients add up whole; those of all, by its pieces."""
    own: Sequence[Any] = packed.by_arena(plan, leaves)
    if not each_has_its_own and plan.shards > 1:
        own = collectives.own_pieces(plan, own, backend=spec.backend)
    if each_has_its_own and plan.placement is not None and plan.placement.form == "leaves":
        check_reduced(plan, leaves)
    before, new = ints, []
    layouts = _layouts(plan, inside=each_has_its_own)
    for i, (layout, first) in enumerate(zip(layouts, first_leaves(plan), strict=True)):
        ints, arena, _ = ops.accumulate(
            layout,
            ints,
            arenas[i],
            own[i],
            first_leaf=first,
            flag=spec.skip_nonfinite,
            norms=False,
            backend=spec.backend,
        )
        new.append(arena)
    if not each_has_its_own:
        ints, _ = joint_norms.join(plan, before, ints, (), backend=spec.backend)
    return ints.at[scalars.MICRO].add(1), tuple(new)


def _layouts(plan: MemoryPlan, *, inside: bool) -> Sequence[ArenaLayout]:
    """Of the sums on each device: where it adds up gradients of its own, they are whole."""
    if not inside or plan.shards == 1:
        return plan.arenas
    return [
        whole_layout(layout, plan.leaves_of(i), plan.shards, layout.dtype)
        for i, layout in enumerate(plan.arenas)
    ]


def check_sums(spec: Spec, plan: MemoryPlan, sums: Gradients, argument: str) -> None:
    """Raises unless a state of this plan can be updated with the sums."""
    refuse_accumulate(spec, argument)
    if sums.plan != plan:
        raise ValueError(
            f"{argument}: the Gradients are those of another plan, {sums.plan!r}, wanted {plan!r}"
        )
    try:
        check_ints(sums.ints)
        for layout, arena in zip(plan.arenas, sums.arenas, strict=True):
            shape = (layout.size * _parts(plan),)
            check_array("arenas", arena, shape, (layout.dtype,))
    except ValueError as error:
        raise ValueError(
            f"{argument}: {error}. Gradients are added up by state.accumulate, and over "
            "devices by their own psum"
        ) from None


def _parts(plan: MemoryPlan) -> int:
    """How many devices' arenas an array of sums is, as it is seen here."""
    placement = plan.placement
    if placement is None or placement.form == "replicated":
        return 1
    return 1 if placement.form == "leaves" and placement.is_inside() else placement.devices


def refuse_accumulate(spec: Spec, what: str) -> None:
    """Raises where the optimizer itself adds up gradients."""
    if spec.accumulate:
        raise ValueError(
            f"{what}: the optimizer was made with accumulate=, which adds up gradients over "
            "calls of apply_gradients. Use one of the two"
        )
