"""The shapes in a checkpoint, read from its headers: no array is loaded, nothing is unpickled."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SAFETENSORS = {
    "F64": jnp.float64,
    "F32": jnp.float32,
    "F16": jnp.float16,
    "BF16": jnp.bfloat16,
    "I64": jnp.int64,
    "I32": jnp.int32,
    "I16": jnp.int16,
    "I8": jnp.int8,
    "U8": jnp.uint8,
    "BOOL": jnp.bool_,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
}


def checkpoint_shapes(path: Path) -> dict[str, Any]:
    """The arrays of a checkpoint as a nested dict of `jax.ShapeDtypeStruct`s.

    Of what `TrainState.to_leaves` gave, those of the parameters.

    Args:
        path: a .safetensors or .npz file, whose names are split at "/" or ".", or a folder that
            Orbax wrote (then orbax-checkpoint must be installed).

    Raises:
        ValueError: if the file is of no such kind, or damaged.
    """
    if path.is_dir():
        return _parameters(_orbax(path))
    readers = {".safetensors": _safetensors, ".npz": _npz}
    if path.suffix not in readers:
        raise ValueError(f"{path}: expected a .safetensors or .npz file, or a folder of Orbax")
    try:
        flat = readers[path.suffix](path)
    except (KeyError, TypeError, zipfile.BadZipFile, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a {path.suffix} file, or damaged: {error!r}") from error
    return _parameters(_nest(flat))


def _parameters(tree: dict[str, Any]) -> dict[str, Any]:
    ours = {"format", "optimizer", "params"} <= tree.keys()
    return tree["params"] if ours else tree


def _safetensors(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path}: not a .safetensors file, or damaged")
        header = json.loads(file.read(length))
    return {
        name: jax.ShapeDtypeStruct(tuple(entry["shape"]), np.dtype(_SAFETENSORS[entry["dtype"]]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _npz(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    found = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                major, _ = np.lib.format.read_magic(file)
                read = (
                    np.lib.format.read_array_header_1_0
                    if major == 1
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read(file)
            found[name.removesuffix(".npy")] = jax.ShapeDtypeStruct(shape, dtype)
    return found


def _orbax(path: Path) -> dict[str, Any]:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ValueError(f"{path}: reading it needs `pip install orbax-checkpoint`") from error
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path.resolve()).item_metadata
    if metadata is None:
        raise ValueError(f"{path}: not a checkpoint of Orbax")
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), dict(metadata.tree)
    )


def _nest(flat: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    separator = "/" if any("/" in name for name in flat) else "."
    tree: dict[str, Any] = {}
    for name, shape in flat.items():
        *parents, last = name.split(separator)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"the array {name!r} lies below another array")
        node[last] = shape
    return tree
