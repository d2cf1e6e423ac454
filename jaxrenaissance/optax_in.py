"""A run that moves from optax to a `TrainState` in mid-training."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import packed, scalars, transform
from .averages import widened
from .foreign import check_optimizer
from .optax_states import (
    INJECTED,
    leaves_by_path,
    mapped,
    moments_in_optax,
    refuse_lars,
    settable,
)
from .packed import listed
from .train_state import TrainState
from .transform import Optimizer, State


def from_optax(params: Any, opt_state: Any, optimizer: Optimizer, **options: Any) -> TrainState:
    """A `TrainState` that goes on where an optax loop stands, within the rounding of float32.

    The moments are looked for, by the types of optax's states, inside `chain`, `masked`,
    `partition`, `inject_hyperparams`, `apply_if_finite` and `MultiSteps`, whose parts may each
    hold those of some leaves. With them come the count of updates, skipped steps, a running mean
    of `MultiSteps` (with `accumulate=`), and the present values of injected hyperparameters, for
    those that follow a schedule neither there nor here.

    >>> import jax, jax.numpy as jnp, optax
    >>> import jaxrenaissance as jr
    >>> params = {"w": jnp.ones(2), "b": jnp.zeros(())}
    >>> tx = optax.adamw(0.1, weight_decay=0.01)
    >>> updates, opt_state = tx.update(params, tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> optimizer = jr.adamw(0.1, weight_decay=0.01, mask=True)
    >>> state = jr.from_optax(params, opt_state, optimizer)
    >>> int(state.step)
    1

    Args:
        params: the parameters now.
        opt_state: the optimizer's state now; also the `State` of this package's optimizers.
        optimizer: this package's for the same thing, with `mask=True` where optax's had no mask.
            All that is not a moment or a count is its own: numbers, schedules, clipping.
        **options: as in `TrainState.create`.

    Raises:
        TypeError: if the optimizer is not one of this package's.
        ValueError: if there are no moments for a trained leaf, two for one, or of another shape
            (names the paths); if there are other states for each leaf, or counts that differ; for
            `jr.lars` in its default form; for a running cycle without `accumulate=`.
    """
    check_optimizer(optimizer)
    spec = optimizer.spec
    state = TrainState.create(params, optimizer, **options)
    found = _Found(state)
    mapped(opt_state, found.look_at)
    series = _own_series(params, optimizer, found.own) if found.own else found.series()
    arenas = [
        packed.pack(state.plan, leaves, backend=spec.backend)
        for leaves in _checked(state, series, "opt_state")
    ]
    ints = np.array(state.ints)
    ints[scalars.STEP] = found.step()
    if found.finite is not None:
        ints[scalars.SKIPPED] = found.finite.total_notfinite
        ints[scalars.CONSECUTIVE_SKIPS] = found.finite.notfinite_count
    calls = ints[scalars.STEP] + ints[scalars.SKIPPED]
    accumulator = state.accumulator
    if found.multi is not None:
        micro = int(found.multi.mini_step)
        every = int(ints[scalars.EVERY])
        if micro >= every:
            raise ValueError(
                f"opt_state: MultiSteps has added up {micro} micro-batches of a cycle, and the "
                f"optimizer's cycles are of {every}; use accumulate=jr.Accumulate(…), or switch "
                "after a whole cycle"
            )
        ints[scalars.MICRO] = micro
        calls = calls * every + micro
        if micro:
            factor = micro * float(state.loss_scale)
            sums = {
                path: widened(x) * factor
                for path, x in leaves_by_path(found.multi.acc_grads).items()
            }
            (leaves,) = _checked(state, [sums], "opt_state: acc_grads")
            accumulator = packed.pack(state.plan, leaves, backend=spec.backend)
    ints[scalars.CALLS] = calls
    state = dataclasses.replace(
        state,
        moments=tuple(zip(*arenas, strict=True)) if arenas else state.moments,
        accumulator=accumulator,
        ints=jnp.asarray(ints),
    )
    own = settable(spec)
    numbers: dict[str, Any] = {name: x for name, x in found.injected.items() if name in own}
    return state.replace_hyperparams(**numbers) if numbers else state


class _Found:
    """What there is in a state of optax's that a `TrainState` has, too."""

    def __init__(self, state: TrainState) -> None:
        self.spec = state.spec
        self.shapes = {leaf.path: leaf.shape for leaf in state.plan.leaves}
        self.kind = moments_in_optax(state.spec)
        self.moments: list[Any] = []
        self.own: list[State] = []
        self.names: list[str] = []
        self.counts: dict[str, int] = {}
        self.calls: list[int] = []
        self.injected: dict[str, float] = {}
        self.multi: Any = None
        self.finite: Any = None

    def look_at(self, node: Any) -> Any:
        name = type(node).__name__
        self.names.append(name)
        if isinstance(node, State):
            self.own.append(node)
            self.counts[name] = int(node.count)
            return node
        if self.kind is not None and isinstance(node, self.kind.state):
            self.moments.append(node)
            if "count" in node._fields:
                self._count(node, name)
            return node
        if isinstance(node, optax.ScaleByScheduleState):
            self._count(node, name)
            return node
        if isinstance(node, optax.MultiStepsState):
            if self.multi is not None:
                raise ValueError("opt_state: there are two states of MultiSteps")
            self.multi = node
            mapped(node.inner_opt_state, self.look_at)
            return node
        if isinstance(node, optax.ApplyIfFiniteState):
            self.finite = node
        elif isinstance(node, INJECTED):
            self._inject(node)
            mapped(node.inner_state, self.look_at)
            return node
        else:
            self._refuse_other(node, name)
        return NotImplemented

    def _count(self, node: Any, name: str) -> None:
        count = int(node.count)
        others = {known: n for known, n in self.counts.items() if n != count}
        if others:
            known, other = next(iter(others.items()))
            raise ValueError(
                f"opt_state: the counts differ, {other} in {known} and {count} in {name}, and a "
                "TrainState has one for all leaves and schedules"
            )
        self.counts[name] = count

    def _inject(self, node: Any) -> None:
        self.calls.append(int(node.count))
        scheduled = getattr(node, "hyperparams_states", {})
        for name, value in node.hyperparams.items():
            if name in scheduled:
                continue
            if self.injected.get(name, value) != value:
                raise ValueError(
                    f"opt_state: two different values are injected for {name}: "
                    f"{self.injected[name]} and {value}. Give groups= to the optimizer, and inject "
                    "nothing"
                )
            self.injected[name] = value

    def _refuse_other(self, node: Any, name: str) -> None:
        for field, tree in zip(node._fields, node, strict=True):
            paths = [
                path
                for path, x in leaves_by_path(tree).items()
                if np.shape(x) and self.shapes.get(path) == np.shape(x)
            ]
            if paths:
                refuse_lars(self.spec, "optimizer")
                raise ValueError(
                    f"opt_state: {name} has {field} for {listed([*map(repr, paths)])}, of which "
                    "the optimizer has no use: it is that of another optimizer"
                )

    def series(self) -> list[dict[str, Any]]:
        """For each moment, what there is by path."""
        refuse_lars(self.spec, "optimizer")
        fields = () if self.kind is None else self.kind.fields
        series: list[dict[str, Any]] = [{} for _ in fields]
        for node in self.moments:
            for known, field in zip(series, fields, strict=True):
                new = leaves_by_path(getattr(node, field))
                twice = [repr(path) for path in new if path in known]
                if twice:
                    raise ValueError(
                        f"opt_state: there are two {type(node).__name__} with {field} for "
                        f"{listed(twice)}"
                    )
                known.update(new)
        if self.kind is not None and not self.moments:
            raise ValueError(
                f"opt_state: found no {self.kind.state.__name__}, which has the moments of this "
                f"optimizer, among {', '.join(dict.fromkeys(self.names)) or 'no states'}"
            )
        sign = 1 if self.kind is None else self.kind.sign
        return series if sign == 1 else [{k: -x for k, x in own.items()} for own in series]

    def step(self) -> int:
        """The updates made: of the moments or schedules, or else as their wrappers count."""
        if self.counts:
            return next(iter(self.counts.values()))
        if self.multi is not None:
            return int(self.multi.gradient_step)
        return next(iter(self.calls), 0)


def _own_series(params: Any, optimizer: Optimizer, states: Sequence[State]) -> list[dict[str, Any]]:
    """The moments by path, from a `State` of this package's optimizers."""
    plan = transform.build_plan(params, optimizer.selection)
    series = [arenas for arenas in (states[0].mu, states[0].nu) if arenas]
    shapes = [tuple((arena.size,) for arena in plan.arenas)] * optimizer.spec.config.moments
    if len(states) > 1 or [tuple(jnp.shape(x) for x in arenas) for arenas in series] != shapes:
        raise ValueError(
            "opt_state: the moments of its State are of other leaves, or of another kind, than "
            "those of the optimizer; what was masked or partitioned cannot be taken over"
        )
    dtypes = packed.arena_dtypes(plan)
    unpacked = [packed.unpack(plan, x, dtypes, backend=optimizer.spec.backend) for x in series]
    return [{leaf.path: x for leaf, x in zip(plan.leaves, own, strict=True)} for own in unpacked]


def _checked(
    state: TrainState, series: Sequence[Mapping[str, Any]], argument: str
) -> list[list[jax.Array]]:
    """For each series its arrays of the trained leaves, in the tree's order and arenas' dtypes."""
    plan, known = state.plan, set(packed.all_paths(state.plan))
    faults = [
        f"{path!r} is not a leaf of the parameters"
        for path in dict.fromkeys(path for own in series for path in own)
        if path not in known
    ]
    for own in series:
        for leaf in plan.leaves:
            shape = jnp.shape(own[leaf.path]) if leaf.path in own else None
            if shape is None:
                faults.append(f"there are no moments for {leaf.path!r}")
            elif shape != leaf.shape:
                faults.append(f"{leaf.path!r} has shape {shape}, wanted {leaf.shape}")
    if faults:
        raise ValueError(f"{argument}: {listed(list(dict.fromkeys(faults)))}")
    return [
        [jnp.asarray(own[leaf.path], plan.arenas[leaf.arena].dtype) for leaf in plan.leaves]
        for own in series
    ]
