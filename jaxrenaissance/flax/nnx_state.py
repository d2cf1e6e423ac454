"""NNXState: a model of NNX as a few device buffers, and a module again inside the step."""

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.tree_util as jtu
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from ..compute_dtypes import ComputeDtype
from ..extra import copy
from ..foreign import check_optimizer
from ..gradients import Gradients
from ..packed import Packed
from ..planning import Rules, Stacked
from ..train_state import TrainState
from ..transform import Optimizer
from .nnx_trees import (
    Path,
    at,
    check_selected,
    fits_an_arena,
    flat_values,
    gradient_tree,
    trained_tree,
)
from .wrapper import Wrapper, create_core


class _Paths(NamedTuple):
    """Where the variables of a model go.

    Attributes:
        trained: those that `wrt` selects, into arenas.
        frozen: the other parameters, which stay as they are.
        floats: other float variables, into one `Packed`.
        rest: what is left.
    """

    trained: tuple[Path, ...]
    frozen: tuple[Path, ...]
    floats: tuple[Path, ...]
    rest: tuple[Path, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Template:
    """The model without its arrays: equal by identity first, as it is compared on every call.

    Attributes:
        graphdef: what NNX merges arrays into.
        paths: of its variables.
    """

    graphdef: nnx.GraphDef[Any]
    paths: _Paths
    _hash: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.graphdef, self.paths)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, _Template):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.paths == other.paths
            and self.graphdef == other.graphdef
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Template, (self.graphdef, self.paths)  # Hashes are those of a process.


