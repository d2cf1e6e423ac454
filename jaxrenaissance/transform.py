"""Optimizer: what the factories return, and optax's contract on top of the ops."""

import functools
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from . import hyperparams, packed, scalars
from .accumulation import Accumulate
from .groups import Group
from .hyperparams import Numbers
from .options import Options, resolve
from .paths import is_function, leaves_with_paths
from .plan import MemoryPlan
from .planning import NO_TRUST
from .spec import Identity, Spec, fingerprint
from .step import Buffers, changes, scalar_dtype

logger = logging.getLogger("jaxrenaissance")

_PLANS_KEPT = 64


class State(NamedTuple):
    """What an `Optimizer` keeps under optax's contract.

    For `optax.tree_map_params` it has no parameters, since arenas are not like the tree. An empty
    tree has one empty arena, as it must there.

    Attributes:
        count: int32 scalar, the updates made.
        mu: first moments, one 1-D array an arena; () where the optimizer has none.
        nu: second moments, likewise.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]: optax's name
    mu: tuple[jax.Array, ...]
    nu: tuple[jax.Array, ...]


class Selection(NamedTuple):
    """Which leaves have what, as it was given.

    Attributes:
        mask: which have weight decay.
        trust_ratio_mask: which have a trust ratio; `planning.NO_TRUST` for an optimizer without.
        groups: those with hyperparameters of their own.
    """

    mask: Any
    trust_ratio_mask: Any
    groups: tuple[Group, ...]

    def resolved(self, tree: Any) -> "Selection":
        """With functions of the parameters called; they see these themselves, as in optax."""
        mask, trust = (mask(tree) if is_function(mask) else mask for mask in self[:2])
        return Selection(mask, trust, self.groups)

    def key(self) -> Any:
        """Equal where the same leaves are chosen, in groups of the same names."""
        groups = tuple((group.name, fingerprint(group.match)) for group in self.groups)
        return fingerprint(self.mask), fingerprint(self.trust_ratio_mask), groups


@jtu.register_static
class Optimizer(optax.GradientTransformationExtraArgs):
    """An optimizer: for `TrainState`, which updates in place, and for all that take optax's.

    Equal are optimizers of equal spec, masks, groups and numbers. A state keeps the spec in its
    structure and the numbers in its scalars, so that optimizers which differ in numbers alone share
    every compiled program.

    In an optax loop it stands where optax's optimizer stood:

    >>> import jax.numpy as jnp, optax
    >>> import jaxrenaissance as jr
    >>> tx = optax.chain(optax.clip(1.0), jr.sgd(0.5, momentum=0.9))
    >>> params = {"w": jnp.ones(2)}
    >>> updates, state = tx.update({"w": jnp.full(2, 3.0)}, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["w"].tolist()
    [0.5, 0.5]

    Attributes:
        init: params → `State`.
        update: (updates, state, params) → (updates, state), as optax has it. `params + updates` is
            a pass of its own there; `TrainState` needs none. What only works in place (an average
            of the weights, loss scaling, accumulation, metrics) is an error there. Updates have the
            dtypes that optax's have; without params, the gradients' stand for the parameters'.
        spec: kind, structural options and schedules.
        numbers: all that is a number and not scheduled.
        selection: which leaves have weight decay, trust ratios and hyperparameters of their own.
    """

    spec: Spec
    numbers: Numbers
    selection: Selection

    def __new__(cls, spec: Spec, numbers: Numbers, selection: Selection) -> "Optimizer":
        """See `make_optimizer`, which checks."""
        self = super().__new__(
            cls,
            functools.partial(_init, spec, selection),
            functools.partial(_update, spec, numbers, selection),
        )
        self.spec, self.numbers, self.selection = spec, numbers, selection
        return self

    def _key(self) -> Any:
        values, groups, loss_scale, every = self.numbers
        # Traced values do not compare.
        numbers = [
            x if isinstance(x, float) else Identity(x)
            for own in (values, *groups)
            for x in own.values()
        ]
        return self.spec, tuple(numbers), loss_scale, every, self.selection.key()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Optimizer) and self._key() == other._key()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.spec)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.spec, self.numbers, self.selection

    def __repr__(self) -> str:
        values = {**self.numbers.values, **dict(self.spec.schedules)}
        if self.numbers.loss_scale is not None:
            values["loss_scale"] = self.numbers.loss_scale
        named = [f"{name}={_shown(values[name])}" for name in self.spec.names]
        if self.spec.accumulate:
            named.append(f"accumulate={Accumulate(self.numbers.every)!r}")
        if self.selection.groups:
            named.append(f"groups={list(self.selection.groups)!r}")
        return f"{self.spec.kind}({', '.join(named)})"


def make_optimizer(
    kind: str,
    update: str,
    values: Mapping[str, Any],
    options: Options,
    *,
    decoupled: bool,
    trust: str | None = None,
    trust_ratio_mask: Any = NO_TRUST,
    mask_argument: str = "mask",
) -> Optimizer:
    """What every factory ends with: checks the arguments and makes the optimizer.

    Args:
        kind: the factory's name.
        update: the kind of `ops.update`.
        values: its own hyperparameters in the signature's order: numbers or schedules.
        options: the arguments that all factories have.
        decoupled: whether weight decay is.
        trust: whose trust ratios it has, as in `Spec`.
        trust_ratio_mask: which leaves have one, where any have.
        mask_argument: what the factory calls the mask of weight decay.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _check_mask(mask_argument, options.mask)
    spec, numbers = resolve(kind, update, values, options, decoupled=decoupled, trust=trust)
    if options.mask is None and _may_decay(numbers.values):
        _note_default_mask("weight decay leaves", mask_argument, "decays every leaf")
    if trust is not None:
        _check_mask("trust_ratio_mask", trust_ratio_mask)
        if trust_ratio_mask is None:
            _note_default_mask(
                "trust ratios leave", "trust_ratio_mask", "gives every leaf a trust ratio"
            )
    selection = Selection(options.mask, trust_ratio_mask, tuple(options.groups))
    return Optimizer(spec, numbers, selection)


def _check_mask(argument: str, mask: Any) -> None:
    # A tree is compared with the parameters, later.
    if isinstance(mask, str) and mask != "weights":
        raise ValueError(f'{argument}: expected None, "weights", bools or a function, got {mask!r}')


def _decays(spec: Spec, numbers: Numbers) -> bool:
    """Whether any leaf may have weight decay."""
    groups = zip(spec.groups, numbers.groups, strict=True)
    return _may_decay(numbers.values) or any(
        "weight_decay" in group.names and _may_decay(own) for group, own in groups
    )


def _may_decay(values: hyperparams.Values) -> bool:
    # Scheduled, or a value that only the device knows: as if it were not zero.
    value = values.get("weight_decay")
    return not (isinstance(value, float) and value == 0)


@functools.cache
def _note_default_mask(leaves: str, argument: str, all_of_them: str) -> None:
    logger.warning(
        f"{leaves} biases and norm scales alone, unlike optax's default. "
        f'{argument}="weights" says so explicitly, {argument}=True {all_of_them} as optax does.'
    )


def _shown(value: Any) -> str:
    if isinstance(value, jax.Array):
        return f"<{value.dtype} scalar>"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def build_plan(tree: Any, selection: Selection, **options: Any) -> MemoryPlan:
    """The plan of a tree of parameters, whose dtypes are those that JAX would give them."""
    chosen = selection.resolved(tree)._asdict()
    return MemoryPlan.build(packed.canonical(tree), **chosen, **options)


_plans: dict[Any, MemoryPlan] = {}


def _cached_plan(tree: Any, selection: Selection) -> MemoryPlan:
    # A function may look at more than shapes, so its answer is part of the key.
    selection = selection.resolved(tree)
    leaves, treedef = jtu.tree_flatten(packed.canonical(tree))
    avals = tuple((getattr(x, "shape", None), getattr(x, "dtype", type(x))) for x in leaves)
    key = (treedef, avals, selection.key())
    plan = _plans.get(key)
    if plan is None:
        _check_floats(tree)
        plan = build_plan(tree, selection)
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        _plans[key] = plan
    return plan


def _check_floats(tree: Any) -> None:
    """Raises for what optax's contract has to leave out; `TrainState` has `trainable=` for it."""
    for path, leaf in leaves_with_paths(tree):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            what = f"is a {type(leaf).__name__}" if dtype is None else f"has dtype {dtype}"
            raise ValueError(
                f"params: the leaf {path!r} {what}, and an arena holds float arrays alone. "
                "Leave it out with optax.masked or optax.partition; for a model of "
                "Equinox with eqx.filter(model, eqx.is_inexact_array)"
            )


def _refuse_in_place(spec: Spec) -> None:
    """Raises for options that optax's contract has no place for."""
    options = {
        "ema_decay": spec.ema,
        "loss_scale": spec.loss_scale,
        "accumulate": spec.accumulate,
        "metrics": bool(spec.metrics),
    }
    for option, is_given in options.items():
        if is_given:
            raise ValueError(
                f"{option}: works in place alone, in jr.TrainState.create(params, optimizer); "
                "optax's init and update have no place for it"
            )


def _init(spec: Spec, selection: Selection, params: Any) -> State:
    _refuse_in_place(spec)
    packed.refuse_sharded(params, "params")
    arenas = _arenas(_cached_plan(params, selection))
    zeros = functools.partial(jnp.zeros, device=placement(params))
    moments = [tuple(zeros(*arena) for arena in arenas) for _ in range(spec.config.moments)]
    mu, nu = (*moments, (), ())[:2]
    return State(zeros((), jnp.int32), mu, nu)


def _arenas(plan: MemoryPlan) -> list[tuple[int, np.dtype]]:
    """Size and dtype of each array of a series of moments.

    Without parameters one that is empty: so an empty tree gives a state of the usual structure,
    which `optax.tree_map_params` makes use of.
    """
    return [(x.size, x.dtype) for x in plan.arenas] or [(0, np.dtype("float32"))]


def placement(params: Any) -> Sharding | None:
    """Where the parameters were put, or None where that is left to JAX.

    A state that starts elsewhere moves with the first update, and then the second one compiles.
    """
    for leaf in jtu.tree_leaves(params):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed:
            sharding = leaf.sharding
            if isinstance(sharding, NamedSharding):  # Its spec is of the leaf's rank.
                return NamedSharding(sharding.mesh, PartitionSpec())
            return sharding
    return None


def _update(
    spec: Spec,
    numbers: Numbers,
    selection: Selection,
    updates: Any,
    state: Any,
    params: Any = None,
    **extra_args: Any,
) -> tuple[Any, State]:
    _refuse_in_place(spec)
    looks_at_weights = spec.trust is not None or _decays(spec, numbers)
    if params is None and looks_at_weights:
        what = "weight decay needs" if spec.trust is None else "trust ratios need"
        raise ValueError(f"params: {what} them: update(updates, state, params)")
    packed.refuse_sharded(updates, "updates")
    packed.refuse_sharded(params, "params")
    plan = _cached_plan(updates if params is None else params, selection)
    _check_state(spec, plan, state)
    gradients = packed.match(plan, packed.canonical(updates), "updates")
    weights = packed.match(plan, packed.canonical(params), "params") if looks_at_weights else None
    # What sums up the squares of weights does so in arenas.
    arenas = packed.pack(plan, weights, backend=spec.backend) if spec.trust and weights else ()
    with_weights = looks_at_weights or spec.config.moments > 0
    moments = tuple(zip(*(series for series in (state.mu, state.nu) if series), strict=True))
    floats = hyperparams.initial_floats(spec, numbers, plan.num_groups, scalar_dtype(plan))
    ints = jnp.asarray(scalars.initial_ints()).at[scalars.STEP].set(state.count)
    new, leaves = changes(
        spec,
        plan,
        Buffers(
            weights=arenas,
            moments=moments or ((),) * len(plan.arenas),
            ema=(),
            accumulator=(),
            norms=(),
            ratios=(),
            floats=jnp.asarray(floats),
            ints=ints,
        ),
        gradients,
        weights,
        dtypes=_update_dtypes(plan, gradients, with_weights=with_weights),
    )
    mu, nu = state.mu, state.nu
    if plan.arenas:
        mu, nu = (*zip(*new.moments, strict=True), (), ())[:2]
    return plan.treedef.unflatten(leaves), State(new.ints[scalars.STEP], tuple(mu), tuple(nu))


def _check_state(spec: Spec, plan: MemoryPlan, state: Any) -> None:
    """Raises a ValueError unless it is like what `_init` returns for these parameters."""
    for number, name in enumerate(("mu", "nu")):
        arenas = _arenas(plan) if number < spec.config.moments else []
        wanted = [f"{dtype}[{size}]" for size, dtype in arenas]
        series = getattr(state, name, None)
        got = None if series is None else [f"{x.dtype}{[*x.shape]}" for x in series]
        if got != wanted:
            raise ValueError(
                f"state: {name} is {got}, wanted {wanted}. Give the state that init(params) of an "
                "optimizer of this kind returned for these parameters"
            )


def _update_dtypes(plan: MemoryPlan, gradients: Any, *, with_weights: bool) -> packed.Dtypes:
    """The dtypes of optax's updates: what gradient and parameter are promoted to.

    Where neither weights nor moments, which optax keeps in the parameter's dtype, have a part in
    the update, it has the gradient's.
    """

    def dtype(i: int) -> np.dtype:
        given = np.dtype(gradients[i].dtype)
        return np.dtype(jnp.promote_types(plan.leaves[i].dtype, given)) if with_weights else given

    return tuple(tuple(map(dtype, arena.leaves)) for arena in plan.arenas)
