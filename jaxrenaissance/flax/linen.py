"""TrainState for Flax Linen: Flax's own signature, and a few buffers inside."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
from flax import serialization, struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from .. import scalars, transform
from .. import train_state as core_state
from ..compute_dtypes import ComputeDtype
from ..foreign import check_optimizer
from ..packed import Packed
from ..plan import Rules, Stacked
from .wrapper import Wrapper

_KEEP: Any = object()

# What the class has itself. Where a subclass declares it again, as one does for Flax's own class,
# the declaration is taken back, or it would be a field beside the buffers.
_OWN = frozenset({"batch_stats", "opt_state", "params", "step"})
_RESERVED = frozenset(
    {"compute_dtype", "compute_params", "ema_extra", "rules", "stacked", "trainable", "tx"}
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
        step: how many updates have been made.
        **fields: by name, as in `flax.struct`.

    Raises:
        TypeError: if there is no such field.
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
        core = dataclasses.replace(core, ints=core.ints.at[scalars.STEP].set(step))
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
        core = core_state.TrainState.create(
            params,
            tx,
            compute_dtype=compute_dtype,
            rules=rules,
            stacked=stacked,
            trainable=trainable,
            extra=packed,
            ema_extra=ema_extra,
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
        mu, nu = (*zip(*self.core.moments, strict=True), (), ())[:2]
        return transform.State(self.core.step, mu, nu)

    def apply_gradients(self, *, grads: Any, batch_stats: Any = _KEEP, **fields: Any) -> Self:
        """The state after one step of the optimizer.

        Args:
            grads: like `params` or `compute_params`, or `Gradients`: see
                `jr.TrainState.apply_gradients`.
            batch_stats: what they become; where this call's gradients are not finite, they stay.
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


def _with_opt_state(
    core: core_state.TrainState, opt_state: transform.State
) -> core_state.TrainState:
    kept = tuple(series for series in (opt_state.mu, opt_state.nu) if series)
    moments = tuple(zip(*kept, strict=True)) if kept else core.moments
    shapes = [[x.shape for x in own] for own in moments]
    wanted = [[x.shape for x in own] for own in core.moments]
    if shapes != wanted:
        raise ValueError(f"opt_state: the moments have shapes {shapes}, wanted {wanted}")
    ints = core.ints.at[scalars.STEP].set(opt_state.count)
    return dataclasses.replace(core, moments=moments, ints=ints)


def _to_state_dict(core: core_state.TrainState) -> Any:
    return serialization.to_state_dict(core.to_leaves(host=True))


def _from_state_dict(core: core_state.TrainState, leaves: Any) -> core_state.TrainState:
    return core_state.TrainState.from_leaves(leaves, like=core)


# `flax.serialization` and what builds on it, for all states that hold a core state: by path, so
# that the plan may be another when they are read.
serialization.register_serialization_state(core_state.TrainState, _to_state_dict, _from_state_dict)
