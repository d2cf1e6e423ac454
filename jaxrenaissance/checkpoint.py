"""What a checkpoint of a state holds: leaves by path, whatever the plan.

A state's own buffers depend on where the plan puts each leaf. Here every leaf stands by itself, in
nested dicts, so that it can be read without this package and restored under another plan.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from . import checkpoint_numbers, packed
from .arena_layout import ArenaLayout
from .checkpoint_reader import Reader, by_path, join, without_keys
from .contents import Contents
from .extra import copy
from .ops.checks import leaf_dtypes
from .packed import Packed
from .paths import leaves_with_paths
from .pieces import whole_layout
from .placement import Placement
from .plan import MemoryPlan
from .spec import Spec
from .static import Static
from .step import Arenas, Buffers

FORMAT = 1
"""The version of the format. A reader refuses any other."""

_FAMILIES = {
    "momentum": "momentum",
    "nesterov": "momentum",
    "adam": "adam",
    "adamw": "adam",
    "lamb": "adam",
    "lion": "lion",
    "lars": "lars",
    "lars_nesterov": "lars",
}
_MOMENTS = ("mu", "nu")
_BY_PATH = ("master", *_MOMENTS, "ema", "accumulator")
_HEAD = ("format", "optimizer")
_DEBIASED = "ema_debias"


def moments_of(spec: Spec) -> str | None:
    """What the moments are: those of one name can be handed on. None: there are none."""
    family = _FAMILIES.get(spec.kind)
    # There the learning rate is part of every leaf's momentum.
    return "lars in optax's form" if spec.trust == "lars_optax" else family


def to_leaves(contents: Contents, *, host: bool) -> dict[str, Any]:
    """See `TrainState.to_leaves`."""
    static, *arrays = contents
    buffers, *others = without_keys(tuple(arrays))
    placement = static.plan.placement
    if host and placement is not None and placement.form == "leaves":
        if placement.mesh.is_multi_process:
            raise ValueError(
                "to_leaves: leaves that are sharded over devices of several processes are on no "
                "host as a whole. Without host=True they are global arrays, which Orbax writes"
            )
        # JAX puts together what several devices hold.
        leaves = _head(static, *jax.device_get((buffers.floats, buffers.ints)))
        leaves |= jax.device_get(_body(static, buffers, *others))
    elif host:
        readable = functools.partial(_readable, placement)
        buffers, *others = jax.device_get(jtu.tree_map(readable, (buffers, *others)))
        leaves = _head(static, buffers.floats, buffers.ints)
        leaves |= _body(static, buffers, *others)
    else:
        # Copied, since the state's own buffers are donated some day.
        leaves = _traced_head(static, buffers.floats, buffers.ints)
        leaves |= _body(static, buffers, *copy(others))
    _check_paths(static.plan, contents, by_path(leaves, "to_leaves"))
    return _without_empty(leaves)


def _readable(placement: Placement | None, x: Any) -> Any:
    """The array, or a host's copy of one that several processes hold together."""
    if placement is None or not isinstance(x, jax.Array) or not placement.mesh.is_multi_process:
        return x
    whole = jax.device_put(x, NamedSharding(placement.mesh, PartitionSpec()))
    # At once, so that no more than one of them is on each device as a whole.
    return np.asarray(whole)


def _head(static: Static, floats: Any, ints: Any) -> dict[str, Any]:
    """What is no array of the model's: traced, or NumPy's where the numbers are."""
    np_or_jnp: Any = np if isinstance(ints, np.ndarray) else jnp
    return {
        "format": np_or_jnp.asarray(FORMAT, np.int32),
        "optimizer": {name: np_or_jnp.asarray(1, np.int32) for name in _label(static.spec)},
        **checkpoint_numbers.read(static.spec, static.plan, floats, ints),
    }


_traced_head = jax.jit(_head, static_argnums=0, inline=True)


