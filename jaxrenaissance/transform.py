"""Optimizer: what the factories return, and optax's contract on top of the ops."""

import functools
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from . import backends, hyperparams, ops, packed, scalars
from .paths import is_function
from .plan import MemoryPlan
from .spec import Identity, Schedule, Spec, fingerprint

logger = logging.getLogger("jaxrenaissance")

_PLANS_KEPT = 64


class State(NamedTuple):
    """What an `Optimizer` keeps under optax's contract.

    Attributes:
        count: int32 scalar, the updates made.
        mu: first moments, one 1-D array an arena; () where the optimizer has none.
        nu: second moments, likewise.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]: optax's name
    mu: tuple[jax.Array, ...]
    nu: tuple[jax.Array, ...]


@jtu.register_static
class Optimizer(optax.GradientTransformationExtraArgs):
    """An optimizer: for `TrainState`, which updates in place, and for all that take optax's.

    Equal are optimizers of equal spec, mask and numbers. A state keeps the spec in its structure
    and the numbers in its scalars, so that optimizers which differ in numbers alone share every
    compiled program.

    Attributes:
        init: params → `State`.
        update: (updates, state, params) → (updates, state), as optax has it. `params + updates` is
            a pass of its own there; `TrainState` needs none.
        spec: kind, structural options and schedules.
        numbers: the hyperparameters that are not scheduled.
        mask: which leaves have weight decay, as it was given.
    """

    spec: Spec
    numbers: Mapping[str, float | jax.Array]
    mask: Any

    def __new__(
        cls, spec: Spec, numbers: Mapping[str, float | jax.Array], mask: Any
    ) -> "Optimizer":
        """See `make_optimizer`, which checks."""
        self = super().__new__(
            cls,
            functools.partial(_init, spec, mask),
            functools.partial(_update, spec, numbers, mask),
        )
        self.spec, self.numbers, self.mask = spec, dict(numbers), mask
        return self

    def _key(self) -> Any:
        numbers = [x if isinstance(x, float) else Identity(x) for x in self.numbers.values()]
        return self.spec, tuple(numbers), fingerprint(self.mask)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Optimizer) and self._key() == other._key()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.spec)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.spec, self.numbers, self.mask

    def __repr__(self) -> str:
        values = dict(self.numbers) | dict(self.spec.schedules)
        named = ", ".join(f"{name}={_shown(values[name])}" for name in self.spec.names)
        return f"{self.spec.kind}({named})"


def make_optimizer(
    kind: str,
    update: str,
    values: Mapping[str, Any],
    *,
    mask: Any,
    decoupled: bool,
    skip_nonfinite: bool,
    backend: str | None,
) -> Optimizer:
    """What every factory ends with: checks the arguments and makes the optimizer.

    Args:
        kind: the factory's name.
        update: the kind of `ops.update`.
        values: the hyperparameters in the signature's order: numbers or schedules.
        mask, decoupled, skip_nonfinite, backend: as in `adamw` and `sgd`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for name, value in (("decoupled", decoupled), ("skip_nonfinite", skip_nonfinite)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {value!r}")
    if isinstance(mask, str) and mask != "weights":
        raise ValueError(f'mask: expected None, "weights", bools or a function, got {mask!r}')
    schedules = {name: value for name, value in values.items() if callable(value)}
    for name, value in schedules.items():
        if name not in hyperparams.SCHEDULABLE:
            raise TypeError(
                f"{name}: expected a number, got {value!r}; schedules are taken for "
                f"{' and '.join(hyperparams.SCHEDULABLE)}"
            )
    numbers = {
        name: hyperparams.check_number(name, value)
        for name, value in values.items()
        if name not in schedules
    }
    spec = Spec(
        kind=kind,
        update=update,
        names=tuple(values),
        schedules=tuple((name, Schedule(value, name)) for name, value in schedules.items()),
        decoupled=decoupled,
        skip_nonfinite=skip_nonfinite,
        backend=backends.resolve(backend),
    )
    if mask is None and _decays(numbers):
        _note_default_mask()
    return Optimizer(spec, numbers, mask)


def _decays(numbers: Mapping[str, Any]) -> bool:
    # Scheduled, or a value that only the device knows: as if it were not zero.
    value = numbers.get("weight_decay")
    return not (isinstance(value, float) and value == 0)


@functools.cache
def _note_default_mask() -> None:
    logger.warning(
        "weight decay leaves biases and norm scales alone, unlike optax's default. "
        'mask="weights" says so explicitly, mask=True decays every leaf as optax does.'
    )


def _shown(value: Any) -> str:
    if isinstance(value, jax.Array):
        return f"<{value.dtype} scalar>"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def build_plan(tree: Any, mask: Any, **options: Any) -> MemoryPlan:
    """The plan of a tree of parameters, whose dtypes are those that JAX would give them."""
    if is_function(mask):
        mask = mask(tree)  # Sees the parameters themselves, as in optax.
    return MemoryPlan.build(packed.canonical(tree), mask=mask, **options)


_plans: dict[Any, MemoryPlan] = {}


def _cached_plan(tree: Any, mask: Any) -> MemoryPlan:
    if is_function(mask):
        mask = mask(tree)  # it may look at more than shapes, so its answer is part of the key
    leaves, treedef = jtu.tree_flatten(packed.canonical(tree))
    avals = tuple((getattr(x, "shape", None), getattr(x, "dtype", type(x))) for x in leaves)
    key = (treedef, avals, fingerprint(mask))
    plan = _plans.get(key)
    if plan is None:
        plan = build_plan(tree, mask)
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        _plans[key] = plan
    return plan


def _init(spec: Spec, mask: Any, params: Any) -> State:
    plan = _cached_plan(params, mask)
    moments = [
        tuple(jnp.zeros(arena.size, arena.dtype) for arena in plan.arenas)
        for _ in range(spec.config.moments)
    ]
    mu, nu = (*moments, (), ())[:2]
    return State(jnp.zeros((), jnp.int32), mu, nu)


def _update(
    spec: Spec,
    numbers: Mapping[str, Any],
    mask: Any,
    updates: Any,
    state: Any,
    params: Any = None,
    **extra_args: Any,
) -> tuple[Any, State]:
    decays = "weight_decay" in spec.names and _decays(numbers)
    if params is None and decays:
        raise ValueError("params: weight decay needs them: update(updates, state, params)")
    plan = _cached_plan(updates if params is None else params, mask)
    gradients = packed.match(plan, packed.canonical(updates), "updates")
    if decays:
        weights = packed.pack(
            plan, packed.match(plan, packed.canonical(params), "params"), backend=spec.backend
        )
    else:
        # From zero, the new weights are the update itself, not rounded as the weights are.
        weights = tuple(jnp.zeros(arena.size, arena.dtype) for arena in plan.arenas)
    moments = tuple(zip(*(series for series in (state.mu, state.nu) if series), strict=True))
    floats = hyperparams.initial_floats(spec, numbers, plan.num_groups, scalar_dtype(plan))
    ints = jnp.asarray(scalars.initial_ints()).at[scalars.STEP].set(state.count)
    new_weights, moments, _, ints = step(
        spec,
        plan,
        weights,
        moments or ((),) * len(plan.arenas),
        jnp.asarray(floats),
        ints,
        gradients,
    )
    changes = tuple(new - old for new, old in zip(new_weights, weights, strict=True))
    leaves = packed.unpack(plan, changes, packed.given_dtypes(plan), backend=spec.backend)
    mu, nu = (*(zip(*moments, strict=True) if plan.arenas else ()), (), ())[:2]
    return plan.treedef.unflatten(leaves), State(ints[scalars.STEP], tuple(mu), tuple(nu))


def scalar_dtype(plan: MemoryPlan) -> np.dtype:
    """The dtype of a state's float scalars: the widest of the arenas'."""
    return max(
        (arena.dtype for arena in plan.arenas),
        key=lambda d: d.itemsize,
        default=np.dtype("float32"),
    )


# Inlined into the caller's own jit; called from Python, it is one dispatch.
@jax.jit(static_argnums=(0, 1), inline=True)
def step(
    spec: Spec,
    plan: MemoryPlan,
    weights: tuple[jax.Array, ...],
    moments: tuple[tuple[jax.Array, ...], ...],
    floats: jax.Array,
    ints: jax.Array,
    gradients: list[Any],
) -> tuple[tuple[jax.Array, ...], tuple[tuple[jax.Array, ...], ...], jax.Array, jax.Array]:
    """One step over all arenas: statistics where wanted, schedules, prologue, one update an arena.

    Args:
        spec, plan: static.
        weights: the arenas.
        moments: for each arena its moments.
        floats, ints: the scalars.
        gradients: the trained leaves' in the tree's order, checked.

    Returns:
        The new weights, moments, floats and ints.
    """
    leaves = packed.by_arena(plan, gradients)
    if spec.skip_nonfinite:
        first_leaf = 0
        for layout, own in zip(plan.arenas, leaves, strict=True):
            ints = ops.statistics(layout, ints, own, first_leaf=first_leaf, backend=spec.backend)
            first_leaf += len(own)
    if spec.schedules:
        floats = hyperparams.follow_schedules(spec, floats, ints[scalars.STEP])
    floats, ints = ops.prologue(floats, ints, backend=spec.backend)
    new = [
        ops.update(spec.update, layout, floats, w, m, own, backend=spec.backend)
        for layout, w, m, own in zip(plan.arenas, weights, moments, leaves, strict=True)
    ]
    return tuple(w for w, _ in new), tuple(m for _, m in new), floats, ints
