"""replan: a state goes on with another tree of parameters."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from . import averages, frozen_leaves, packed, scalars, transform
from .arena_layout import Leaf, arena_dtype
from .compute_dtypes import ComputeDtype, resolve
from .contents import Contents
from .extra import copy
from .foreign import check_optimizer
from .ops.checks import leaf_dtypes
from .packed import Dtypes
from .placing import of_other_leaves
from .plan import MemoryPlan
from .planning import Rules, Stacked
from .static import Static
from .step import Arenas, Buffers, scalar_dtype, start
from .surgery import with_groups
from .transform import Optimizer

logger = logging.getLogger("jaxrenaissance")


def change(
    old: Contents,
    new_tree: Any,
    optimizer: Optimizer | None,
    compute_dtype: ComputeDtype,
    options: Mapping[str, Any],
) -> Contents:
    """See `TrainState.replan`; the options are those of the plan."""
    spec = old.static.spec
    if optimizer is not None:
        check_optimizer(optimizer)
        if optimizer.spec != spec:
            raise ValueError(
                f"optimizer: expected one of the state's spec, {spec}, got {optimizer.spec}"
            )
    tree = packed.canonical(new_tree)
    static = _plan_again(old.static, tree, optimizer, compute_dtype, **options)
    frozen_leaves.check_arrays(static.plan, tree, "new_tree")
    _note_lost(old.static.plan, static.plan)
    tree = packed.placed(static.plan, tree, "new_tree")
    trained, frozen = packed.split(static.plan, jtu.tree_leaves(tree))
    buffers = _move(old.static, static, old.buffers, trained)
    return old._replace(static=static, buffers=buffers, frozen=tuple(copy(frozen)))


def _plan_again(
    old: Static,
    tree: Any,
    optimizer: Optimizer | None,
    compute_dtype: ComputeDtype,
    *,
    rules: Rules | None,
    stacked: Stacked | None,
    trainable: Any,
) -> Static:
    """The static part of a state for this tree."""
    known = {leaf.path: leaf for leaf in old.plan.leaves}
    options: dict[str, Any] = {
        "rules": _rules(known, rules),
        "stacked": _stacked(known) if stacked is None else stacked,
        "trainable": _trainable(old.plan, tree) if trainable is None else trainable,
        "placement": of_other_leaves(old.plan.placement, tree),
    }
    if optimizer is None:
        if old.spec.trust is not None:
            options["trust_ratio_mask"] = None
        plan = _as_known(MemoryPlan.build(tree, **options), old.plan)
    else:
        plan = transform.build_plan(tree, optimizer.selection, **options)
    keep = compute_dtype is None
    return Static(
        plan, old.spec, _compute_dtypes(old, plan) if keep else resolve(compute_dtype, plan)
    )


def _note_lost(old: MemoryPlan, new: MemoryPlan) -> None:
    """Tells through the logger of which leaves the moments are not kept."""
    now = {leaf.path: leaf for leaf in new.leaves}
    lost = {
        "no longer trained": [leaf.path for leaf in old.leaves if leaf.path not in now],
        "of another shape, so that their moments start anew": [
            leaf.path
            for leaf in old.leaves
            if leaf.path in now and leaf.shape != now[leaf.path].shape
        ],
    }
    told = [f"{what}: {', '.join(map(repr, paths))}" for what, paths in lost.items() if paths]
    if told:
        logger.warning("replan: leaves %s", "; leaves ".join(told))


@jax.jit(static_argnums=(0, 1), inline=True)
def _move(old: Static, new: Static, buffers: Buffers, leaves: Sequence[Any]) -> Buffers:
    """The buffers of the new plan.

    Args:
        old, new: the static parts.
        buffers: of the old plan.
        leaves: the new trained leaves, in the tree's order.
    """
    spec, plan = new.spec, new.plan
    dtypes = [plan.arenas[leaf.arena].dtype for leaf in plan.leaves]
    wide = [x.astype(d) for x, d in zip(leaves, dtypes, strict=True)]
    if any(x.dtype != d for x, d in zip(leaves, dtypes, strict=True)):
        before = _same(old, new, buffers.weights, wide)
        wide = [_unrounded(*three) for three in zip(leaves, wide, before, strict=True)]
    weights = packed.pack(plan, wide, backend=spec.backend)
    zeros = [jnp.zeros_like(x) for x in wide]
    series = [tuple(own[k] for own in buffers.moments) for k in range(spec.config.moments)]
    moments = [_moved(old, new, arenas, zeros) for arenas in series]
    ema = ()
    if spec.ema:
        if spec.ema_debias:  # So that it reads as the weight, as it does at first.
            weight = averages.gathered(buffers.floats)
            wide = [x * weight.astype(x.dtype) for x in wide]
        ema = _moved(old, new, buffers.ema, wide)
    floats = buffers.floats.astype(scalar_dtype(plan))
    buffers = start(spec, plan, weights, floats, _counters(old.plan, plan, buffers.ints))
    by_arena = tuple(tuple(own[i] for own in moments) for i in range(len(weights)))
    return buffers._replace(moments=by_arena, ema=ema)


def _same(old: Static, new: Static, arenas: Arenas, fresh: Sequence[jax.Array]) -> list[jax.Array]:
    """What the old arenas hold of leaves of the same path and shape, and else what is fresh."""
    dtypes = packed.arena_dtypes(old.plan)
    before = packed.unpack(old.plan, arenas, dtypes, backend=new.spec.backend)
    known = {(leaf.path, leaf.shape): x for leaf, x in zip(old.plan.leaves, before, strict=True)}
    leaves = [
        known.get((leaf.path, leaf.shape), x).astype(x.dtype)
        for leaf, x in zip(new.plan.leaves, fresh, strict=True)
    ]
    return packed.on_mesh(new.plan, leaves)


def _moved(old: Static, new: Static, arenas: Arenas, fresh: Sequence[jax.Array]) -> Arenas:
    return packed.pack(new.plan, _same(old, new, arenas, fresh), backend=new.spec.backend)


def _unrounded(leaf: jax.Array, wide: jax.Array, before: jax.Array) -> jax.Array:
    """A weight that was only rounded when it was read is what it was."""
    return jnp.where(leaf == before.astype(leaf.dtype), before, wide)


def _counters(old: MemoryPlan, new: MemoryPlan, ints: jax.Array) -> jax.Array:
    """The counters, with the running cycle forgotten and the last bad leaf's new number."""
    numbers = {new.leaves[i].path: n for n, i in enumerate(packed.arena_order(new))}
    table = np.array(
        [*(numbers.get(old.leaves[i].path, -1) for i in packed.arena_order(old)), -1], np.int32
    )
    slots = np.array([scalars.MICRO, scalars.CYCLE_BAD, scalars.LAST_BAD_LEAF])
    last_bad = jnp.asarray(table)[ints[scalars.LAST_BAD_LEAF]]
    return ints.at[slots].set(jnp.stack([jnp.int32(0), jnp.int32(0), last_bad]))