def _body(
    static: Static, buffers: Buffers, frozen: tuple[Any, ...], extra: Any, ema_extra: Any
) -> dict[str, Any]:
    """All arrays of the model: NumPy's where the buffers are, else unpacked by launches.

    Outside of jit, all series share one compiled program: one that returns them all would take
    longer to compile than all else together.
    """
    spec, plan = static.spec, static.plan
    on_host = isinstance(buffers.ints, np.ndarray)
    unpack = _slices if on_host else functools.partial(packed.unpack, backend=spec.backend)
    wide = packed.arena_dtypes(plan)

    given = unpack(plan, buffers.weights, packed.given_dtypes(plan))
    leaves: dict[str, Any] = {"params": packed.merge(plan, given, frozen)}
    narrow = [leaf.dtype != plan.arenas[leaf.arena].dtype for leaf in plan.leaves]
    if any(narrow):
        leaves["master"] = _tree(plan, unpack(plan, buffers.weights, wide), narrow)
    for name, arenas in _series(spec, buffers).items():
        leaves[name] = _tree(plan, unpack(plan, arenas, wide))
    for name, tree in (("extra", extra), ("ema_extra", ema_extra)):
        if tree is not None:
            leaves[name] = _unpacked(tree, on_host=on_host)
    return leaves


def _check_paths(plan: MemoryPlan, contents: Contents, found: Mapping[str, Any]) -> None:
    """Raises where `from_leaves` would not find a leaf: its path depends on where the tree is."""
    wanted = [join("params", path) for path in packed.all_paths(plan)]
    for section in ("extra", "ema_extra"):
        for path, x in leaves_with_paths(getattr(contents, section), _is_packed):
            inner = packed.all_paths(x.plan) if isinstance(x, Packed) else [""]
            wanted += [join(join(section, path), rest) for rest in inner]
    lost = [path for path in wanted if path not in found]
    if lost:
        raise ValueError(
            f"to_leaves: no checkpoint can name the leaf {lost[0]!r}, since '' is a name in its "
            "tree. Rename it"
        )


def _without_empty(leaves: dict[str, Any]) -> dict[str, Any]:
    """The leaves but those without elements, which Orbax cannot write and a reader can make."""
    return {
        name: {path: x for path, x in part.items() if 0 not in x.shape}
        if name in _BY_PATH and isinstance(part, dict)
        else jtu.tree_map(lambda x: None if 0 in x.shape else x, part)
        for name, part in leaves.items()
    }


def from_leaves(leaves: Any, like: Contents) -> Contents:
    """See `TrainState.from_leaves`."""
    if any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves((leaves, tuple(like[1:])))):
        raise TypeError("from_leaves: the leaves or `like` are traced. Call it outside of jit")
    static = like.static
    like = Contents(static, *jtu.tree_map(_abstract_if_deleted, tuple(like[1:])))
    spec, plan, backend = static.spec, static.plan, static.spec.backend
    if plan.placement is None:
        packed.refuse_sharded(leaves, "leaves")
    found = by_path(dict(leaves) if isinstance(leaves, Mapping) else leaves, "leaves")
    if plan.placement is None and not any(map(_sharding, jtu.tree_leaves(tuple(like[1:])))):
        # What Orbax restores is committed to devices, and would compile the next step anew.
        committed = {path: x for path, x in found.items() if getattr(x, "committed", False)}
        found |= jax.device_get(committed)
    numbers = _numbers(found)
    _check_version(numbers)
    _check_optimizer(spec, found)
    reader = Reader(found)

    frozen = iter(like.frozen)
    params: list[Any] = []
    others: list[Any] = []
    for path, leaf in zip(packed.all_paths(plan), _slots(plan), strict=True):
        if leaf is None:
            others.append(reader.like("params", path, next(frozen)))
        else:
            dtypes = leaf_dtypes(plan.arenas[leaf.arena])
            params.append(reader.read("params", path, leaf.shape, dtypes, leaf.dtype))
    wide = [plan.arenas[leaf.arena].dtype for leaf in plan.leaves]
    masters = [
        reader.read("master", leaf.path, leaf.shape, (dtype,), dtype)
        if given is not None and (given.dtype != dtype or reader.has("master", leaf.path))
        else None
        for leaf, given, dtype in zip(plan.leaves, params, wide, strict=True)
    ]
    series = {
        name: [
            reader.read(name, leaf.path, leaf.shape, (dtype,), dtype)
            for leaf, dtype in zip(plan.leaves, wide, strict=True)
        ]
        for name in _series(spec, like.buffers)
    }
    extra = _read_extra(reader, "extra", like.extra)
    ema_extra = _read_extra(reader, "ema_extra", like.ema_extra)

    unknown = [path for path in found if path not in reader.seen and path not in numbers]
    faults = reader.faults + [f"{path!r} is not in the state" for path in unknown]
    if faults:
        raise ValueError(f"leaves: they do not match the state: {packed.listed(faults)}")

    of_state = {path: x for path, x in numbers.items() if _section(path) not in _HEAD}
    known = None
    if isinstance(like.buffers.ints, jax.Array | np.ndarray):
        known = jax.device_get((like.buffers.floats, like.buffers.ints))
    floats, ints = checkpoint_numbers.restore(spec, plan, of_state, known)
    # One after the other: before it is cut, a series lies on each device as a whole.
    arenas = {
        name: packed.pack(plan, packed.on_mesh(plan, own), backend=backend)
        for name, own in series.items()
    }
    params = packed.on_mesh(plan, params)
    masters = packed.on_mesh(plan, masters)
    moments = [arenas[name] for name in _MOMENTS if name in arenas]
    buffers = like.buffers._replace(
        weights=packed.pack(plan, _unrounded(params, masters), backend=backend),
        moments=tuple(zip(*moments, strict=True)) or ((),) * len(plan.arenas),
        ema=arenas.get("ema", ()),
        accumulator=arenas.get("accumulator", ()),
        norms=tuple(jnp.zeros(x.shape, x.dtype) for x in like.buffers.norms),
        ratios=tuple(jnp.ones(x.shape, x.dtype) for x in like.buffers.ratios),
        floats=jnp.asarray(floats),
        ints=jnp.asarray(ints),
    )
    new = (buffers, *copy((tuple(others), extra, ema_extra)))
    if plan.placement is not None:
        new = plan.placement.put(new)
    return Contents(static, *jtu.tree_map(_placed, new, tuple(like[1:])))


