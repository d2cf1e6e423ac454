"""TrainState: parameters, moments and scalars as a few device buffers."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from . import hyperparams, packed, scalars, transform
from .compute_dtypes import ComputeDtype, resolve
from .foreign import instead_of
from .ops.primitive import same_manual_axes
from .packed import Dtypes
from .paths import path_string
from .plan import MemoryPlan, Rules, Stacked
from .spec import Spec
from .static import Static
from .transform import Optimizer

_KEEP: Any = object()


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """A model being trained: its parameters, the optimizer's moments and scalars.

    A pytree of a few device buffers, however many parameters there are: a jitted, donated step
    costs the host tens of microseconds, and one launch updates everything in place. The leaves
    exist inside the step only. Make one by `create` or `init`; take gradients with respect to
    `compute_params`:

    >>> import jax, jax.numpy as jnp
    >>> import jaxrenaissance as jr
    >>> state = jr.TrainState.create({"w": jnp.zeros(3), "b": jnp.zeros(())}, jr.adam(0.1))
    >>> def loss_fn(params, x, y):
    ...     return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)
    >>> @jax.jit(donate_argnums=0)
    ... def train_step(state, x, y):
    ...     loss, grads = jax.value_and_grad(loss_fn)(state.compute_params, x, y)
    ...     state = state.apply_gradients(grads)
    ...     return state, {"loss": loss, **state.metrics}
    >>> state, metrics = train_step(state, jnp.eye(3), jnp.ones(3))
    >>> float(metrics["loss"]), int(state.step)
    (1.0, 1)

    Attributes:
        weights: one 1-D array an arena: [arena.size] in the arena's dtype.
        moments: for each arena its moments, arrays like the weights.
        floats: the float scalars, see `scalars`.
        ints: the counters, int32.
        frozen: the leaves that are not trained, in the tree's order, as they were given.
        extra: whatever else the step carries, for example a `Packed` of batch statistics.
        static: plan, spec and compute dtypes: no numbers, so that a new value compiles nothing.
    """

    weights: tuple[jax.Array, ...]
    moments: tuple[tuple[jax.Array, ...], ...]
    floats: jax.Array
    ints: jax.Array
    frozen: tuple[Any, ...]
    extra: Any
    static: Static = dataclasses.field(metadata={"static": True})

    @staticmethod
    def create(
        params: Any,
        optimizer: Optimizer,
        *,
        compute_dtype: ComputeDtype = None,
        rules: Rules | None = None,
        stacked: Stacked | None = None,
        trainable: Any = None,
        extra: Any = None,
        shards: int = 1,
    ) -> "TrainState":
        """A state that starts from these parameters, which are copied: the caller's arrays stay.

        Args:
            params: a tree of float arrays, or with `trainable` of any arrays.
            optimizer: made by this package's factories.
            compute_dtype: of the leaves of `compute_params`. None: as in `params`. The strings
                "bfloat16" and "float16": that dtype, and norm scales and biases as in `params`. A
                dtype: all leaves. A mapping from `Region`s or path patterns to dtypes: the first
                key that fits a leaf decides, and the others are as in `params`. Leaves that are not
                trained are always as given.
            rules, stacked, trainable, shards: see `MemoryPlan.build`.
            extra: a pytree of arrays, kept as `state.extra`.

        Raises:
            TypeError: if the optimizer is not one of this package's.
            ValueError: if a leaf cannot be trained, a pattern matches nothing, or arrays are
                sharded over devices; names the leaf's path and the argument.
        """
        _check_optimizer(optimizer)
        packed.refuse_sharded(params, "params")
        params = packed.canonical(params)
        plan = transform.build_plan(
            params, optimizer.mask, rules=rules, stacked=stacked, trainable=trainable, shards=shards
        )
        static = Static(plan, optimizer.spec, resolve(compute_dtype, plan))
        _check_frozen(plan, params)
        return _create(static, jtu.tree_leaves(params), extra, _initial_floats(plan, optimizer))

    @staticmethod
    def init(
        fn: Callable[[], Any],
        optimizer: Optimizer,
        *,
        has_extra: bool = False,
        compute_dtype: ComputeDtype = None,
        rules: Rules | None = None,
        stacked: Stacked | None = None,
        trainable: Any = None,
        shards: int = 1,
    ) -> "TrainState":
        """As `create(fn(), …)`, but made under jit, so that no second copy of the weights lives on.

        Args:
            fn: makes the parameters, `lambda: model.init(key, x)["params"]`.
            optimizer, compute_dtype, rules, stacked, trainable, shards: as in `create`.
            has_extra: whether fn returns a pair (params, extra).

        Raises:
            TypeError, ValueError: as `create`.
        """
        _check_optimizer(optimizer)
        shapes = jax.eval_shape(fn)
        if has_extra:
            if not (isinstance(shapes, tuple | list) and len(shapes) == 2):
                raise ValueError("has_extra: fn must return a pair (params, extra)")
            shapes = shapes[0]
        plan = transform.build_plan(
            shapes, optimizer.mask, rules=rules, stacked=stacked, trainable=trainable, shards=shards
        )
        static = Static(plan, optimizer.spec, resolve(compute_dtype, plan))

        def make(floats: jax.Array) -> TrainState:
            made = fn()
            params, extra = made if has_extra else (made, None)
            return _create(static, jtu.tree_leaves(params), extra, floats)

        return jax.jit(make)(_initial_floats(plan, optimizer))

    @property
    def plan(self) -> MemoryPlan:
        """Where each leaf lies; `print(state.plan)` shows it."""
        return self.static.plan

    @property
    def spec(self) -> Spec:
        """The optimizer without its numbers."""
        return self.static.spec

    @property
    def params(self) -> Any:
        """The parameters in full precision: the given tree, in the given dtypes.

        Outside of jit they are copies, which outlive the state's donation; also of leaves that are
        not trained.
        """
        return self._tree(packed.given_dtypes(self.plan), self._frozen_copies())

    @property
    def compute_params(self) -> Any:
        """The parameters for the forward pass, in the compute dtypes: what to differentiate for.

        Gradients of bfloat16 leaves add up in bfloat16: a weight that a scan uses thousands of
        times needs a float32 leaf, see `compute_dtype` in `create`.
        """
        return self._tree(self.static.compute_dtypes, self._frozen_copies())

    @property
    def trainable_params(self) -> Any:
        """`compute_params` with None for the leaves that are not trained.

        For a frozen base that cannot be differentiated (int8, keys), differentiate for these and
        put the rest back inside:
        `jax.grad(lambda p: loss(state.merge(p)))(state.trainable_params)`.
        """
        return self._tree(self.static.compute_dtypes, (None,) * len(self.frozen))

    def merge(self, trainable: Any) -> Any:
        """The whole tree, from one like `trainable_params` and the leaves that are not trained.

        Raises:
            ValueError: if the structure is another, or a leaf's shape or dtype; names the paths.
        """
        return self._fill(packed.match(self.plan, trainable, "trainable"), self._frozen_copies())

    def apply_gradients(self, grads: Any, *, extra: Any = _KEEP) -> "TrainState":
        """The state after one step of the optimizer.

        With `skip_nonfinite`, where any trained leaf's gradient has a NaN or an infinity,
        everything stays bit for bit as it is, but for the counters; nothing waits on the host, see
        `jr.check`.

        Args:
            grads: gradients like `params`, `compute_params` or `trainable_params`; float32,
                bfloat16 or float16 in any mixture (float64 too for float64 leaves). Those of leaves
                that are not trained are ignored, whatever they are.

            extra: what `extra` becomes where the step is not skipped, a tree like it: the batch
                statistics of a bad step go with its gradients.

        Raises:
            ValueError: if the tree does not match; names the paths that are missing, extra,
                misshapen or of a wrong dtype.
        """
        self._check_single("apply_gradients")
        weights, moments, floats, ints = transform.step(
            self.spec,
            self.plan,
            self.weights,
            self.moments,
            self.floats,
            self.ints,
            packed.match(self.plan, packed.canonical(grads), "grads"),
        )
        new = dataclasses.replace(self, weights=weights, moments=moments, floats=floats, ints=ints)
        if extra is _KEEP:
            return new
        _check_like(self.extra, extra)
        if self.spec.skip_nonfinite:
            extra = jtu.tree_map(functools.partial(jnp.where, new.has_nan), self.extra, extra)
        return dataclasses.replace(new, extra=extra)

    def replace(self, *, params: Any = _KEEP, extra: Any = _KEEP) -> "TrainState":
        """The state with other parameters or another extra; moments and counters stay.

        Args:
            params: like the parameters; leaves that are not trained keep their dtype and shape, or
                are None to stay as they are.
            extra: any pytree of arrays.

        Raises:
            ValueError: as `apply_gradients`, for params.
        """
        new: dict[str, Any] = {}
        if params is not _KEEP:
            self._check_single("replace")
            packed.refuse_sharded(params, "params")
            params = packed.canonical(params)
            leaves = packed.match(self.plan, params, "params")
            new["weights"] = packed.pack(self.plan, leaves, backend=self.spec.backend)
            new["frozen"] = self._new_frozen(params)
        if extra is not _KEEP:
            new["extra"] = _copy(extra)
        return dataclasses.replace(self, **new)

    def replace_hyperparams(self, **numbers: hyperparams.Number) -> "TrainState":
        """The state with other values of hyperparameters, which compiles nothing anew.

        Args:
            **numbers: by the names of the optimizer's arguments.

        Raises:
            TypeError, ValueError: if there is no such hyperparameter, it follows a schedule, or the
                value is not allowed.
        """
        scheduled = dict(self.spec.schedules)
        checked = {}
        for name, value in numbers.items():
            if name not in self.spec.names:
                raise ValueError(
                    f"{name}: {self.spec.kind} has no such hyperparameter, "
                    f"it has {', '.join(self.spec.names)}"
                )
            if name in scheduled:
                raise ValueError(
                    f"{name}: it follows a schedule; make the optimizer with a number instead"
                )
            if callable(value):
                raise TypeError(
                    f"{name}: replace_hyperparams takes numbers; a schedule is given when the "
                    "optimizer is made"
                )
            checked[name] = hyperparams.check_number(name, value)
        floats = jnp.asarray(hyperparams.write(self.spec, self.floats, checked))
        return dataclasses.replace(self, floats=floats)

    @property
    def step(self) -> jax.Array:
        """Updates made: an int32 scalar."""
        return self.ints[..., scalars.STEP]

    @property
    def calls(self) -> jax.Array:
        """Calls of `apply_gradients`, skipped ones included: an int32 scalar."""
        return self.ints[..., scalars.CALLS]

    @property
    def skipped(self) -> jax.Array:
        """Calls that were skipped: an int32 scalar."""
        return self.ints[..., scalars.SKIPPED]

    @property
    def consecutive_skips(self) -> jax.Array:
        """Calls that were skipped since the last update: an int32 scalar."""
        return self.ints[..., scalars.CONSECUTIVE_SKIPS]

    @property
    def has_nan(self) -> jax.Array:
        """Whether the last call was skipped: a bool scalar."""
        return self.ints[..., scalars.HAS_NAN] != 0

    @property
    def metrics(self) -> dict[str, jax.Array]:
        """Every hyperparameter as the last call used it, and the counters.

        They are arrays of their own: they can be read after the state was donated. Each that leaves
        a jitted step is one more array, 3 µs of host time: pick what you log.

        Returns:
            The optimizer's hyperparameters by name (float32, or float64), step, calls, skipped and
            consecutive_skips (int32), and has_nan (bool): whether the last call was skipped.
        """
        return {
            **hyperparams.read(self.spec, self.floats),
            "step": self.step,
            "calls": self.calls,
            "skipped": self.skipped,
            "consecutive_skips": self.consecutive_skips,
            "has_nan": self.has_nan,
        }

    def _check_single(self, method: str) -> None:
        if self.ints.ndim != 1:
            raise ValueError(
                f"{method}: the state holds {self.ints.shape[:-1]} members, made by jax.vmap. Call "
                f"it under jax.vmap too: jax.vmap(lambda state, x: state.{method}(x))(state, xs)"
            )

    def _tree(self, dtypes: Dtypes, frozen: tuple[Any, ...]) -> Any:
        leaves = packed.unpack(self.plan, self.weights, dtypes, backend=self.spec.backend)
        return self._fill(leaves, frozen)

    def _fill(self, trained: list[Any], frozen: tuple[Any, ...]) -> Any:
        some, others = iter(trained), iter(frozen)
        return self.plan.treedef.unflatten(
            [next(some) if is_trained else next(others) for is_trained in self.plan.trained]
        )

    def _frozen_copies(self) -> tuple[Any, ...]:
        if any(isinstance(x, jax.core.Tracer) for x in self.frozen):
            return self.frozen
        return _copy(self.frozen)

    def _new_frozen(self, params: Any) -> tuple[Any, ...]:
        entries = packed.entries_of(self.plan, params, "params")
        given = [x for x, trained in zip(entries, self.plan.trained, strict=True) if not trained]
        paths = packed.all_paths(self.plan)
        paths = [
            path for path, trained in zip(paths, self.plan.trained, strict=True) if not trained
        ]
        for i, (old, new) in enumerate(zip(self.frozen, given, strict=True)):
            kind = getattr(new, "shape", None), getattr(new, "dtype", None)
            if new is not None and kind != (old.shape, old.dtype):
                raise ValueError(
                    f"params: {paths[i]!r} has shape {kind[0]} and dtype {kind[1]}, "
                    f"wanted {old.shape} and {old.dtype}"
                )
        return tuple(
            old if new is None else _copy(new) for old, new in zip(self.frozen, given, strict=True)
        )

    def __repr__(self) -> str:
        plan, spec = self.plan, self.spec
        arenas = ", ".join(f"{arena.dtype}[{arena.size}]" for arena in plan.arenas) or "none"
        computed = {d.name for own in self.static.compute_dtypes for d in own}
        lines = [
            f"{spec.kind}, backend {spec.backend}, {_progress(self.ints)}",
            f"{len(plan.leaves):,} leaves, {plan.num_parameters:,} parameters, "
            f"computed in {', '.join(sorted(computed)) or 'no dtype'}",
            f"arenas: {arenas}; weights and {spec.config.moments} moments",
        ]
        if spec.schedules:
            lines.append("schedules: " + ", ".join(f"{name}={s}" for name, s in spec.schedules))
        if self.frozen:
            lines.append(f"frozen: {len(self.frozen):,} leaves")
        if self.extra is not None:
            lines.append(f"extra: {_summary(self.extra)}")
        return "TrainState(\n" + "".join(f"  {line}\n" for line in lines) + ")"


def _initial_floats(plan: MemoryPlan, optimizer: Optimizer) -> Any:
    return hyperparams.initial_floats(
        optimizer.spec, optimizer.numbers, plan.num_groups, transform.scalar_dtype(plan)
    )


@jax.jit(static_argnums=0, inline=True)
def _create(static: Static, leaves: list[Any], extra: Any, floats: jax.Array) -> TrainState:
    pairs = list(zip(leaves, static.plan.trained, strict=True))
    trained = [x for x, is_trained in pairs if is_trained]
    weights = packed.pack(static.plan, trained, backend=static.spec.backend)
    # Inside shard_map each step leaves all of them varying over the same axes, so they start so.
    ints = jnp.asarray(scalars.initial_ints())
    floats, ints, *weights = same_manual_axes([jnp.copy(floats), ints, *weights])
    moments = static.spec.config.moments
    return TrainState(
        weights=tuple(weights),
        moments=tuple(tuple(jnp.zeros_like(w) for _ in range(moments)) for w in weights),
        floats=floats,
        ints=ints,
        frozen=tuple(jnp.copy(x) for x, is_trained in pairs if not is_trained),
        extra=_copy(extra),
        static=static,
    )


@jax.jit(inline=True)
def _copy(tree: Any) -> Any:
    return jtu.tree_map(jnp.copy, tree)


def _check_like(old: Any, new: Any) -> None:
    """Raises unless the new extra has the structure, shapes and dtypes of the old one."""
    if jtu.tree_structure(old) != jtu.tree_structure(new):
        raise ValueError(
            f"extra: expected a tree like state.extra, {jtu.tree_structure(old)}, got "
            f"{jtu.tree_structure(new)}"
        )
    for (key_path, a), b in zip(jtu.tree_leaves_with_path(old), jtu.tree_leaves(new), strict=True):
        wanted, got = jax.typeof(a), jax.typeof(b)
        if (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
            raise ValueError(
                f"extra: {path_string(key_path)!r} has shape {got.shape} and dtype {got.dtype}, "
                f"wanted {wanted.shape} and {wanted.dtype}"
            )


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, Optimizer):
        return
    if isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            "optimizer: TrainState updates in place and takes an optimizer of this package "
            f"(jr.adamw, jr.adam, jr.sgd), got an optax transformation. Use {instead_of(optimizer)}"
        )
    raise TypeError(
        f"optimizer: expected one made by jr.adamw, jr.adam or jr.sgd, got {optimizer!r}"
    )


def _check_frozen(plan: MemoryPlan, params: Any) -> None:
    for (key_path, leaf), trained in zip(
        jtu.tree_leaves_with_path(params), plan.trained, strict=True
    ):
        if not trained and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(
                f"params: the leaf {path_string(key_path)!r} is a {type(leaf).__name__}, and a "
                "state holds arrays. Take it out of the tree (equinox.partition)"
            )


def _progress(ints: Any) -> str:
    if isinstance(ints, jax.Array) and not isinstance(ints, jax.core.Tracer):
        if ints.is_deleted():
            return "donated"
        if ints.ndim == 1 and ints.is_fully_addressable:
            values = np.asarray(ints)
            return f"step {values[scalars.STEP]}, skipped {values[scalars.SKIPPED]}"
    shape = getattr(ints, "shape", None)
    members = math.prod(shape[:-1]) if shape else 1
    return f"{members:,} members" if members > 1 else "traced"


def _summary(tree: Any) -> str:
    if isinstance(tree, packed.Packed):
        return repr(tree)
    leaves = jtu.tree_leaves(tree)
    return f"{type(tree).__name__} of {len(leaves):,} arrays"
