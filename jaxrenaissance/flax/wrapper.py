"""What the states for Flax share: a core state inside, whose numbers are read from outside."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.tree_util as jtu

from ..gradients import Gradients
from ..groups import Match
from ..hyperparams import Number
from ..optax_in import from_optax
from ..placement import spec_of
from ..train_state import TrainState
from ..transform import Optimizer

_READ = frozenset(
    {
        "calls",
        "consecutive_skips",
        "ema_params",
        "has_nan",
        "loss_scale",
        "merge",
        "metrics",
        "plan",
        "scale_loss",
        "skipped",
        "spec",
        "to_leaves",
        "trainable_params",
        "trust_ratios",
    }
)


def create_core(params: Any, optimizer: Optimizer, opt_state: Any, **options: Any) -> TrainState:
    """A core state that starts, or that goes on where an optax loop with this state stands."""
    if opt_state is None:
        return TrainState.create(params, optimizer, **options)
    return from_optax(params, opt_state, optimizer, **options)


class Wrapper:
    """A dataclass with a core state in its field `core`.

    What is only read is handed on by name where the class has nothing of that name, so that a
    subclass may have a field `metrics` of its own.
    """

    core: TrainState

    def __getattr__(self, name: str) -> Any:
        if name in _READ:
            return getattr(self.core, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _with(self, core: TrainState) -> Self:
        return dataclasses.replace(self, core=core)  # pyright: ignore[reportArgumentType]

    @property
    def partition_specs(self) -> Self:
        """How the state lies on its mesh: see `jr.TrainState.partition_specs`."""
        specs = jtu.tree_map(spec_of, self)
        return dataclasses.replace(specs, core=self.core.partition_specs)

    def with_ema(self) -> Self:
        """The state whose parameters are their moving average: see `jr.TrainState.with_ema`."""
        return self._with(self.core.with_ema())

    def replace_hyperparams(
        self,
        *,
        groups: Mapping[str, Mapping[str, Number]] | None = None,
        **numbers: Number,
    ) -> Self:
        """The state with other numbers: see `jr.TrainState.replace_hyperparams`."""
        return self._with(self.core.replace_hyperparams(groups=groups, **numbers))

    def map_params(self, fn: Callable[[jax.Array], jax.Array], match: Match | None = None) -> Self:
        """The state with a function applied to its parameters: see `jr.TrainState.map_params`."""
        return self._with(self.core.map_params(fn, match))

    def reset_moments(self, match: Match | None = None) -> Self:
        """The state with moments that start anew: see `jr.TrainState.reset_moments`."""
        return self._with(self.core.reset_moments(match))

    def restore(self, leaves: Any) -> Self:
        """The state that `to_leaves` was called on, under this one's plan.

        See `jr.TrainState.from_leaves`. Fields of a subclass are not among the leaves, and stay.
        """
        return self._with(TrainState.from_leaves(leaves, like=self.core))

    def zero_gradients(self) -> Gradients:
        """The sum of no gradients, for `accumulate`: see `jr.TrainState.zero_gradients`."""
        return self.core.zero_gradients()

    def accumulate(self, sums: Gradients, grads: Any) -> Gradients:
        """The sums with one micro-batch's gradients more: see `jr.TrainState.accumulate`."""
        return self.core.accumulate(sums, grads)
