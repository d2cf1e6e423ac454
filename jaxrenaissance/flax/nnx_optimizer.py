"""Optimizer: used like `nnx.Optimizer`, with the moments in arenas."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import unflatten_dict

from ..foreign import check_optimizer
from ..hyperparams import Number
from ..planning import Rules, Stacked
from ..train_state import TrainState
from ..transform import Optimizer as CoreOptimizer
from .nnx_trees import Path, check_selected, flat_values, gradient_tree


class Optimizer(nnx.Pytree):
    """What `nnx.Optimizer` is, for an optimizer of this package: the model stays the truth.

    >>> import jax.numpy as jnp
    >>> import jaxrenaissance as jr
    >>> import jaxrenaissance.flax
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = jr.flax.Optimizer(model, jr.adam(0.1), wrt=nnx.Param)
    >>> @nnx.jit
    ... def train_step(model, optimizer, x, y):
    ...     loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> loss = train_step(model, optimizer, jnp.eye(2), jnp.ones((2, 1)))
    >>> int(optimizer.step)
    1

    Moments, averages and scalars are a few buffers here. The model's weights are packed at each
    update, and unpacked again, so that weights which were changed from outside count; a bfloat16
    weight is rounded at each update, as with optax.

    It costs two passes over the weights more than `NNXState`, and above all the time of the host:
    every Variable of the model still crosses the boundary of `nnx.jit`. `nnx.Optimizer` takes this
    package's optimizers, too; what only works in place (an average of the weights, loss scaling,
    accumulation, metrics) works here.

    Args:
        model: an `nnx.Module`.
        tx: an optimizer of this package.
        wrt: a filter of NNX for the variables that are trained, as in `nnx.grad`.
        rules, stacked: as in `jr.TrainState.create`.

    Raises:
        TypeError: if the optimizer is not one of this package's.
        ValueError: if `wrt` selects nothing, or as `jr.TrainState.create`.
    """

    def __init__(
        self,
        model: Any,
        tx: CoreOptimizer,
        *,
        wrt: Any = nnx.Param,
        rules: Rules | None = None,
        stacked: Stacked | None = None,
    ) -> None:
        check_optimizer(tx)
        self.wrt = wrt
        check_selected(self._flat(model), wrt)
        core = TrainState.create(self._params(model), tx, rules=rules, stacked=stacked)
        leaves, self._treedef = jax.tree.flatten(dataclasses.replace(core, weights=()))
        self._buffers = nnx.data([nnx.OptState(x) for x in leaves])

    @property
    def step(self) -> jax.Array:
        """Updates made: an int32 scalar."""
        return self._scalars.step

    @property
    def metrics(self) -> dict[str, jax.Array]:
        """Hyperparameters as used, what was measured, and counters: see `jr.TrainState.metrics`."""
        return self._scalars.metrics

    def scale_loss(self, loss: Any) -> Any:
        """The loss times the loss scale: see `jr.TrainState.scale_loss`."""
        return self._scalars.scale_loss(loss)

    def update(self, model: Any, grads: Any) -> None:
        """Updates the model's variables and the optimizer's, in place.

        With `skip_nonfinite` both stay as they are where a gradient is not finite. Other variables
        of the model are not the optimizer's: the forward pass has set them, and batch statistics
        that are not finite either stay in the model. `NNXState` holds them back.

        Args:
            model: the module, with the variables that the optimizer was made for.
            grads: what `nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model)` gives, or a nested
                dict of arrays.

        Raises:
            TypeError: if the gradients are neither.
            ValueError: if model or gradients do not match; names the paths.
        """
        core = self.core(model)
        core = core.apply_gradients(gradient_tree(grads, self._flat(model), {}))
        nnx.update(model, core.params)
        self._keep(core)

    def core(self, model: Any) -> TrainState:
        """The `jr.TrainState` of this optimizer and the model's weights: to read from.

        `jr.check(optimizer.core(model))` and `optimizer.core(model).skipped` for example.

        Raises:
            ValueError: if the model does not match; names the paths.
        """
        return self._scalars.replace(params=self._params(model))

    def restore(self, model: Any, leaves: Any) -> None:
        """Sets the model's variables and the optimizer's from a checkpoint, in place.

        >>> import jaxrenaissance as jr
        >>> import jaxrenaissance.flax
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = jr.flax.Optimizer(model, jr.adam(0.1))
        >>> leaves = optimizer.core(model).to_leaves(host=True)
        >>> optimizer.restore(model, leaves)

        Args:
            model: the module, with the variables that the optimizer was made for.
            leaves: from `optimizer.core(model).to_leaves()`. Variables that are not trained (batch
                statistics, random counts) are not among them.

        Raises:
            TypeError, ValueError: as `jr.TrainState.from_leaves`.
        """
        core = TrainState.from_leaves(leaves, like=self.core(model))
        nnx.update(model, core.params)
        self._keep(core)

    def ema_model(self, model: Any) -> Any:
        """A copy of the module whose trained variables are their moving average.

        Raises:
            ValueError: if the optimizer has no `ema_decay`, or the model does not match.
        """
        averaged = nnx.clone(model)
        nnx.update(averaged, self.core(model).ema_params)
        return averaged

    def replace_hyperparams(
        self,
        *,
        groups: Mapping[str, Mapping[str, Number]] | None = None,
        **numbers: Number,
    ) -> None:
        """Sets numbers, in place: see `jr.TrainState.replace_hyperparams`."""
        self._keep(self._scalars.replace_hyperparams(groups=groups, **numbers))

    @property
    def _scalars(self) -> TrainState:
        """The state without weights, which its scalars do not need."""
        return self._treedef.unflatten([x.get_value() for x in self._buffers])

    def _keep(self, core: TrainState) -> None:
        leaves = jax.tree.leaves(dataclasses.replace(core, weights=()))
        for variable, value in zip(self._buffers, leaves, strict=True):
            variable.set_value(value)

    def _params(self, model: Any) -> Any:
        return unflatten_dict(self._flat(model))

    def _flat(self, model: Any) -> dict[Path, Any]:
        return flat_values(nnx.state(model, self.wrt))