def _rules(known: dict[str, Leaf], rules: Rules | None) -> Rules:
    def region(path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        given = None if rules is None else rules(path, leaf)
        return known[path].region if given is None and path in known else given

    return region


def _stacked(known: dict[str, Leaf]) -> Stacked:
    def axes(path: str, leaf: jax.ShapeDtypeStruct) -> int:
        same_rank = path in known and len(known[path].shape) == len(leaf.shape)
        return known[path].stacked if same_rank else 0

    return axes


def _trainable(old: MemoryPlan, tree: Any) -> Callable[[str, Any], bool] | None:
    known = dict(zip(packed.all_paths(old), old.trained, strict=True))

    def trained(path: str, leaf: Any) -> bool:
        return known.get(path, arena_dtype(leaf) is not None)

    return trained if jtu.tree_leaves(tree) else None


def _as_known(plan: MemoryPlan, old: MemoryPlan) -> MemoryPlan:
    """The plan with the groups and the names of the rules that leaves had."""
    known = {leaf.path: leaf for leaf in old.leaves}

    def as_known(leaf: Leaf) -> Leaf:
        before = known.get(leaf.path)
        if before is None:
            return leaf
        rule = before.rule if before.region == leaf.region else leaf.rule
        return dataclasses.replace(leaf, group=before.group, rule=rule)

    leaves = tuple(map(as_known, plan.leaves))
    arenas = tuple(
        with_groups(layout, [leaves[i].group for i in layout.leaves]) for layout in plan.arenas
    )
    return dataclasses.replace(plan, leaves=leaves, arenas=arenas, groups=old.groups)


def _compute_dtypes(old: Static, plan: MemoryPlan) -> Dtypes:
    """Those that the leaves had; new leaves, and what an arena cannot give, are as given."""
    known = {}
    for layout, row in zip(old.plan.arenas, old.compute_dtypes, strict=True):
        for i, dtype in zip(layout.leaves, row, strict=True):
            leaf = old.plan.leaves[i]
            if dtype != leaf.dtype:
                known[leaf.path] = dtype
    rows = []
    for layout in plan.arenas:
        own = [plan.leaves[i] for i in layout.leaves]
        wanted = [known.get(leaf.path, leaf.dtype) for leaf in own]
        rows.append(
            tuple(
                dtype if dtype in leaf_dtypes(layout) else leaf.dtype
                for dtype, leaf in zip(wanted, own, strict=True)
            )
        )
    return tuple(rows)