def _label(spec: Spec) -> list[str]:
    """The optimizer's name, and what else says how to read its buffers."""
    name = f"{spec.kind}_optax_form" if spec.trust == "lars_optax" else spec.kind
    return [name, _DEBIASED] if spec.ema_debias else [name]


def _series(spec: Spec, buffers: Buffers) -> dict[str, Arenas]:
    """What is kept of each weight beside it, by its name in a checkpoint."""
    moments = [tuple(own[k] for own in buffers.moments) for k in range(spec.config.moments)]
    found: dict[str, Arenas] = dict(zip(_MOMENTS, moments, strict=False))
    if spec.ema:
        found["ema"] = buffers.ema
    if spec.accumulate:
        found["accumulator"] = buffers.accumulator
    return found


def _slices(plan: MemoryPlan, arenas: Sequence[Any], dtypes: packed.Dtypes) -> list[Any]:
    """`packed.unpack` on the host: copies, in the tree's order. Arenas are those of all devices."""
    leaves: list[Any] = [None] * len(plan.leaves)
    for k, (layout, arena, own) in enumerate(zip(plan.arenas, arenas, dtypes, strict=True)):
        flat = [
            np.empty(plan.leaves[i].size, dtype)
            for i, dtype in zip(layout.leaves, own, strict=True)
        ]
        with np.errstate(over="ignore"):  # Too large for float16 is infinity there, too.
            for start, size, leaf, offset, _ in _whole(plan, k).segments.tolist():
                flat[leaf][offset : offset + size] = arena[start : start + size]
        for i, x in zip(layout.leaves, flat, strict=True):
            leaves[i] = x.reshape(plan.leaves[i].shape)
    return leaves


def _whole(plan: MemoryPlan, arena: int) -> ArenaLayout:
    """The layout of an arena with the pieces of all devices."""
    layout = plan.arenas[arena]
    if plan.shards == 1:
        return layout
    return whole_layout(layout, plan.leaves_of(arena), plan.shards, layout.dtype)


def _unpacked(tree: Any, *, on_host: bool) -> Any:
    """The tree with each `Packed` as the tree it holds, in which nothing is rounded."""

    def open_(x: Any) -> Any:
        if not isinstance(x, Packed):
            return x
        dtypes = packed.arena_dtypes(x.plan)
        if on_host:
            leaves = _slices(x.plan, x.arenas, dtypes)
        else:
            leaves = packed.unpack(x.plan, x.arenas, dtypes, backend=x.backend)
        return x.plan.treedef.unflatten(leaves)

    return jtu.tree_map(open_, tree, is_leaf=_is_packed)


