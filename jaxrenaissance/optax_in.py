"""A run that moves from optax to a `TrainState` in mid-training."""

import dataclasses
import functools
import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import packed, scalars, transform
from .foreign import check_optimizer
from .optax_states import (
    INJECTED,
    leaves_by_path,
    mapped,
    moments_in_optax,
    of_leaves,
    refuse_lars,
    refuse_traced,
    settable,
)
from .packed import listed
from .plan import MemoryPlan
from .step import Arenas, Buffers
from .train_state import TrainState
from .transform import Optimizer, State

logger = logging.getLogger("jaxrenaissance")


def from_optax(
    params: Any, opt_state: Any, optimizer: Optimizer, *, step: int | None = None, **options: Any
) -> TrainState:
    """A `TrainState` that goes on where an optax loop stands, within the rounding of float32.

    The moments are looked for, by the types of optax's states, inside `chain`, `masked`,
    `partition`, `inject_hyperparams`, `apply_if_finite` and `MultiSteps`, whose parts may each
    hold those of some leaves. With them come the count of updates, skipped steps, a running mean
    of `MultiSteps` (with `accumulate=`), and the present values of injected hyperparameters, for
    those that follow a schedule neither there nor here. A running mean that is not finite skips its
    cycle.

    What a state does not say, nobody can check: `optax.adam`, `adamw`, `nadam`, `adamax` and `lamb`
    share a state, as `optax.sgd` and `lars` do, and the `State` of this package's optimizers does
    not tell the momentum of `jr.sgd`, `jr.lars` and `jr.lion` apart. `MultiSteps` is taken to have
    its mean of gradients, not `use_grad_mean=False`.

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
            All that is not a moment or a count is its own: numbers, schedules, clipping. Where
            opt_state has a number that has no place in it, such as the scale of
            `reduce_on_plateau`, a warning through the package's logger names it.
        step: the updates made so far, for schedules to go on from, where opt_state has no count:
            `optax.sgd` and `optax.lars` under a constant learning rate have none. None: the count
            of opt_state, or else 0.
        **options: as in `TrainState.create`.

    Raises:
        TypeError: if the optimizer is not one of this package's, or something is traced.
        ValueError: if there are no moments for a trained leaf, two for one, or of another shape
            (names the paths); if there are other states for each leaf, or counts that differ; for
            `jr.lars` in its default form; for a running cycle without `accumulate=`; if arrays are
            sharded over devices, or of several members, made by `jax.vmap`.
    """
    check_optimizer(optimizer)
    refuse_traced(params, "from_optax", "params")
    refuse_traced(opt_state, "from_optax", "opt_state")
    if options.get("mesh") is None:
        packed.refuse_sharded(opt_state, "opt_state")
    spec = optimizer.spec
    state = TrainState.create(params, optimizer, **options)
    found = _Found(state)
    mapped(opt_state, found.look_at)
    series = _own_series(params, optimizer, found.own) if found.own else found.series()
    sign = 1 if found.own or found.kind is None else found.kind.sign
    arenas = [
        _packed(leaves, None, plan=state.plan, backend=spec.backend, negate=sign < 0)
        for leaves in _checked(state, series, "opt_state")
    ]
    ints = np.array(state.ints)
    ints[scalars.STEP] = found.step(step)
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
            means = leaves_by_path(found.multi.acc_grads)
            (leaves,) = _checked(state, [means], "opt_state: acc_grads")
            factor = micro * float(state.loss_scale)
            accumulator = _packed(
                leaves, factor, plan=state.plan, backend=spec.backend, negate=False
            )
            bad = _first_bad(state.plan, leaves, factor) if spec.skip_nonfinite else None
            if bad is not None:
                ints[[scalars.HAS_NAN, scalars.CYCLE_BAD]] = 1
                ints[scalars.LAST_BAD_LEAF] = bad
                ints[scalars.LAST_BAD_CALL] = calls - 1  # at the latest
    ints[scalars.CALLS] = calls
    state = dataclasses.replace(
        state,
        moments=tuple(zip(*arenas, strict=True)) if arenas else state.moments,
        accumulator=accumulator,
        ints=jnp.asarray(ints),
    )
    own = settable(spec)
    numbers: dict[str, Any] = {name: x for name, x in found.injected.items() if name in own}
    if numbers:
        state = state.replace_hyperparams(**numbers)
    found.tell_unused()
    if state.plan.placement is not None:
        scalars_on_mesh = state.plan.placement.put({"floats": state.floats, "ints": state.ints})
        return dataclasses.replace(state, **scalars_on_mesh)
    where = transform.placement((params, opt_state))
    if where is None:
        return state
    # Together, or else the second step compiles again.
    buffers = {name: jax.device_put(getattr(state, name), where) for name in Buffers._fields}
    return dataclasses.replace(state, **buffers)


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
        self.scales: list[float] = []
        self.multi: Any = None
        self.finite: Any = None

    def look_at(self, node: Any) -> Any:
        name = type(node).__name__
        self.names.append(name)
        if isinstance(node, State):
            self.own.append(node)
            self.counts[name] = _count_of(node.count, name)
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
            _count_of(node.mini_step, name)
            self.multi = node
            mapped(node.inner_opt_state, self.look_at)
            return node
        if isinstance(node, optax.ApplyIfFiniteState):
            _count_of(node.notfinite_count, name)
            self.finite = node
        elif isinstance(node, optax.contrib.ReduceLROnPlateauState):
            _count_of(node.count, name)
            self.scales.append(float(np.asarray(node.scale)))
        elif isinstance(node, INJECTED):
            self._inject(node)
            mapped(node.inner_state, self.look_at)
            return node
        else:
            self._refuse_other(node, name)
        return NotImplemented

    def _count(self, node: Any, name: str) -> None:
        count = _count_of(node.count, name)
        others = {known: n for known, n in self.counts.items() if n != count}
        if others:
            known, other = next(iter(others.items()))
            raise ValueError(
                f"opt_state: the counts differ, {other} in {known} and {count} in {name}, and a "
                "TrainState has one for all leaves and schedules"
            )
        self.counts[name] = count

    def _inject(self, node: Any) -> None:
        self.calls.append(_count_of(node.count, type(node).__name__))
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
        like = of_leaves(node, self.shapes)
        if like is None:
            return
        field, paths = like
        refuse_lars(self.spec, "optimizer")
        raise ValueError(
            f"opt_state: {name} has {field} for {listed([*map(repr, paths)])}, of which the "
            "optimizer has no use: it is that of another optimizer"
        )

    def series(self) -> list[dict[str, Any]]:
        """For each moment, what there is by path, with optax's sign."""
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
        return series

    def step(self, given: int | None) -> int:
        """The updates made: of the moments or schedules, as given, or as wrappers count."""
        if given is not None:
            given = _checked_step(given)
        if self.counts:
            name, count = next(iter(self.counts.items()))
            if given not in (None, count):
                raise ValueError(f"step: {given} was given, and {name} has counted {count}")
            return count
        if given is not None:
            return given
        if self.multi is not None:
            return int(self.multi.gradient_step)
        return next(iter(self.calls), 0)

    def tell_unused(self) -> None:
        """One warning about numbers that the optimizer has no place for."""
        unused = [
            f"{name} = {float(x):g}, which was injected"
            for name, x in self.injected.items()
            if name not in self.spec.names
        ]
        unused += [
            f"scale = {scale:g} of ReduceLROnPlateauState, by which the learning rate is to be "
            "multiplied"
            for scale in self.scales
            if scale != 1
        ]
        if unused:
            logger.warning("from_optax: the optimizer has no place for: %s", "; ".join(unused))


