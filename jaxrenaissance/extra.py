"""What a state carries beside the parameters: checked, and held back where a step is bad."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .paths import path_string


@jax.jit(inline=True)
def copy(tree: Any) -> Any:
    """Arrays of their own, which nobody else donates."""
    return jtu.tree_map(jnp.copy, tree)


def hold_back(old: Any, new: Any, bad: jax.Array) -> Any:
    """The new extra, or the old one where `bad`."""
    return jtu.tree_map(functools.partial(jnp.where, bad), old, new)


def check_like(old: Any, new: Any) -> None:
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
