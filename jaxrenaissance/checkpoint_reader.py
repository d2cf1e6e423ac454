"""How arrays go into a checkpoint and come out of it: by path, checked."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .paths import leaves_with_paths


class Reader:
    """Takes arrays out of a checkpoint, and notes what is wrong with them."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.found = found
        self.seen: set[str] = set()
        self.faults: list[str] = []

    def has(self, section: str, path: str) -> bool:
        """Whether there is such an array."""
        return self._place(join(section, path)) in self.found

    def _place(self, path: str) -> str:
        # Orbax gives back a Variable of NNX as a dict of what it writes of it.
        wrapped = join(path, "value")
        return wrapped if path not in self.found and wrapped in self.found else path

    def read(
        self,
        section: str,
        path: str,
        shape: tuple[int, ...],
        dtypes: Sequence[np.dtype],
        without_name: np.dtype,
    ) -> Any:
        """The array, or None and a fault. What npz files give back as bare bytes is `without_name`.

        One without elements need not be there.

        Args:
            section, path: where it stands.
            shape, dtypes: what is wanted.
            without_name: of what NumPy's files have no name for, such as bfloat16.
        """
        path = self._place(join(section, path))
        self.seen.add(path)
        x = self.found.get(path)
        if x is None and 0 in shape:
            return np.zeros(shape, without_name)
        if x is None:
            self.faults.append(f"{path!r} is missing")
            return None
        if getattr(x, "dtype", None) == np.dtype(f"V{without_name.itemsize}"):
            x = x.view(without_name)
        got, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if got != shape:
            self.faults.append(f"{path!r} has shape {got}, wanted {shape}")
        elif dtype not in dtypes:
            names = " or ".join(d.name for d in dtypes)
            self.faults.append(f"{path!r} has dtype {dtype}, wanted {names}")
        else:
            return x
        return None

    def like(self, section: str, path: str, old: Any) -> Any:
        """An array of the shape and dtype of another; a key from its data."""
        if not _is_key(old):
            dtype = np.dtype(old.dtype)
            return self.read(section, path, old.shape, (dtype,), dtype)
        kinds = []

        def data_of(key: jax.Array) -> jax.Array:
            kinds.append(jax.random.key_impl(key))
            return jax.random.key_data(key)

        data = jax.eval_shape(data_of, old)
        x = self.read(section, path, data.shape, (data.dtype,), data.dtype)
        return None if x is None else jax.random.wrap_key_data(jnp.asarray(x), impl=kinds[0])


def by_path(tree: Any, argument: str) -> dict[str, Any]:
    """The leaves of a tree by their paths, which must differ."""
    found: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(tree):
        if path in found:
            raise ValueError(f"{argument}: two leaves have the path {path!r}")
        found[path] = leaf
    return found


def without_keys(tree: Any) -> Any:
    """The tree with the data of PRNG keys in place of them."""
    return jtu.tree_map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def join(first: str, rest: str) -> str:
    """A path inside of another; that of a single leaf is empty."""
    return f"{first}/{rest}" if first and rest else first or rest
