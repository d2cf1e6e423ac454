"""Where optax keeps what a `TrainState` has: its moments are the same sums, leaf by leaf.

They are somewhere inside the states of what was chained and wrapped around them, and found by the
types of these states.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from .checkpoint import moments_of
from .paths import leaves_with_paths
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


def is_of_a_schedule(node: Any) -> bool:
    """Whether a state has nothing but the count that a schedule goes by."""
    return node._fields == ("count",) and jnp.shape(node.count) == ()


def of_leaves(node: Any, shapes: Mapping[str, Any]) -> tuple[str, list[str]] | None:
    """A field of a state that has arrays like the parameters, and their paths; None: there is none.

    Args:
        node: the state.
        shapes: of the trained leaves, by path.
    """
    for field, tree in zip(node._fields, node, strict=True):
        paths = [path for path, x in leaves_by_path(tree).items() if _is_like(path, x, shapes)]
        if paths:
            return field, paths
    return None


def _is_like(path: str, x: Any, shapes: Mapping[str, Any]) -> bool:
    shape, dtype = jnp.shape(x), getattr(x, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    # A scalar that is the whole field is a number of the state's.
    return is_float and shapes.get(path) == shape and bool(path or shape)


def refuse_traced(tree: Any, function: str, argument: str) -> None:
    """Raises where there are no values to look at."""
    if any(isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in jtu.tree_leaves(tree)):
        raise TypeError(
            f"{argument}: expected arrays, got traced or abstract ones. Call {function} outside of "
            "jit, vmap and eval_shape, for it reads counts"
        )


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
    return dict(leaves_with_paths(tree))
