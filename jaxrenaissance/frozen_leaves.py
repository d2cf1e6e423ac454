"""The leaves of a state that are not trained: arrays, kept as they were given."""

from typing import Any

import jax
import jax.core
import jax.tree_util as jtu

from . import packed
from .extra import copy
from .paths import path_string
from .plan import MemoryPlan


def check_arrays(plan: MemoryPlan, params: Any, argument: str) -> None:
    """Raises where a leaf that is not trained is no array."""
    for (key_path, leaf), trained in zip(
        jtu.tree_leaves_with_path(params), plan.trained, strict=True
    ):
        if not trained and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(
                f"{argument}: the leaf {path_string(key_path)!r} is a {type(leaf).__name__}, and a "
                "state holds arrays. Take it out of the tree; for a model of Equinox with "
                "eqx.filter(model, eqx.is_array)"
            )


def copies(frozen: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays that outlive the state's donation; traced ones as they are."""
    if any(isinstance(x, jax.core.Tracer) for x in frozen):
        return frozen
    return copy(frozen)


def renewed(plan: MemoryPlan, frozen: tuple[Any, ...], params: Any) -> tuple[Any, ...]:
    """Those of new parameters, where None stands for what stays.

    Raises:
        ValueError: if one has another shape or dtype than before; names the path.
    """
    _, given = packed.split(plan, packed.entries_of(plan, params, "params"))
    _, paths = packed.split(plan, packed.all_paths(plan))
    for path, old, new in zip(paths, frozen, given, strict=True):
        kind = getattr(new, "shape", None), getattr(new, "dtype", None)
        if new is not None and kind != (old.shape, old.dtype):
            raise ValueError(
                f"params: {path!r} has shape {kind[0]} and dtype {kind[1]}, "
                f"wanted {old.shape} and {old.dtype}"
            )
    return tuple(old if new is None else copy(new) for old, new in zip(frozen, given, strict=True))
