"""What is done to a state from outside: leaves mapped, moments forgotten, a loss scale set."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import ops, packed, scalars
from .arena_layout import ArenaLayout
from .groups import Match, select
from .plan import MemoryPlan
from .step import Arenas, Buffers


def selected(plan: MemoryPlan, match: Match | None) -> tuple[bool, ...]:
    """Whether `match`, as in `Group`, selects each of the plan's leaves; None selects all.

    Raises:
        TypeError, ValueError: see `groups.select`.
    """
    if match is None:
        return (True,) * len(plan.leaves)
    paths = [leaf.path for leaf in plan.leaves]
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.leaves]
    regions = [leaf.region for leaf in plan.leaves]
    return tuple(select(match, paths, shapes, regions, "match"))


def map_params(
    plan: MemoryPlan,
    weights: Arenas,
    fn: Callable[[jax.Array], Any],
    chosen: Sequence[bool],
    *,
    backend: str,
) -> Arenas:
    """The weights with `fn` applied to the chosen leaves, in the arenas' dtypes.

    Raises:
        ValueError: if a result has another shape, or a dtype that the arena does not hold.
    """
    leaves = packed.unpack(plan, weights, packed.arena_dtypes(plan), backend=backend)
    mapped = [fn(x) if own else x for x, own in zip(leaves, chosen, strict=True)]
    tree = packed.merge(plan, mapped, [None] * (len(plan.trained) - len(mapped)))
    return packed.pack(plan, packed.match(plan, tree, "fn"), backend=backend)


@functools.partial(jax.jit, static_argnames=("plan", "chosen", "backend"), inline=True)
def reset_moments(
    moments: tuple[Arenas, ...], *, plan: MemoryPlan, chosen: tuple[bool, ...], backend: str
) -> tuple[Arenas, ...]:
    """The moments, zero where a leaf is chosen; one launch an arena."""

    def local(moments: tuple[Arenas, ...]) -> tuple[Arenas, ...]:
        return tuple(
            ops.lerp(
                with_groups(layout, [chosen[i] for i in layout.leaves]),
                jnp.arange(2, dtype=layout.dtype),  # All the way to zero, or not at all.
                own,
                None,
                backend=backend,
            )
            for layout, own in zip(plan.arenas, moments, strict=True)
        )

    placement = plan.placement
    if placement is None:
        return local(moments)
    return placement.over_devices(local, (placement.arena_spec,), placement.arena_spec)(moments)


@jax.jit(inline=True)
def follow_loss_scale(buffers: Buffers, before: jax.Array) -> Buffers:
    """The buffers after a loss scale was set, from the scalars before.

    It stays within its bounds, the updates until it grows are counted anew, and what a running
    cycle has added up is as if it had had this scale from the start.
    """
    floats, ints = buffers.floats, buffers.ints
    least, most = (floats[..., slot] for slot in (scalars.MIN_SCALE, scalars.MAX_SCALE))
    scale = jnp.clip(floats[..., scalars.LOSS_SCALE], least, most)
    ratio = (scale / before[..., scalars.LOSS_SCALE])[..., None]
    return buffers._replace(
        floats=floats.at[..., scalars.LOSS_SCALE].set(scale),
        ints=ints.at[..., scalars.GOOD_STEPS].set(0),
        accumulator=tuple(x * ratio.astype(x.dtype) for x in buffers.accumulator),
    )


def with_groups(layout: ArenaLayout, groups: Sequence[int]) -> ArenaLayout:
    """The layout with other numbers of groups, one for each leaf in arena order."""
    segments = layout.segments.copy()
    segments[:, 4] = np.array(groups, np.int64)[segments[:, 2]]
    return dataclasses.replace(layout, segments=segments)