def _read_extra(reader: Reader, section: str, like: Any) -> Any:
    def read(path: str, x: Any) -> Any:
        if not isinstance(x, Packed):
            return reader.like(section, path, x)
        leaves = []
        for leaf in x.plan.leaves:
            layout = x.plan.arenas[leaf.arena]
            own = join(path, leaf.path)
            leaves.append(reader.read(section, own, leaf.shape, leaf_dtypes(layout), layout.dtype))
        complete = all(leaf is not None for leaf in leaves)
        return x.replace(x.plan.treedef.unflatten(leaves)) if complete else None

    treedef = jtu.tree_structure(like, is_leaf=_is_packed)
    return treedef.unflatten([read(*entry) for entry in leaves_with_paths(like, _is_packed)])


@jax.jit(inline=True)
def _unrounded(params: list[Any], masters: list[Any]) -> list[Any]:
    """The weights in full precision, but for elements that were changed in `params` since."""
    return [
        given
        if master is None
        else jnp.where(given == master.astype(given.dtype), master, given.astype(master.dtype))
        for given, master in zip(params, masters, strict=True)
    ]


def _numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    """All that is a number and not a leaf, by path, on the host."""
    sections = (*_HEAD, *checkpoint_numbers.SECTIONS)
    numbers = {path: x for path, x in found.items() if _section(path) in sections}
    for path, x in numbers.items():
        if np.shape(x) != () or isinstance(x, jax.ShapeDtypeStruct):
            raise ValueError(f"leaves: {path!r} is {x!r:.100}, wanted a number")
    return jax.device_get(numbers)


def _check_version(numbers: Mapping[str, Any]) -> None:
    version = numbers.get("format")
    if version is None:
        raise ValueError(
            "leaves: 'format' is missing, so they are not what state.to_leaves() gives; parameters "
            "alone go to TrainState.create"
        )
    if version != FORMAT:
        raise ValueError(
            f"leaves: 'format' is {version}, and this version of jaxrenaissance reads {FORMAT}"
        )


def _check_optimizer(spec: Spec, found: Mapping[str, Any]) -> None:
    """Raises where moments or averages of the checkpoint mean something else."""
    labels = {path.partition("/")[2] for path in found if _section(path) == "optimizer"}
    debiased = _DEBIASED in labels
    kind = ", ".join(labels - {_DEBIASED})
    lars_form = kind.endswith("_optax_form")
    got = "lars in optax's form" if lars_form else _FAMILIES.get(kind)
    wanted = moments_of(spec)
    moments = [path for path in found if _section(path) in _MOMENTS]
    if got is not None and wanted is not None and got != wanted:
        raise ValueError(
            f"leaves: the moments are those of {kind}, and {_label(spec)[0]} has others of the "
            f"same names: {packed.listed([*map(repr, moments)])}. Start them anew: "
            "TrainState.create(leaves['params'], optimizer)"
        )
    if spec.ema and debiased != spec.ema_debias and any(_section(p) == "ema" for p in found):
        raise ValueError(
            f"leaves: the average is {'' if debiased else 'not '}debiased, and that of `like` "
            f"{'not' if debiased else 'is'}: make its optimizer with ema_debias={debiased}"
        )


def _sharding(x: Any) -> Any:
    """Where an array is committed to, or an abstract one is to be; or None."""
    if isinstance(x, jax.Array) and not x.committed:
        return None
    sharding = getattr(x, "sharding", None)
    # What is traced over a mesh of explicit axes knows none of its devices.
    abstract = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    return None if abstract else sharding


def _abstract_if_deleted(x: Any) -> Any:
    """What was donated has a shape and a place still, and no values."""
    if isinstance(x, jax.Array) and x.is_deleted():
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x))
    return x


def _placed(new: Any, old: Any) -> Any:
    """The new array where the old one is, or is to be."""
    sharding = _sharding(old)
    return new if sharding is None else jax.device_put(new, sharding)


def _tree(plan: MemoryPlan, leaves: Sequence[Any], chosen: Sequence[bool] | None = None) -> Any:
    """The leaves, or the chosen ones, by path; of a tree that is a single leaf, this leaf."""
    if [leaf.path for leaf in plan.leaves] == [""]:
        return leaves[0]
    return {
        leaf.path: x
        for leaf, x, is_chosen in zip(
            plan.leaves, leaves, chosen or [True] * len(leaves), strict=True
        )
        if is_chosen
    }


def _slots(plan: MemoryPlan) -> list[Any]:
    """For each leaf of the whole tree the trained `Leaf`, or None."""
    leaves = iter(plan.leaves)
    return [next(leaves) if trained else None for trained in plan.trained]


def _is_packed(x: Any) -> bool:
    return isinstance(x, Packed)


def _section(path: str) -> str:
    return path.partition("/")[0]
