"""TrainState for Flax Linen: Flax's own signature, and a few buffers inside."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import serialization, struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.sharding import Mesh

from .. import scalars, transform
from .. import train_state as core_state
from ..compute_dtypes import ComputeDtype
from ..foreign import check_optimizer
from ..packed import Packed
from ..planning import Rules, Stacked
from .wrapper import Wrapper, create_core

_KEEP: Any = object()

# What the class has itself. Where a subclass declares it again, as one does for Flax's own class,
# the declaration is taken back, or it would be a field beside the buffers.
_OWN = frozenset({"batch_stats", "opt_state", "params", "step"})
_RESERVED = frozenset(
    {
        "compute_dtype",
        "compute_params",
        "data_axis",
        "ema_extra",
        "mesh",
        "reduce_dtype",
        "rules",
        "sharding",
        "stacked",
        "trainable",
        "tx",
    }
)


class _Extended(Wrapper):
    """Lets subclasses of the state have fields, as those of Flax's have."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        declared = inspect.get_annotations(cls)
        if reserved := _RESERVED & declared.keys():
            raise TypeError(
                f"{cls.__name__}: a field cannot be called {min(reserved)!r}, which is a name of "
                "jaxrenaissance.flax.TrainState, or an argument of its create"
            )
        # The state's own class has them as properties, and declares none of them.
        for name in _OWN & declared.keys():
            del declared[name]
            if name in cls.__dict__:
                delattr(cls, name)
        cls.__annotations__ = declared
        super().__init_subclass__(**kwargs)
        cls.replace = _replace  # struct.dataclass has set its own.

    def __getattr__(self, name: str) -> Any:
        if name == "tx":
            raise AttributeError(
                "tx: the state does not keep the optimizer, so that another learning rate compiles "
                "nothing: state.replace_hyperparams(learning_rate=…) sets numbers, state.spec is "
                "the optimizer without them"
            )
        return super().__getattr__(name)


def _replace(
    self: Any,
    *,
    params: Any = _KEEP,
    batch_stats: Any = _KEEP,
    opt_state: Any = _KEEP,
    step: Any = _KEEP,
    **fields: Any,
) -> Any:
    """The state with other values of fields, and of what the arenas hold.

    Args:
        params: like the parameters; they are packed, and moments and averages stay.
        batch_stats: like those that `create` was given; they are packed, too.
        opt_state: a `State` like `opt_state`: its moments and its count.
        step: how many updates have been made: an int32, or one for each member of several.
        **fields: by name, as in `flax.struct`.

    Raises:
        TypeError: if there is no such field, opt_state is no `State`, or step no integer.
        ValueError: if a tree does not match; names the paths.
    """
    core = fields.pop("core", self.core)
    if params is not _KEEP:
        core = core.replace(params=params)
    if batch_stats is not _KEEP:
        core = core.replace(extra=_packed_again(core, batch_stats))
    if opt_state is not _KEEP:
        core = _with_opt_state(core, opt_state)
    if step is not _KEEP:
        core = _with_step(core, step)
    return dataclasses.replace(self, core=core, **fields)