@functools.partial(jtu.register_dataclass, data_fields=["core"], meta_fields=["template"])
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NNXState(Wrapper):
    """An NNX model being trained, as a pytree of a few device buffers: the fast form.

    `nnx.jit` and `nnx.Optimizer` take every Variable of model and optimizer through the jit
    boundary, and walk through the module on every call. Here the trained variables lie in arenas,
    the other float variables (batch statistics) in one `Packed`, and what is left (keys and counts
    of random streams) are ordinary arrays. The step is a plain, donated `jax.jit`, and the module
    exists inside it only:

    >>> import jax, jax.numpy as jnp
    >>> import jaxrenaissance as jr
    >>> import jaxrenaissance.flax
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> state = jr.flax.NNXState.create(model, jr.adam(0.1), wrt=nnx.Param)
    >>> @jax.jit(donate_argnums=0)
    ... def train_step(state, x, y):
    ...     model = state.model()
    ...     loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    ...     return state.apply_gradients(grads), loss
    >>> state, loss = train_step(state, jnp.eye(2), jnp.ones((2, 1)))
    >>> int(state.step), state.model()(jnp.eye(2)).shape
    (1, (2, 1))

    What the forward pass changes in the model, batch statistics and random counts, is in the module
    that `model` gave, and `apply_gradients` takes it over from there.

    Attributes:
        core: the `jr.TrainState` inside, for whatever has no shorter name here: its tree of
            parameters is a nested dict with the model's paths, "layers/0/kernel". It is what
            `jr.lerp` takes.
        template: the model without its arrays; static.
    """

    core: TrainState
    template: _Template
    _given: list["weakref.ref[Any]"] = dataclasses.field(init=False, default_factory=list)

    @staticmethod
    def create(
        model: Any,
        tx: Optimizer,
        *,
        wrt: Any = nnx.Param,
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
    ) -> "NNXState":
        """A state that starts from this model, whose arrays are copied: the model stays as it is.

        Under jit no second copy of the weights lives on:
        `jax.jit(lambda: NNXState.create(Model(nnx.Rngs(0)), tx))()`.

        Args:
            model: an `nnx.Module`. Modes, `train()` and `eval()`, stay as they are now; set them on
                what `model` gives.
            tx: an optimizer of this package.
            wrt: a filter of NNX for the variables that are trained. An `nnx.Param` that it does not
                select stays as it was given: the base of a LoRA model has neither moments nor a
                place in an arena.
            compute_dtype, rules, stacked: as in `jr.TrainState.create`.
            trainable: which of the variables that `wrt` selects are trained, likewise.
            ema_extra: whether the packed variables are averaged, too, likewise.
            opt_state: `optimizer.opt_state` of an `nnx.Optimizer` around optax's optimizer, where a
                run moves here in mid-training: see `jr.from_optax`.
            mesh, data_axis, sharding, reduce_dtype: as in `jr.TrainState.create`.

        Raises:
            TypeError: if the model is no module, or the optimizer not one of this package's.
            ValueError: if `wrt` selects nothing, or as `jr.TrainState.create`.
        """
        if not isinstance(model, nnx.Module):
            raise TypeError(f"model: expected an nnx.Module, got a {type(model).__name__}")
        check_optimizer(tx)
        graphdef, *states = nnx.split(model, wrt, nnx.Param, fits_an_arena, ...)
        trained, frozen, floats, rest = map(flat_values, states)
        check_selected(trained, wrt)
        core = create_core(
            unflatten_dict({**trained, **frozen}),
            tx,
            nnx.as_pure(opt_state),
            compute_dtype=compute_dtype,
            rules=rules,
            stacked=stacked,
            trainable=trained_tree(trained, frozen, trainable),
            extra={
                "floats": Packed(unflatten_dict(floats), backend=tx.spec.backend),
                "rest": unflatten_dict(rest),
            },
            ema_extra=ema_extra,
            mesh=mesh,
            data_axis=data_axis,
            sharding=sharding,
            reduce_dtype=reduce_dtype,
        )
        paths = _Paths(*map(tuple, (trained, frozen, floats, rest)))
        return NNXState(core, _Template(graphdef, paths))

    def model(self, *, full_precision: bool = False) -> Any:
        """A module with this state's arrays: inside the step, or outside for evaluation.

        Subclasses of `nnx.Variable`, their metadata and variables shared by several modules are as
        in the model that was given. Each call makes a module of its own.

        Args:
            full_precision: whether parameters come in the dtypes that were given. Otherwise they
                come in the compute dtypes, which `apply_gradients` takes gradients of. Other
                variables always have the dtypes that were given.
        """
        params = self.core.params if full_precision else self.core.compute_params
        # What a module holds outside of jit outlives the state's donation.
        rest = copy(self.core.extra["rest"])
        paths = self.template.paths
        places = (
            (params, paths.trained + paths.frozen),
            (self.core.extra["floats"].tree, paths.floats),
            (rest, paths.rest),
        )
        # By path, as a dict inside may be the value of a Variable.
        values = [(path, at(tree, path)) for tree, own in places for path in own]
        model = nnx.merge(self.template.graphdef, nnx.FlatState(values, sort=True))
        self._given.append(weakref.ref(model))
        return model

    @property
    def step(self) -> jax.Array:
        """Updates made: an int32 scalar."""
        return self.core.step

    @property
    def params(self) -> Any:
        """The parameters in full precision: a nested dict of arrays, with the model's paths."""
        return self.core.params

    def apply_gradients(self, grads: Any, *, model: Any = None) -> "NNXState":
        """The state after one step of the optimizer.

        What the forward pass changed in the model's other variables is taken over, but not where
        this call's gradients are not finite: then the step and its statistics are skipped.
        Variables that the forward pass added (intermediates) are not kept.

        Args:
            grads: what `nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model)` gives, or a nested
                dict of arrays; or `Gradients`, see `accumulate`.
            model: the module whose variables are taken over. None: the one that `model()` gave. If
                it gave none, because the gradients come from elsewhere, variables stay; with a new
                one, `model=state.model()`, they stay always.

        Raises:
            TypeError: if the gradients are neither.
            ValueError: if there are other variables and it is not clear from which module to take
                them: `model()` gave several, or nobody has kept what it gave. If a variable is
                missing or of another shape or dtype, or as `jr.TrainState.apply_gradients`.
        """
        sums = grads if isinstance(grads, Gradients) else self._tree(grads)
        return NNXState(self.core.apply_gradients(sums, **self._changed(model)), self.template)

    def accumulate(self, sums: Gradients, grads: Any) -> Gradients:
        """The sums with one micro-batch's gradients more: see `jr.TrainState.accumulate`.

        Args:
            sums: from `zero_gradients`, or from here.
            grads: as in `apply_gradients`.

        Raises:
            TypeError, ValueError: as `jr.TrainState.accumulate`.
        """
        return self.core.accumulate(sums, self._tree(grads))

    def with_ema(self) -> "NNXState":
        """The state whose parameters are their moving average: for `model()` as it is.

        The packed variables are averaged, too, where `create` was told `ema_extra=True`.

        Raises:
            ValueError: if the optimizer has no `ema_decay`.
        """
        return NNXState(self.core.with_ema(), self.template)

    def _with(self, core: TrainState) -> Self:
        new = super()._with(core)
        new._given.extend(self._given)
        return new

    def _tree(self, grads: Any) -> Any:
        paths, frozen = self.template.paths, {}
        if paths.frozen:
            nothing = jtu.tree_unflatten(self.plan.treedef, [None] * len(self.plan.trained))
            frozen = {path: at(nothing, path) for path in paths.frozen}
        return gradient_tree(grads, paths.trained, frozen)

    def _changed(self, model: Any) -> dict[str, Any]:
        """The argument `extra` for the core: what the model has now, or nothing."""
        paths = self.template.paths
        if not paths.floats + paths.rest:
            return {}
        if model is None:
            model = self._only_model()
        if model is None:
            return {}
        now = flat_values(model)
        for path in paths.floats + paths.rest:
            if path not in now:
                name = "/".join(map(str, path))
                raise ValueError(f"model: the variable {name!r} is missing")
        floats, rest = (
            unflatten_dict({path: now[path] for path in kind})
            for kind in (paths.floats, paths.rest)
        )
        return {"extra": {"floats": self.core.extra["floats"].replace(floats), "rest": rest}}

    def _only_model(self) -> Any:
        alive = [model for model in (ref() for ref in self._given) if model is not None]
        if len(alive) == 1 or not self._given:
            return alive[0] if alive else None
        what = "gave several modules" if alive else "gave a module that nobody has kept"
        raise ValueError(
            f"model: state.model() {what}, so it is not clear whose variables (batch statistics, "
            "random counts) to take over: apply_gradients(grads, model=model)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return NNXState, (self.core, self.template)  # Without the modules that were given.

    def __repr__(self) -> str:
        return repr(self.core).replace("TrainState", "NNXState", 1)
