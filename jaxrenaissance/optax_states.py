"""Where optax keeps what a `TrainState` has: its moments are the same sums, leaf by leaf.

They are somewhere inside the states of what was chained and wrapped around them, and found by the
types of these states.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.tree_util as jtu
import optax

from .checkpoint import moments_of
from .paths import path_string
from .spec import Spec

INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


class Moments(NamedTuple):
    """Where optax keeps the moments of a kind.

    Attributes:
        state: the type of the state.
        fields: of the moments in it, in our order.
        sign: what ours are multiplied by.
    """

    state: type[Any]
    fields: tuple[str, ...]
    sign: int = 1


_MOMENTS = {
    "adam": Moments(optax.ScaleByAdamState, ("mu", "nu")),
    "lion": Moments(optax.ScaleByLionState, ("mu",)),
    "momentum": Moments(optax.TraceState, ("trace",)),
    # There the trace is the last thing in the chain: what it adds up has lr and minus in it.
    "lars in optax's form": Moments(optax.TraceState, ("trace",), -1),
}
ALL_STATES = tuple({kind.state for kind in _MOMENTS.values()})
"""The types of the states that hold moments which a `TrainState` can have."""


def moments_in_optax(spec: Spec) -> Moments | None:
    """Where optax keeps the moments of such an optimizer; None where it has none."""
    return _MOMENTS.get(moments_of(spec) or "")


def mapped(node: Any, handle: Callable[[Any], Any]) -> Any:
    """A state of optax's with the states in it replaced by what `handle` gives for them.

    Where that is `NotImplemented`, what is inside of the state is looked at.
    """
    is_state = isinstance(node, tuple) and hasattr(node, "_fields")
    if is_state:
        new = handle(node)
        if new is not NotImplemented:
            return new
        return type(node)(*(mapped(x, handle) for x in node))
    if isinstance(node, list | tuple):
        return type(node)(mapped(x, handle) for x in node)
    if isinstance(node, dict):
        return type(node)((key, mapped(x, handle)) for key, x in node.items())
    return node


def refuse_lars(spec: Spec, argument: str) -> None:
    """Raises for `jr.lars` in its default form, whose momentum is not optax's."""
    if spec.trust == "lars":
        raise ValueError(
            f"{argument}: jr.lars in its default form takes other trust ratios than optax.lars, "
            "and they are part of what the momentum has added up, so that the one cannot go on "
            "with the other's. Make it with optax_form=True"
        )


def settable(spec: Spec) -> set[str]:
    """The hyperparameters that follow no schedule."""
    return set(spec.names) - {"loss_scale"} - dict(spec.schedules).keys()


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths; what is masked is none."""
    return {path_string(key_path): leaf for key_path, leaf in jtu.tree_leaves_with_path(tree)}
