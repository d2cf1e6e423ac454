"""Variables of an NNX model as nested dicts of arrays, and which of them go where."""

import functools
import operator
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from ..arena_layout import arena_dtype
from ..paths import path_string, select_trained

Path = tuple[Any, ...]


def flat_values(tree: Any) -> dict[Path, Any]:
    """Path → value, of the Variables of a module or a State: an array, or a tree of arrays."""
    state = nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree
    return {path: _value(x) for path, x in nnx.to_flat_state(state)}


def at(tree: Any, path: Path) -> Any:
    """What a nested dict has at a path."""
    return functools.reduce(operator.getitem, path, tree)


def check_selected(selected: Mapping[Path, Any], wrt: Any) -> None:
    """Raises a ValueError where a filter of NNX selects nothing to train."""
    if not selected:
        raise ValueError(f"wrt: the filter {wrt!r} selects no variable of the model")


def fits_an_arena(path: Path, variable: Any) -> bool:
    """A filter of NNX: whether a Variable or an array holds floats alone, as an arena does."""
    leaves = jtu.tree_leaves(_value(variable))
    return bool(leaves) and all(
        hasattr(x, "shape")
        and hasattr(x, "dtype")
        and arena_dtype(jax.ShapeDtypeStruct(x.shape, x.dtype)) is not None
        for x in leaves
    )


def trained_tree(trained: Mapping[Path, Any], frozen: Mapping[Path, Any], trainable: Any) -> Any:
    """The `trainable` that `TrainState.create` takes for both together.

    Args:
        trained: the Variables' values that the filter `wrt` selects.
        frozen: those of the parameters that it does not select.
        trainable: which of the trained are, as `TrainState.create` takes it.
    """
    if not frozen:
        return trainable
    tree = unflatten_dict(dict(trained))
    found = jtu.tree_leaves_with_path(tree)
    flags = select_trained(
        trainable, tree, [path_string(key_path) for key_path, _ in found], [x for _, x in found]
    )
    chosen = jtu.tree_structure(tree).unflatten(flags)
    flat = {path: jtu.tree_map(lambda _: False, x) for path, x in frozen.items()}
    flat |= {path: at(chosen, path) for path in trained}
    return unflatten_dict(flat)


def gradient_tree(grads: Any, trained: Collection[Path], frozen: Mapping[Path, Any]) -> Any:
    """Gradients, in whatever form `nnx.grad` and its like give them, as the core's tree.

    Args:
        grads: a State, a nested dict, or a module, whose other variables are left out.
        trained: the paths that the filter `wrt` selects.
        frozen: what stands at those of the parameters that it does not select.
    """
    if not isinstance(grads, nnx.Pytree | Mapping):
        raise TypeError(
            "grads: expected what nnx.grad gives (a State, or a dict of arrays), got a "
            f"{type(grads).__name__}"
        )
    if isinstance(grads, nnx.Pytree):
        found = flat_values(grads)
        values = {path: found[path] for path in trained if path in found}
    else:
        # A dict may also be the value of a Variable.
        known = {*trained, *frozen}
        nested = nnx.to_pure_dict(grads) if isinstance(grads, nnx.State) else grads
        values = flatten_dict(nested, is_leaf=lambda path, _: path in known)
        values = {path: _value(x) for path, x in values.items()}
    return unflatten_dict({**values, **frozen})


def _value(x: Any) -> Any:
    return x.get_value() if isinstance(x, nnx.Variable) else x
