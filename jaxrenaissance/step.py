"""step: what one call of an optimizer runs, over all arenas of a state."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from . import hyperparams, joint_norms, ops, packed, scalars
from .incoming import Incoming, receive, receive_sums
from .ops.primitive import same_manual_axes
from .plan import MemoryPlan
from .spec import Spec

Arenas = tuple[jax.Array, ...]


class Buffers(NamedTuple):
    """What a step reads and renews. A series that the optimizer does not keep is ().

    Attributes:
        weights: the arenas.
        moments: for each arena its moments.
        ema: the averages of the weights, like them.
        accumulator: the sums of the running cycle's gradients, like the weights.
        norms: for each arena the norms of its segments, in the dtype of `floats`.
        ratios: for each arena the trust ratios of its segments, likewise.
        floats, ints: the scalars.
    """

    weights: Arenas
    moments: tuple[Arenas, ...]
    ema: Arenas
    accumulator: Arenas
    norms: Arenas
    ratios: Arenas
    floats: jax.Array
    ints: jax.Array


def start(
    spec: Spec, plan: MemoryPlan, weights: Arenas, floats: jax.Array, ints: jax.Array
) -> Buffers:
    """The buffers of a state that has not been stepped, from its weights and scalars."""
    run = functools.partial(_start, spec, plan)
    placement = plan.placement
    if placement is None:
        return run(weights, floats, ints)
    operands = (placement.arena_spec, PartitionSpec(), PartitionSpec())
    return placement.over_devices(run, operands, specs_of_buffers(plan))(weights, floats, ints)


def specs_of_buffers(plan: MemoryPlan) -> Any:
    """How the buffers lie on the plan's mesh."""
    assert plan.placement is not None
    cut, same = plan.placement.arena_spec, PartitionSpec()
    return Buffers(
        weights=cut,  # pyright: ignore[reportArgumentType]: a spec for all of them
        moments=cut,  # pyright: ignore[reportArgumentType]
        ema=cut,  # pyright: ignore[reportArgumentType]
        accumulator=cut,  # pyright: ignore[reportArgumentType]
        norms=same,  # pyright: ignore[reportArgumentType]
        ratios=same,  # pyright: ignore[reportArgumentType]
        floats=same,  # pyright: ignore[reportArgumentType]
        ints=same,  # pyright: ignore[reportArgumentType]
    )


def _start(
    spec: Spec, plan: MemoryPlan, weights: Arenas, floats: jax.Array, ints: jax.Array
) -> Buffers:
    norms = tuple(jnp.zeros(count, floats.dtype) for count in _segments(plan))
    # Inside shard_map each step leaves all of them varying over the same axes, so they start so.
    if plan.placement is None:
        floats, ints, *rest = same_manual_axes([floats, ints, *weights, *norms])
        weights, norms = tuple(rest[: len(weights)]), tuple(rest[len(weights) :])
    averages = map(jnp.zeros_like if spec.ema_debias else jnp.copy, weights)
    return Buffers(
        weights=weights,
        moments=tuple(
            tuple(jnp.zeros_like(w) for _ in range(spec.config.moments)) for w in weights
        ),
        ema=tuple(averages) if spec.ema else (),
        accumulator=tuple(map(jnp.zeros_like, weights)) if spec.accumulate else (),
        norms=norms if "leaves" in spec.metrics else (),
        ratios=tuple(jnp.ones_like(x) for x in norms) if spec.trust else (),
        floats=floats,
        ints=ints,
    )


def scalar_dtype(plan: MemoryPlan) -> np.dtype:
    """The dtype of a state's float scalars: the widest of the arenas'."""
    return max(
        (arena.dtype for arena in plan.arenas),
        key=lambda d: d.itemsize,
        default=np.dtype("float32"),
    )


def first_leaves(plan: MemoryPlan) -> list[int]:
    """For each arena the number of its first leaf, where all arenas' leaves are counted through."""
    counts = [len(layout.leaves) for layout in plan.arenas]
    return [sum(counts[:i]) for i in range(len(counts))]


# Inlined into the caller's own jit; called from Python, it is one dispatch.
@jax.jit(static_argnums=(0, 1), inline=True)
def step(
    spec: Spec,
    plan: MemoryPlan,
    buffers: Buffers,
    gradients: Sequence[Any],
    sums: jax.Array | None = None,
) -> Buffers:
    """One step over all arenas.

    A pass over the gradients where one is wanted, schedules, the scalars, then one update an arena.

    Args:
        spec, plan: static.
        buffers: of the state.
        gradients: the trained leaves' in the tree's order, checked; or the arenas of `Gradients`.
        sums: the counters of these, where they are.
    """
    placement = plan.placement
    if placement is None:
        return _step(spec, plan, False, buffers, gradients, sums)
    run = functools.partial(_step, spec, plan, placement.is_inside())
    specs = specs_of_buffers(plan)
    leaves = placement.specs_of(plan.trained) if sums is None else placement.arena_spec
    operands = (specs, leaves, PartitionSpec())
    return placement.over_devices(run, operands, specs)(buffers, gradients, sums)


