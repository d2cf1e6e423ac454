"""The dtypes of the leaves of `TrainState.compute_params`, from its `compute_dtype` argument."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .arena_layout import Leaf
from .ops.checks import leaf_dtypes
from .packed import Dtypes
from .paths import check_matched, matches
from .plan import MemoryPlan
from .regions import Region

ComputeDtype = Any
"""None, a dtype, its name, or a mapping from `Region`s or path patterns to dtypes."""

NORMS = (Region.W_BN_BIAS, Region.W_BN_WEIGHT)
_BUT_NORMS = ("bfloat16", "float16")


def resolve(compute_dtype: ComputeDtype, plan: MemoryPlan) -> Dtypes:
    """For each arena the compute dtypes of its leaves, in arena order. See `TrainState.create`.

    Raises:
        TypeError: if something is not a dtype.
        ValueError: if an arena has no such leaves, or a pattern matches nothing.
    """
    if isinstance(compute_dtype, Mapping):
        _check_keys(compute_dtype, plan)
    rows = []
    for layout in plan.arenas:
        row = []
        for i in layout.leaves:
            leaf = plan.leaves[i]
            dtype = _of_leaf(compute_dtype, leaf)
            if dtype not in leaf_dtypes(layout):
                wanted = ", ".join(d.name for d in leaf_dtypes(layout))
                raise ValueError(
                    f"compute_dtype: got {dtype.name} for the leaf {leaf.path!r}, "
                    f"wanted one of {wanted}"
                )
            row.append(dtype)
        rows.append(tuple(row))
    return tuple(rows)


def _of_leaf(compute_dtype: ComputeDtype, leaf: Leaf) -> np.dtype:
    if compute_dtype is None:
        return leaf.dtype
    if isinstance(compute_dtype, Mapping):
        for key, dtype in compute_dtype.items():
            if key == leaf.region if isinstance(key, Region) else matches(key, leaf.path):
                return _dtype(dtype)
        return leaf.dtype
    # Only as a word: a dtype object means every leaf.
    if isinstance(compute_dtype, str) and compute_dtype in _BUT_NORMS and leaf.region in NORMS:
        return leaf.dtype
    return _dtype(compute_dtype)


def _check_keys(mapping: Mapping[Any, Any], plan: MemoryPlan) -> None:
    for key in mapping:
        if isinstance(key, Region) and key.series != "W":
            raise ValueError(f"compute_dtype: expected a region of series W, got {key.name}")
    patterns = [key for key in mapping if not isinstance(key, Region)]
    check_matched(patterns, [leaf.path for leaf in plan.leaves], "compute_dtype")


def _dtype(value: Any) -> np.dtype:
    try:
        return jnp.dtype(value)
    except TypeError as error:
        raise TypeError(
            'compute_dtype: expected "bfloat16", "float16", a dtype or a mapping from patterns or '
            f"regions to dtypes, got {value!r}"
        ) from error
