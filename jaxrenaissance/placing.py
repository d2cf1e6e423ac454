"""From the arguments of `TrainState.create` that say over which devices a state lies to its plan's
placement.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .paths import leaves_with_paths
from .placement import Placement

FORMS = ("replicated", "zero1", "leaves")


def placement_of(
    tree: Any,
    mesh: Mesh | None,
    data_axis: str | Sequence[str],
    sharding: str,
    reduce_dtype: Any,
) -> Placement | None:
    """What the arguments of `TrainState.create` say; None without a mesh.

    Raises:
        TypeError: if the mesh is none.
        ValueError: if an argument is not one of what it can be, or a leaf does not lie on the mesh.
    """
    if sharding not in FORMS:
        raise ValueError(f"sharding: expected one of {', '.join(FORMS)}; got {sharding!r}")
    if mesh is None:
        if sharding != "replicated":
            raise ValueError(f"sharding: {sharding!r} needs a mesh, and mesh is None")
        if reduce_dtype is not None:
            raise ValueError("reduce_dtype: it is for gradients of several devices; give a mesh")
        return None
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got a {type(mesh).__name__}")
    if sharding == "leaves":
        if reduce_dtype is not None:
            raise ValueError(
                'reduce_dtype: with sharding="leaves" the gradients are yours to reduce; cast '
                "them before"
            )
        return of_other_leaves(Placement(mesh, sharding, tuple(mesh.axis_names)), tree)
    axes = (data_axis,) if isinstance(data_axis, str) else tuple(data_axis)
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    if unknown or not axes:
        raise ValueError(
            f"data_axis: expected axes of the mesh, {', '.join(map(repr, mesh.axis_names))}; got "
            f"{data_axis!r}"
        )
    return Placement(mesh, sharding, axes, _reduce_dtype(reduce_dtype))


def of_other_leaves(placement: Placement | None, tree: Any) -> Placement | None:
    """The same for another tree, whose leaves say with "leaves" how they lie."""
    if placement is None or placement.form != "leaves":
        return placement
    specs = tuple(_leaf_spec(path, x, placement.mesh) for path, x in leaves_with_paths(tree))
    return dataclasses.replace(placement, leaf_specs=specs)


def _reduce_dtype(given: Any) -> np.dtype | None:
    if given is None:
        return None
    allowed = (jnp.float32, jnp.bfloat16, jnp.float16)
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype not in allowed:
        raise ValueError(
            f"reduce_dtype: expected float32, bfloat16, float16 or None, got {given!r}"
        )
    return dtype


def _leaf_spec(path: str, leaf: Any, mesh: Mesh) -> PartitionSpec:
    """How a leaf lies on the mesh; one that does not is to be on all devices."""
    if isinstance(leaf, jax.core.Tracer):
        sharding: Any = jax.typeof(leaf).sharding
        if sharding.mesh.empty or not sharding.mesh.are_all_axes_explicit:
            raise ValueError(
                f'sharding: the leaf {path!r} is traced, and with "leaves" it must be known how '
                "it lies on the mesh. Call this outside of jit, or use a mesh of explicit axes"
            )
        return _shortest(sharding.spec)
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        if sharding is not None and len(sharding.device_set) > 1:
            raise ValueError(
                f"sharding: the leaf {path!r} has {sharding}, wanted a NamedSharding on the mesh"
            )
        return PartitionSpec()
    if sharding.mesh.abstract_mesh != mesh.abstract_mesh:
        if sharding.is_fully_replicated:
            return PartitionSpec()
        raise ValueError(
            f"mesh: the leaf {path!r} is sharded over {sharding.mesh}, not over the state's {mesh}"
        )
    return _shortest(sharding.spec)


def _shortest(spec: PartitionSpec) -> PartitionSpec:
    """The one of several specs for the same thing, so that equal plans compare equal."""
    entries = [x[0] if isinstance(x, tuple) and len(x) == 1 else x or None for x in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