def _step(
    spec: Spec,
    plan: MemoryPlan,
    each_has_its_own: bool,
    buffers: Buffers,
    gradients: Sequence[Any],
    sums: jax.Array | None,
) -> Buffers:
    """See `step`; on one device, whose gradients may be of its own part of a batch."""
    found = (
        receive(spec, plan, buffers.ints, gradients, each_has_its_own=each_has_its_own)
        if sums is None
        else receive_sums(plan, buffers.ints, gradients, sums, each_has_its_own=each_has_its_own)
    )
    now, own = _prepare(spec, plan, buffers, found)
    if "update_norm" in spec.metrics:
        now = _measure_update(spec, plan, now, own)
    new = [
        ops.update(
            spec.update,
            layout,
            now.floats,
            now.weights[i],
            now.moments[i],
            own[i],
            ema=now.ema[i] if now.ema else None,
            ratios=now.ratios[i] if now.ratios else None,
            gated=spec.accumulate,
            backend=spec.backend,
        )
        for i, layout in enumerate(plan.arenas)
    ]
    return now._replace(
        weights=tuple(weights for weights, _, _ in new),
        moments=tuple(moments for _, moments, _ in new),
        ema=tuple(ema for _, _, ema in new if ema is not None),
    )


@jax.jit(static_argnums=(0, 1), static_argnames=("dtypes",), inline=True)
def changes(
    spec: Spec,
    plan: MemoryPlan,
    buffers: Buffers,
    gradients: Sequence[Any],
    weights: Sequence[Any] | None,
    *,
    dtypes: packed.Dtypes,
) -> tuple[Buffers, list[Any]]:
    """One step over all arenas for weights that are leaves: what is to be added to each.

    Args:
        spec, plan: static; of a spec without what only works in place.
        buffers: of the state; its `weights` are looked at for trust ratios alone, and stay.
        gradients: the trained leaves' in the tree's order, checked.
        weights: likewise; None where the optimizer does not look at them.
        dtypes: of the changes.

    Returns:
        The new buffers, and the changes in the tree's order.
    """
    found = Incoming(buffers.ints, packed.by_arena(plan, gradients), is_looked_at=False)
    now, own = _prepare(spec, plan, buffers, found)
    own_weights = None if weights is None else packed.by_arena(plan, weights)
    leaves: list[Any] = [None] * len(plan.leaves)
    moments = []
    for i, layout in enumerate(plan.arenas):
        new, own_leaves = ops.changes(
            spec.update,
            layout,
            now.floats,
            now.moments[i],
            own[i],
            None if own_weights is None else own_weights[i],
            dtypes[i],
            ratios=now.ratios[i] if now.ratios else None,
            backend=spec.backend,
        )
        moments.append(new)
        for j, leaf in zip(layout.leaves, own_leaves, strict=True):
            leaves[j] = leaf
    return now._replace(moments=tuple(moments)), leaves


def _prepare(
    spec: Spec, plan: MemoryPlan, old: Buffers, found: Incoming
) -> tuple[Buffers, Sequence[Any]]:
    """All that comes before an update: scalars, sums and ratios; and the gradients it goes by."""
    old, own = old._replace(ints=found.ints), found.gradients
    ints, accumulator, workspaces = _look_at(spec, plan, old, own, is_looked_at=found.is_looked_at)
    if workspaces or ints is not old.ints:  # else nobody has looked for anything here
        ints, workspaces = joint_norms.join(
            plan, old.ints, ints, workspaces, products=spec.trust_rule == 2, backend=spec.backend
        )
    if accumulator:
        own = accumulator
    floats = old.floats
    if spec.schedules or any(group.schedules for group in spec.groups):
        floats = hyperparams.follow_schedules(spec, floats, ints[scalars.STEP])
    now = old._replace(floats=floats, ints=ints, accumulator=accumulator)
    now = _advance(spec, plan, now, workspaces)
    return (_lamb_ratios(spec, plan, now, own) if spec.trust == "lamb" else now), own