def _count_of(count: Any, name: str) -> int:
    if jnp.shape(count) != ():
        raise ValueError(
            f"opt_state: {name} holds {jnp.shape(count)} members, made by jax.vmap. Take one at a "
            "time: jax.tree.map(lambda x: x[0], (params, opt_state))"
        )
    return int(count)


def _checked_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step: expected an integer, got {step!r}") from None
    if number < 0:
        raise ValueError(f"step: expected the number of updates made, got {number}")
    return number


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
) -> list[list[Any]]:
    """For each series its arrays of the trained leaves, in the tree's order."""
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
    return [packed.on_mesh(plan, [own[leaf.path] for leaf in plan.leaves]) for own in series]


@functools.partial(jax.jit, static_argnames=("plan", "backend", "negate"))
def _packed(
    leaves: list[Any], factor: float | None, *, plan: MemoryPlan, backend: str, negate: bool
) -> Arenas:
    """The arenas of leaves in any float dtype, times a factor: one program for all of them."""
    wide = [
        jnp.asarray(x, plan.arenas[leaf.arena].dtype)
        for x, leaf in zip(leaves, plan.leaves, strict=True)
    ]
    if factor is not None:
        wide = [x * factor for x in wide]
    return packed.pack(plan, [-x for x in wide] if negate else wide, backend=backend)


def _first_bad(plan: MemoryPlan, leaves: Sequence[Any], factor: float) -> int | None:
    """The first leaf with a NaN or an infinity, by its position in the arenas; or None."""
    finite = np.asarray(_finite(leaves, factor, plan=plan))[packed.arena_order(plan)]
    return None if finite.all() else int(np.argmin(finite))


@functools.partial(jax.jit, static_argnames="plan")
def _finite(leaves: Sequence[Any], factor: float, *, plan: MemoryPlan) -> jax.Array:
    dtypes = [plan.arenas[leaf.arena].dtype for leaf in plan.leaves]
    wide = [jnp.asarray(x, dtype) * factor for x, dtype in zip(leaves, dtypes, strict=True)]
    return jnp.stack([jnp.isfinite(x).all() for x in wide])
