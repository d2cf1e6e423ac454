"""Variables of an NNX model as nested dicts of arrays, and which of them go where."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from ..paths import path_string, select_trained
from ..plan import arena_dtype

Path = tuple[Any, ...]


def flat_values(tree: Any) -> dict[Path, Any]:
    """Path → array, of a module, a State, or a nested dict; Variables stand for their values."""
    if isinstance(tree, nnx.Pytree):
        tree = nnx.state(tree)
    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    values = flatten_dict(tree)
    return {path: x.get_value() if isinstance(x, nnx.Variable) else x for path, x in values.items()}


def fits_an_arena(path: Path, variable: Any) -> bool:
    """A filter of NNX: whether a Variable or an array holds floats that an arena holds."""
    value = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return False
    return arena_dtype(jax.ShapeDtypeStruct(shape, dtype)) is not None


def trained_tree(params: Any, trained: Sequence[Path], trainable: Any) -> Any:
    """The tree of bools that `TrainState.create` takes as `trainable`, or None where all are.

    Args:
        params: a nested dict of arrays.
        trained: the paths that the filter `wrt` selects.
        trainable: which of these are, as `TrainState.create` takes it.
    """
    own = {path: x for path, x in flatten_dict(params).items() if path in set(trained)}
    if len(own) == len(jtu.tree_leaves(params)):
        return trainable
    tree = unflatten_dict(own)
    found = jtu.tree_leaves_with_path(tree)
    flags = select_trained(
        trainable, tree, [path_string(key_path) for key_path, _ in found], [x for _, x in found]
    )
    chosen = flatten_dict(jtu.tree_structure(tree).unflatten(flags))
    return unflatten_dict({path: chosen.get(path, False) for path in flatten_dict(params)})


def gradient_tree(grads: Any, trained: Sequence[Path], frozen: Sequence[Path]) -> Any:
    """Gradients, in whatever form `nnx.grad` and its like give them, as the core's tree.

    Args:
        grads: a State, a nested dict, or a module, whose other variables are left out.
        trained: the paths that the filter `wrt` selects.
        frozen: those of the parameters that it does not select; None stands there.
    """
    if not isinstance(grads, nnx.Pytree | Mapping):
        raise TypeError(
            "grads: expected what nnx.grad gives (a State, or a dict of arrays), got a "
            f"{type(grads).__name__}"
        )
    values = flat_values(grads)
    if isinstance(grads, nnx.Pytree):
        values = {path: values[path] for path in trained if path in values}
    return unflatten_dict({**values, **dict.fromkeys(frozen)})