def _look_at(
    spec: Spec, plan: MemoryPlan, old: Buffers, own: Sequence[Any], *, is_looked_at: bool
) -> tuple[jax.Array, Arenas, Arenas]:
    """The pass over the gradients: the counters, the sums and the workspaces of the norms.

    Of all arenas first those of the gradients, then with trust ratios those of the weights and of
    the products.
    """
    ints, sums, by_arena, flag = old.ints, [], [], spec.skip_nonfinite
    trust = spec.trust_rule
    for i, (layout, first) in enumerate(zip(plan.arenas, first_leaves(plan), strict=True)):
        where: dict[str, Any] = {"first_leaf": first, "backend": spec.backend}
        if spec.accumulate:
            norms = spec.norms and not trust
            ints, total, workspace = ops.accumulate(
                layout, ints, old.accumulator[i], own[i], flag=flag, norms=norms, **where
            )
            sums.append(total)
            if norms:
                by_arena.append([workspace])
        if trust:
            ints, *workspaces = ops.norms(
                layout,
                ints,
                sums[i] if spec.accumulate else own[i],
                weights=old.weights[i],
                products=trust == 2,
                flag=flag and not spec.accumulate,
                **where,
            )
            by_arena.append(workspaces)
        elif spec.norms and not spec.accumulate:
            ints, workspace = ops.norms(layout, ints, own[i], flag=flag, **where)
            by_arena.append([workspace])
        elif flag and not (is_looked_at or spec.accumulate):
            ints = ops.statistics(layout, ints, own[i], **where)
    return ints, tuple(sums), tuple(itertools.chain(*zip(*by_arena, strict=True)))


def _advance(spec: Spec, plan: MemoryPlan, old: Buffers, workspaces: Arenas) -> Buffers:
    """With the scalars and counters of this call, the norms of the segments, and LARS's ratios."""
    ints, weights = old.ints, ()
    if "param_norm" in spec.metrics and not spec.trust_rule:
        of_arenas = []
        for layout, arena in zip(plan.arenas, old.weights, strict=True):
            _, workspace = ops.norms(layout, ints, arena, flag=False, backend=spec.backend)
            of_arenas.append(workspace)
        weights = joint_norms.join_sums(plan, of_arenas, backend=spec.backend)
    if not workspaces and not weights:
        floats, ints = ops.prologue(old.floats, ints, backend=spec.backend)
        return old._replace(floats=floats, ints=ints)
    by_segment = "leaves" in spec.metrics
    series = (len(workspaces) + len(weights)) // len(plan.arenas)
    floats, ints, norms, ratios = ops.finish(
        old.floats,
        ints,
        [*workspaces, *weights],
        _segments(plan) * series,
        gradients=len(plan.arenas) if workspaces else 0,
        by_segment=by_segment,
        trust=spec.trust_rule,
        groups=_groups(plan) if spec.trust_rule else (),
        backend=spec.backend,
    )
    if by_segment and spec.accumulate:
        complete = ints[scalars.MICRO] == 0
        norms = tuple(jnp.where(complete, *pair) for pair in zip(norms, old.norms, strict=True))
    return old._replace(floats=floats, ints=ints, norms=norms, ratios=ratios)


def _lamb_ratios(spec: Spec, plan: MemoryPlan, now: Buffers, own: Sequence[Any]) -> Buffers:
    """With the trust ratios of what Adam is about to change."""
    by_arena = [
        ops.update_norms(
            spec.update,
            layout,
            now.floats,
            now.weights[i],
            now.moments[i],
            own[i],
            direction=True,
            backend=spec.backend,
        )
        for i, layout in enumerate(plan.arenas)
    ]
    workspaces = [*itertools.chain(*zip(*by_arena, strict=True))]
    workspaces = joint_norms.join_sums(plan, workspaces, backend=spec.backend)
    floats, ratios = ops.finish_ratios(
        now.floats, workspaces, _segments(plan) * 2, _groups(plan), backend=spec.backend
    )
    return now._replace(floats=floats, ratios=ratios)


def _measure_update(spec: Spec, plan: MemoryPlan, now: Buffers, own: Sequence[Any]) -> Buffers:
    """With the norm of what the update is about to change."""
    workspaces = [
        ops.update_norms(
            spec.update,
            layout,
            now.floats,
            now.weights[i],
            now.moments[i],
            own[i],
            ratios=now.ratios[i] if now.ratios else None,
            backend=spec.backend,
        )[0]
        for i, layout in enumerate(plan.arenas)
    ]
    if not workspaces:
        return now
    workspaces = joint_norms.join_sums(plan, workspaces, backend=spec.backend)
    floats = ops.finish_update(now.floats, workspaces, _segments(plan), backend=spec.backend)
    return now._replace(floats=floats)


def _segments(plan: MemoryPlan) -> list[int]:
    return [len(layout.segments) for layout in plan.arenas]


def _groups(plan: MemoryPlan) -> list[np.ndarray]:
    return [layout.segments[:, 4].astype(np.int32) for layout in plan.arenas]
