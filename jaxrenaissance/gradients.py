"""Gradients: sums of micro-batches' gradients, for a scan inside of one step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from . import ops, packed, scalars
from .ops.checks import check_arena, check_ints
from .ops.primitive import same_manual_axes
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

        Args:
            axis_name: the axis, or a tuple of axes.
        """
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
    # What is not read is no operand, and then could not say anything of a device.
    ints = counters * 0 + scalars.initial_ints()
    ints, *arenas = same_manual_axes([ints, *map(jnp.zeros_like, weights)])
    return Gradients(tuple(arenas), ints, plan)


@jax.jit(static_argnums=0, inline=True)
def add(spec: Spec, sums: Gradients, leaves: Sequence[Any]) -> Gradients:
    """The sums with one micro-batch more, from the trained leaves in the tree's order."""
    plan, ints, arenas = sums.plan, sums.ints, []
    own = packed.by_arena(plan, leaves)
    for i, (layout, first) in enumerate(zip(plan.arenas, first_leaves(plan), strict=True)):
        ints, arena, _ = ops.accumulate(
            layout,
            ints,
            sums.arenas[i],
            own[i],
            first_leaf=first,
            flag=spec.skip_nonfinite,
            norms=False,
            backend=spec.backend,
        )
        arenas.append(arena)
    return Gradients(tuple(arenas), ints.at[scalars.MICRO].add(1), plan)


@jax.jit(inline=True)
def counters(ints: jax.Array, sums: Gradients) -> jax.Array:
    """A state's counters, as if the sums were its own and their last micro-batch were this call."""
    slots = np.array([scalars.FIRST_BAD, scalars.MICRO])
    return ints.at[slots].set(jnp.stack([sums.ints[scalars.FIRST_BAD], sums.count - 1]))


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
            check_arena("arenas", arena, layout)
    except ValueError as error:
        raise ValueError(
            f"{argument}: {error}. Gradients are added up by state.accumulate, and over "
            "devices by their own psum"
        ) from None


def refuse_accumulate(spec: Spec, what: str) -> None:
    """Raises where the optimizer itself adds up gradients."""
    if spec.accumulate:
        raise ValueError(
            f"{what}: the optimizer was made with accumulate=, which adds up gradients over "
            "calls of apply_gradients. Use one of the two"
        )
