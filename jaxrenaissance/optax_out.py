"""A run that moves from a `TrainState` to optax in mid-training."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from . import packed, scalars, transform
from .check import Around, core_of
from .checkpoint import moments_of
from .optax_states import (
    ALL_STATES,
    INJECTED,
    Moments,
    is_of_a_schedule,
    leaves_by_path,
    mapped,
    moments_in_optax,
    of_leaves,
    refuse_lars,
    refuse_traced,
    settable,
)
from .packed import listed
from .paths import leaves_with_paths
from .planning import NO_TRUST
from .step import Arenas
from .train_state import TrainState
from .transform import Optimizer, Selection, State


def to_optax(state: TrainState | Around, tx: Any) -> tuple[Any, Any]:
    """Parameters and an optimizer's state, for a loop with optax to go on with.

    What tx has of its own stays as `tx.init` makes it: numbers that the state has not, the scale of
    `reduce_on_plateau`. A `chain` does not say which of this package's optimizers is in it, so that
    there nobody can tell the momentum of `jr.sgd`, `jr.lars` and `jr.lion` apart, nor `optax.sgd`
    from `optax.lars`, nor whether a `MultiSteps` inside of something else has the state's cycles.

    >>> import jax.numpy as jnp, optax
    >>> import jaxrenaissance as jr
    >>> state = jr.TrainState.create({"w": jnp.ones(2)}, jr.adam(0.1))
    >>> state = state.apply_gradients({"w": jnp.ones(2)})
    >>> params, opt_state = jr.to_optax(state, optax.adam(0.1))
    >>> int(optax.tree.get(opt_state, "count"))
    1

    Args:
        state: concrete, with one member; also one of `jaxrenaissance.flax`.
        tx: optax's for the same thing, or one of this package's. `tx.init(state.params)` is what
            is filled: moments, counts, skipped steps, the mean of a running cycle in
            `MultiSteps`, and injected hyperparameters.

    Returns:
        (params, opt_state): the parameters in full precision, in the dtypes that were given.

    Raises:
        TypeError: if the state is none, or traced, or tx is no optimizer.
        ValueError: if tx keeps no moments of a trained leaf, twice of one, or of another kind or
            shape, or something else for each leaf (names the paths); for `jr.lars` in its default
            form; for a running cycle where tx has no `MultiSteps`, or one of shorter cycles, or
            where the cycle is to be skipped; for `MultiSteps` with `use_grad_mean=False`.
    """
    state = core_of(state)
    if not isinstance(state, TrainState):
        raise TypeError(f"state: expected a TrainState, got a {type(state).__name__}")
    if state.ints.ndim != 1:
        raise ValueError(
            f"state: it holds {state.ints.shape[:-1]} members, made by jax.vmap. Take one at a "
            "time: jax.tree.map(lambda x: x[0], state)"
        )
    refuse_traced(state.ints, "to_optax", "state")
    _check_tx(state, tx)
    params = state.params
    filler = _Filler(state)
    opt_state = mapped(tx.init(params), filler.fill)
    filler.check()
    where = transform.placement(state.ints)
    if where is not None:  # Together, or else the second step compiles again.
        opt_state = jtu.tree_map(lambda x: _placed(x, where), opt_state)
    return params, opt_state


def _placed(x: Any, where: Any) -> Any:
    is_free = isinstance(x, jax.Array) and not x.committed
    return jax.device_put(x, where) if is_free else x


def _check_tx(state: TrainState, tx: Any) -> None:
    """Raises for what can be told from tx alone."""
    init, update = getattr(tx, "init", None), getattr(tx, "update", None)
    if isinstance(tx, type) or not (callable(init) and callable(update)):
        what = repr(tx)
        if callable(tx):
            name = getattr(tx, "__name__", type(tx).__name__)
            what = f"{name}, which makes one: {name}(…)"
        raise TypeError(f"tx: expected an optimizer, such as optax.adam(1e-3), got {what}")
    if isinstance(tx, Optimizer) and moments_of(tx.spec) != moments_of(state.spec):
        raise ValueError(
            f"tx: its moments are of another kind, {moments_of(tx.spec) or 'none'}, and those of "
            f"the state are {moments_of(state.spec) or 'none'}"
        )
    multi = getattr(update, "__self__", None)
    if not isinstance(multi, optax.MultiSteps):
        return
    if not getattr(multi, "_use_grad_mean", True):
        raise ValueError(
            "tx: its MultiSteps has use_grad_mean=False, and the state takes the mean of a cycle. "
            "Divide the learning rate there instead"
        )
    ints = np.asarray(state.ints)
    every = getattr(multi, "_every_k_schedule", None)
    micro = ints[scalars.MICRO]
    if every is not None and micro >= (length := int(every(ints[scalars.STEP]))):
        raise ValueError(
            f"tx: the cycles of its MultiSteps are of {length} micro-batches, and the state has "
            f"added up {micro} of {ints[scalars.EVERY]}"
        )


class _Filler:
    """Writes what a `TrainState` holds into a new state of optax's."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.ints = np.asarray(state.ints)
        self.kind = moments_in_optax(state.spec)
        series = [tuple(own[k] for own in state.moments) for k in range(state.spec.config.moments)]
        self.series = [self._by_path(arenas) for arenas in series]
        self.shapes = {leaf.path: leaf.shape for leaf in state.plan.leaves}
        self.covered: list[str] = []
        self.has_multi = False

    def fill(self, node: Any) -> Any:
        if isinstance(node, State):
            return self._own(node)
        if self.kind is not None and isinstance(node, self.kind.state):
            return self._moments(node, self.kind)
        if isinstance(node, ALL_STATES):
            refuse_lars(self.state.spec, "state")
            paths = [repr(path) for tree in node for path in leaves_by_path(tree) if path]
            raise ValueError(
                f"tx: it keeps {type(node).__name__} for {listed(paths)}, and the state is that of "
                f"{self.state.spec.kind}"
            )
        if isinstance(node, INJECTED):
            return self._injected(node)
        if isinstance(node, optax.MultiStepsState):
            return self._multi(node)
        if isinstance(node, optax.ApplyIfFiniteState):
            return node._replace(
                notfinite_count=jnp.asarray(self.ints[scalars.CONSECUTIVE_SKIPS]),
                last_finite=jnp.asarray(self.ints[scalars.CONSECUTIVE_SKIPS] == 0),
                total_notfinite=jnp.asarray(self.ints[scalars.SKIPPED]),
                inner_state=mapped(node.inner_state, self.fill),
            )
        if is_of_a_schedule(node):
            return node._replace(count=self._count())
        like = of_leaves(node, self.shapes)
        if like is not None:
            field, paths = like
            raise ValueError(
                f"tx: {type(node).__name__} keeps {field} for {listed([*map(repr, paths)])}, of "
                "which the state has nothing: it is of another optimizer, or averages something"
            )
        return NotImplemented

    def check(self) -> None:
        """Raises if anything found no place."""
        if self.ints[scalars.MICRO] and not self.has_multi:
            raise ValueError(
                f"state: it has added up {self.ints[scalars.MICRO]} micro-batches of a cycle, and "
                "tx has no optax.MultiSteps to go on with them"
            )
        if self.ints[scalars.CYCLE_BAD]:
            raise ValueError(
                "state: a gradient of its running cycle was not finite, so the cycle is to be "
                "skipped. optax.MultiSteps keeps a mean that is not finite for ever; switch after "
                "a whole cycle"
            )
        if self.series:
            missing = [
                repr(leaf.path) for leaf in self.state.plan.leaves if leaf.path not in self.covered
            ]
            if missing:
                refuse_lars(self.state.spec, "state")
                raise ValueError(
                    f"tx: it keeps no moments of {self.state.spec.kind} for {listed(missing)}"
                )

    def _count(self) -> jax.Array:
        return jnp.array(self.ints[scalars.STEP])  # one each, since a state may be donated

    def _by_path(self, arenas: Arenas) -> dict[str, Any]:
        plan = self.state.plan
        leaves = packed.unpack(
            plan, arenas, packed.arena_dtypes(plan), backend=self.state.spec.backend
        )
        return {leaf.path: x for leaf, x in zip(plan.leaves, leaves, strict=True)}

    def _moments(self, node: Any, kind: Moments) -> Any:
        new: dict[str, Any] = {}
        for field, known in zip(kind.fields, self.series, strict=True):
            new[field] = _filled(getattr(node, field), known, kind.sign)
        paths = [
            path for path in leaves_by_path(getattr(node, kind.fields[0])) if path in self.shapes
        ]
        twice = [repr(path) for path in paths if path in self.covered]
        if twice:
            raise ValueError(f"tx: it keeps two {type(node).__name__} for {listed(twice)}")
        self.covered += paths
        if "count" in node._fields:
            new["count"] = self._count()
        return node._replace(**new)

    def _own(self, node: State) -> State:
        self.covered += self.shapes
        plan = transform.build_plan(self.state.params, Selection(None, NO_TRUST, ()))
        values = [[known[leaf.path] for leaf in plan.leaves] for known in self.series]
        packed.refuse_sharded(values, "state")
        arenas = [packed.pack(plan, own, backend=self.state.spec.backend) for own in values]
        mu, nu = (*arenas, (), ())[:2]
        if jtu.tree_map(jnp.shape, (mu, nu)) != jtu.tree_map(jnp.shape, (node.mu, node.nu)):
            raise ValueError(
                "tx: the moments of its State are of other leaves, or of another kind, than those "
                "of the state; masked or partitioned, this package's optimizers cannot be filled"
            )
        return State(self._count(), mu, nu)

    def _injected(self, node: Any) -> Any:
        scheduled = getattr(node, "hyperparams_states", {})
        # Of a schedule it is the value that was last used; before the first call there is none.
        called = self.ints[scalars.CALLS] > 0
        names = set(self.state.spec.names) if called else settable(self.state.spec)
        own = self.state.metrics
        new = {
            name: jnp.asarray(own[name], jnp.asarray(value).dtype) if name in names else value
            for name, value in node.hyperparams.items()
        }
        more = {} if not scheduled else {"hyperparams_states": mapped(scheduled, self.fill)}
        inner = mapped(node.inner_state, self.fill)
        return node._replace(count=self._count(), hyperparams=new, inner_state=inner, **more)

    def _multi(self, node: Any) -> Any:
        self.has_multi = True
        micro = self.ints[scalars.MICRO]
        acc_grads = node.acc_grads
        if micro:
            factor = 1 / (int(micro) * float(self.state.loss_scale))
            acc_grads = _filled(acc_grads, self._by_path(self.state.accumulator), factor)
        return node._replace(
            mini_step=jnp.asarray(micro),
            gradient_step=self._count(),
            inner_opt_state=mapped(node.inner_opt_state, self.fill),
            acc_grads=acc_grads,
        )


def _filled(tree: Any, known: Mapping[str, Any], factor: float) -> Any:
    """The tree with the leaves that are known, times a factor, in its own dtypes."""
    leaves, treedef = jtu.tree_flatten(tree)
    places = {i: path for i, (path, _) in enumerate(leaves_with_paths(tree)) if path in known}
    for i, path in places.items():
        got, wanted = jnp.shape(leaves[i]), known[path].shape
        if got != wanted:
            raise ValueError(f"tx: {path!r} has shape {got}, wanted {wanted}")
    new = [known[path] for path in places.values()]
    dtypes = tuple(np.dtype(leaves[i].dtype) for i in places)
    if factor != 1 or dtypes != tuple(x.dtype for x in new):
        new = _scaled(new, factor, dtypes=dtypes)
    for i, x in zip(places, new, strict=True):
        leaves[i] = x
    return treedef.unflatten(leaves)


@functools.partial(jax.jit, static_argnames=("dtypes",))
def _scaled(leaves: list[Any], factor: float, *, dtypes: tuple[np.dtype, ...]) -> list[Any]:
    return [(x * factor).astype(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
