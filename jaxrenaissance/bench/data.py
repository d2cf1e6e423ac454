"""What the benchmarks' models are made of: shapes by name, and random values."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..models import MODELS, named_shapes

POOL = 2**22  # random values that larger arrays repeat, since drawing 10⁹ takes longer than timing
MOST_PARAMETERS = 10**15
_EQUAL_LEAVES = re.compile(r"(\d+)x(\d+(?:e\d+)?)")

SWEEPS = {
    "sizes": ("1x1e4", "1x1e5", "1x1e6", "1x3e6", "1x1e7", "1x3e7", "1x1e8", "1x3e8", "1x1e9"),
    "leaves": ("1x1e7", "10x1e6", "100x1e5", "400x25000", "1000x1e4", "2000x5000", "5000x2000"),
}
"""Models that show one thing: one leaf of 10⁴ to 10⁹ elements, and 10⁷ elements in many leaves."""


def shapes_of(model: str) -> Any:
    """The parameters' shapes of a named model, or of equal leaves.

    Args:
        model: a name of `jaxrenaissance.models`, or "LEAVESxSIZE" such as "100x1e5": one hundred
            vectors of 10⁵ elements.

    Raises:
        ValueError: if it is neither.
    """
    if model in MODELS:
        return named_shapes(model)
    equal = _EQUAL_LEAVES.fullmatch(model)
    leaves, size = (float(part) for part in equal.groups()) if equal else (0, 0)
    if leaves * size == 0:
        raise ValueError(
            f"--model: expected {', '.join(MODELS)}, or leaves and their size such as 100x1e5; "
            f"got {model!r}"
        )
    if leaves * size > MOST_PARAMETERS:
        raise ValueError(f"--model: {model} is more than any machine holds")
    vector = jax.ShapeDtypeStruct((int(size),), jnp.float32)
    return {f"layer_{i:05d}": {"kernel": vector} for i in range(int(leaves))}


def random_values(size: int, seed: int = 0) -> np.ndarray:
    """Normal float32 values: times on zeros would flatter. Those beyond `POOL` repeat."""
    return np.resize(_pool(size, seed), size)


def random_tree(shapes: Any, seed: int, scale: float, dtype: Any = jnp.float32) -> Any:
    """`random_values` in shapes, on the device; every leaf has its own."""
    flat, structure = jax.tree.flatten(shapes)
    leaves = []
    for i, leaf in enumerate(flat):
        # Repeated there, since bringing gigabytes to a device takes longer than timing it.
        values = jnp.resize(scale * _pool(leaf.size, seed + 2 * i), leaf.shape)
        leaves.append(values.astype(dtype))
    return jax.tree.unflatten(structure, leaves)


def _pool(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(min(size, POOL), np.float32)