class TrainState(_Extended, struct.PyTreeNode):
    """Flax's TrainState, with parameters, moments and batch statistics in arenas.

    A loop that has `flax.training.train_state.TrainState` changes the class and the optimizer:

    >>> import jax, jax.numpy as jnp
    >>> import jaxrenaissance as jr
    >>> import jaxrenaissance.flax
    >>> from flax import linen as nn
    >>> model = nn.Dense(1)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    >>> state = jr.flax.TrainState.create(apply_fn=model.apply, params=params, tx=jr.adam(0.1))
    >>> @jax.jit(donate_argnums=0)
    ... def train_step(state, x, y):
    ...     def loss_fn(params):
    ...         return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)
    ...     loss, grads = jax.value_and_grad(loss_fn)(state.compute_params)
    ...     return state.apply_gradients(grads=grads), loss
    >>> state, loss = train_step(state, jnp.eye(2), jnp.ones((2, 1)))
    >>> int(state.step)
    1

    Subclasses may have further fields, as those of Flax's class:

    >>> import dataclasses
    >>> class DropoutState(jr.flax.TrainState):
    ...     key: jax.Array
    >>> [field.name for field in dataclasses.fields(DropoutState)]
    ['core', 'apply_fn', 'key']

    `batch_stats: Any` may be declared there, too; with or without, they are packed. Everything that
    a `jr.TrainState` tells is there by its name, unless a field has that name: `metrics`,
    `ema_params`, `skipped`, `scale_loss`, …

    Attributes:
        core: the `jr.TrainState` inside, for whatever has no name here; `jr.lerp` takes it.
        apply_fn: usually `model.apply`; static.
    """

    core: core_state.TrainState
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: transform.Optimizer,
        batch_stats: Any = None,
        compute_dtype: ComputeDtype = None,
        rules: Rules | None = None,
        stacked: Stacked | None = None,
        trainable: Any = None,
        ema_extra: bool = False,
        opt_state: Any = None,
        mesh: Mesh | None = None,
        data_axis: str | Sequence[str] = "data",
        sharding: str = "replicated",
        reduce_dtype: Any = None,
        **fields: Any,
    ) -> Self:
        """A state that starts from these parameters, which are copied.

        Args:
            apply_fn: usually `model.apply`.
            params: as for `jr.TrainState.create`: `variables["params"]`.
            tx: an optimizer of this package. The state keeps its spec and its numbers.
            batch_stats: a tree of float arrays, `variables["batch_stats"]`, kept in one buffer.
            compute_dtype, rules, stacked, trainable: as in `jr.TrainState.create`.
            ema_extra: whether `batch_stats` are averaged as the weights are, likewise.
            opt_state: that of optax's optimizer for the same thing, where a run moves here in
                mid-training: see `jr.from_optax`.
            **fields: of a subclass.

        Raises:
            TypeError: if the optimizer is not one of this package's, or a field is missing.
            ValueError: if params has a collection whose gradients replace its values (fp8), or as
                `jr.TrainState.create`.
        """
        check_optimizer(tx)
        if isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params:
            raise ValueError(
                f"params: the collection {OVERWRITE_WITH_GRADIENT!r} (fp8 scales) is overwritten "
                "with its gradients, which arenas do not do. Give variables['params'] alone, and "
                "keep that collection in a field of a subclass, which apply_gradients replaces"
            )
        packed = None if batch_stats is None else Packed(batch_stats, backend=tx.spec.backend)
        core = create_core(
            params,
            tx,
            opt_state,
            compute_dtype=compute_dtype,
            rules=rules,
            stacked=stacked,
            trainable=trainable,
            extra=packed,
            ema_extra=ema_extra,
            mesh=mesh,
            data_axis=data_axis,
            sharding=sharding,
            reduce_dtype=reduce_dtype,
        )
        return cls(core=core, apply_fn=apply_fn, **fields)

    @property
    def step(self) -> jax.Array:
        """Updates made: an int32 scalar."""
        return self.core.step

    @property
    def params(self) -> Any:
        """The parameters in full precision: the given tree, in the given dtypes."""
        return self.core.params

    @property
    def compute_params(self) -> Any:
        """The parameters in the compute dtypes: what to differentiate for."""
        return self.core.compute_params

    @property
    def batch_stats(self) -> Any:
        """The batch statistics, unpacked by one launch; None where `create` was given none."""
        return None if self.core.extra is None else self.core.extra.tree

    @property
    def opt_state(self) -> transform.State:
        """The moments as optax's contract has them: arenas, not trees."""
        return _opt_state(self.core)

    def apply_gradients(self, *, grads: Any, batch_stats: Any = _KEEP, **fields: Any) -> Self:
        """The state after one step of the optimizer.

        Args:
            grads: like `params` or `compute_params`, or `Gradients`: see
                `jr.TrainState.apply_gradients`.
            batch_stats: what they become; where this call's gradients are not finite, they stay.
                `replace(batch_stats=…)` afterwards, as some loops have it, sets them on a skipped
                step, too, NaN included.
            **fields: other values of fields, also where the step is skipped.

        Raises:
            TypeError: if there is no such field.
            ValueError: if a tree does not match; names the paths.
        """
        kept = batch_stats is _KEEP
        extra = {} if kept else {"extra": _packed_again(self.core, batch_stats)}
        core = self.core.apply_gradients(grads, **extra)
        return dataclasses.replace(self, core=core, **fields)


def _packed_again(core: core_state.TrainState, batch_stats: Any) -> Packed:
    if core.extra is None:
        raise ValueError("batch_stats: the state has none; give them to create")
    return core.extra.replace(batch_stats)


def _opt_state(core: core_state.TrainState) -> transform.State:
    mu, nu = (*zip(*core.moments, strict=True), (), ())[:2]
    return transform.State(core.step, mu, nu)


def _with_opt_state(core: core_state.TrainState, opt_state: Any) -> core_state.TrainState:
    if not isinstance(opt_state, transform.State):
        raise TypeError(
            f"opt_state: expected a State like state.opt_state, got a {type(opt_state).__name__}; "
            "that of an optax optimizer goes to create(…, opt_state=…)"
        )
    got, wanted = map(_described, (opt_state, _opt_state(core)))
    if got != wanted:
        raise ValueError(f"opt_state: the moments are {got or 'none'}, wanted {wanted or 'none'}")
    series = [arenas for arenas in (opt_state.mu, opt_state.nu) if arenas]
    moments = tuple(zip(*series, strict=True)) or core.moments
    return _with_step(dataclasses.replace(core, moments=moments), opt_state.count)


def _described(opt_state: transform.State) -> str:
    series = zip(("mu", "nu"), opt_state[1:], strict=True)
    return ", ".join(
        f"{name} {jnp.result_type(x)}{list(jnp.shape(x))}" for name, own in series for x in own
    )


def _with_step(core: core_state.TrainState, step: Any) -> core_state.TrainState:
    step = jnp.asarray(step)
    members = core.step.shape
    if not jnp.issubdtype(step.dtype, jnp.integer):
        raise TypeError(f"step: expected an integer, got dtype {step.dtype}")
    if step.shape not in ((), members):
        raise ValueError(f"step: has shape {step.shape}, wanted {members}")
    ints = core.ints.at[..., scalars.STEP].set(step.astype(core.ints.dtype))
    return dataclasses.replace(core, ints=ints)


def _to_state_dict(core: core_state.TrainState) -> Any:
    return serialization.to_state_dict(core.to_leaves(host=True))


def _from_state_dict(core: core_state.TrainState, leaves: Any) -> core_state.TrainState:
    return core_state.TrainState.from_leaves(leaves, like=core)


# `flax.serialization` and what builds on it, for all states that hold a core state: by path, so
# that the plan may be another when they are read.
serialization.register_serialization_state(core_state.TrainState, _to_state_dict, _from_state_dict)
