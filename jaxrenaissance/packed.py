"""Packed: any float tree in one arena a dtype; and the packing of trees that TrainState shares."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from . import backends, collectives, ops
from .ops.checks import leaf_dtypes
from .paths import leaves_with_paths
from .plan import MemoryPlan

Dtypes = tuple[tuple[np.dtype, ...], ...]
"""For each arena, a dtype for each of its leaves, in arena order."""

Arenas = tuple[jax.Array, ...]

_MAX_LISTED = 5


class _Static(NamedTuple):
    plan: MemoryPlan
    backend: str


class Packed:
    """A tree of float arrays that is one device buffer, for BatchNorm statistics and their like.

    Each array that crosses a jit boundary costs host time, about 3 µs; ResNet-50's batch statistics
    are 106 of them. Packed they are one, unpacked inside the step by one launch and packed again by
    another:

    >>> import jax, jax.numpy as jnp
    >>> import jaxrenaissance as jr
    >>> stats = jr.Packed({"mean": jnp.zeros(3), "var": jnp.ones(3)})
    >>> @jax.jit
    ... def step(stats):
    ...     return stats.replace(jax.tree.map(lambda x: x + 1, stats.tree))
    >>> step(stats).tree["var"].tolist()
    [2.0, 2.0, 2.0]

    It is a pytree whose leaves are the arenas: float32 for float32, bfloat16 and float16 leaves,
    float64 for float64 leaves.

    Args:
        tree: a tree of float arrays; its buffers are copied.
        backend: "auto", "cpu", "cuda" or "xla"; None: JAXRENAISSANCE_BACKEND, else "auto".

    Raises:
        ValueError: if a leaf is not a float array (names its path), or the backend is unknown.
    """

    __slots__ = ("_static", "arenas")

    arenas: Arenas
    _static: _Static

    def __init__(self, tree: Any, *, backend: str | None = None) -> None:
        refuse_sharded(tree, "tree")
        tree = canonical(tree)
        for path, leaf in leaves_with_paths(tree):
            dtype = getattr(leaf, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                what = f"has dtype {dtype}" if dtype is not None else f"is a {type(leaf).__name__}"
                raise ValueError(
                    f"Packed: the leaf {path!r} {what}, and an arena holds floats alone. "
                    "Keep such leaves beside the Packed, extra={'stats': Packed(…), …}"
                )
        plan = MemoryPlan.build(tree)
        self._static = _Static(plan, backends.resolve(backend))
        leaves = match(plan, tree, "tree")
        self.arenas = _pack(leaves, plan=plan, backend=self._static.backend)

    @property
    def plan(self) -> MemoryPlan:
        """Where each leaf lies."""
        return self._static.plan

    @property
    def backend(self) -> str:
        """What its ops run on: "auto", "cpu", "cuda" or "xla"."""
        return self._static.backend

    @property
    def tree(self) -> Any:
        """The tree, in the dtypes that were given."""
        plan, backend = self._static
        leaves = unpack(plan, self.arenas, given_dtypes(plan), backend=backend)
        return plan.treedef.unflatten(leaves)

    def replace(self, tree: Any) -> "Packed":
        """A Packed of the same plan with other values.

        Args:
            tree: like the one packed first; float32, bfloat16 and float16 may stand for each other.

        Raises:
            ValueError: if it has another structure, or a leaf another shape or a dtype that the
                arena does not hold, or is sharded over devices; names the paths.
        """
        refuse_sharded(tree, "tree")
        plan, backend = self._static
        leaves = match(plan, canonical(tree), "tree")
        return self._with(_pack(leaves, plan=plan, backend=backend))

    def _with(self, arenas: Arenas) -> "Packed":
        new = object.__new__(Packed)
        new.arenas, new._static = arenas, self._static
        return new

    def __repr__(self) -> str:
        return f"Packed({self._static.plan!r})"


def _flatten_packed(packed: Packed) -> tuple[tuple[tuple[Any, Arenas]], _Static]:
    return ((jtu.GetAttrKey("arenas"), packed.arenas),), packed._static


def _unflatten_packed(static: _Static, children: Iterable[Any]) -> Packed:
    packed = object.__new__(Packed)
    (packed.arenas,) = children
    packed._static = static
    return packed


jtu.register_pytree_with_keys(
    Packed, _flatten_packed, _unflatten_packed, lambda packed: ((packed.arenas,), packed._static)
)


def canonical(tree: Any) -> Any:
    """The tree with NumPy's 64-bit leaves as JAX takes them: as 32 bits unless x64 is enabled."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return leaf if dtype == leaf.dtype else np.asarray(leaf, dtype)
        return leaf

    return jtu.tree_map(convert, tree)


def refuse_sharded(tree: Any, argument: str) -> None:
    """Raises where a leaf is cut over devices: packing would silently gather it."""
    for i, leaf in enumerate(jtu.tree_leaves(tree)):
        if isinstance(leaf, jax.Array) and _is_sharded(leaf):
            path, _ = leaves_with_paths(tree)[i]
            raise ValueError(
                f"{argument}: the leaf {path!r} is sharded over several devices, and packing it "
                'would silently gather it. A state of TrainState.create(…, mesh=mesh, sharding="'
                'leaves") has leaves that are sharded; else give arrays of one device, or '
                "replicated ones: jax.device_put(params, NamedSharding(mesh, PartitionSpec()))"
            )


def placed(plan: MemoryPlan, tree: Any, argument: str) -> Any:
    """A tree like the one that was planned, whose trained leaves lie where the plan has them.

    Without a mesh, they are where they are; others are always.

    Raises:
        ValueError: if the plan has no mesh, and a leaf is sharded; or if the tree is not like it.
    """
    if plan.placement is None:
        refuse_sharded(tree, argument)
        return tree
    trained, others = split(plan, entries_of(plan, tree, argument))
    return merge(plan, on_mesh(plan, trained), plan.placement.put(others))


def on_mesh(plan: MemoryPlan, leaves: Sequence[Any]) -> list[Any]:
    """Trained leaves, in the tree's order, where the plan has them; without a mesh as they are."""
    if plan.placement is None:
        return list(leaves)
    specs = plan.placement.specs_of(plan.trained)
    return [plan.placement.put(x, spec) for x, spec in zip(leaves, specs, strict=True)]


def _is_sharded(leaf: jax.Array) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        spec = getattr(jax.typeof(leaf).sharding, "spec", ())
        return any(axes is not None for axes in spec)
    return len(leaf.sharding.device_set) > 1 and not leaf.sharding.is_fully_replicated


def given_dtypes(plan: MemoryPlan) -> Dtypes:
    """The dtypes in which the leaves were given."""
    return tuple(tuple(plan.leaves[i].dtype for i in arena.leaves) for arena in plan.arenas)


def arena_dtypes(plan: MemoryPlan) -> Dtypes:
    """The dtypes in which no leaf is rounded: the arenas'."""
    return tuple((arena.dtype,) * len(arena.leaves) for arena in plan.arenas)


def arena_order(plan: MemoryPlan) -> list[int]:
    """The trained leaves by their position in the arenas, one arena after the other.

    It is by these positions that the counters name a leaf.
    """
    return [i for arena in plan.arenas for i in arena.leaves]


def by_arena(plan: MemoryPlan, leaves: Sequence[Any]) -> list[list[Any]]:
    """Trained leaves in the tree's order → for each arena its leaves, in arena order."""
    return [[leaves[i] for i in arena.leaves] for arena in plan.arenas]


def in_tree_order(plan: MemoryPlan, by_arena: Sequence[Sequence[Any]]) -> list[Any]:
    """What `by_arena` was made of."""
    leaves: list[Any] = [None] * len(plan.leaves)
    for layout, own in zip(plan.arenas, by_arena, strict=True):
        for i, leaf in zip(layout.leaves, own, strict=True):
            leaves[i] = leaf
    return leaves


def pack(plan: MemoryPlan, leaves: Sequence[Any], *, backend: str) -> Arenas:
    """The arenas that hold the trained leaves, given in the tree's order; one launch an arena."""
    return _pack(list(leaves), plan=plan, backend=backend)


def unpack(
    plan: MemoryPlan, arenas: Sequence[jax.Array], dtypes: Dtypes, *, backend: str
) -> list[jax.Array]:
    """The trained leaves in the tree's order, in the given dtypes; one launch an arena.

    Raises:
        ValueError: if the arenas have leading axes, as those of a state that vmap made.
    """
    for arena in arenas:
        if jnp.ndim(arena) != 1:
            raise ValueError(
                f"the arenas have shape {jnp.shape(arena)}: this holds several members, made by "
                "jax.vmap. Read it under jax.vmap too: jax.vmap(lambda state: state.params)(state)"
            )
    return _unpack(tuple(arenas), plan=plan, dtypes=dtypes, backend=backend)


# Inlined into the step's own jit; called from Python, all leaves cost one dispatch.
@functools.partial(jax.jit, static_argnames=("plan", "backend"), inline=True)
def _pack(leaves: list[Any], *, plan: MemoryPlan, backend: str) -> Arenas:
    def local(leaves: list[Any]) -> Arenas:
        return collectives.own_pieces(plan, by_arena(plan, leaves), backend=backend)

    placement = plan.placement
    if placement is None:
        return local(leaves)
    specs = placement.specs_of(plan.trained)
    return placement.over_devices(local, (specs,), placement.arena_spec)(leaves)


@functools.partial(jax.jit, static_argnames=("plan", "dtypes", "backend"), inline=True)
def _unpack(arenas: Arenas, *, plan: MemoryPlan, dtypes: Dtypes, backend: str) -> list[jax.Array]:
    def local(arenas: Arenas) -> list[jax.Array]:
        if placement is not None and placement.form == "zero1":
            by_arena = collectives.gathered_leaves(plan, arenas, dtypes, backend=backend)
        else:
            by_arena = [
                ops.unpack(layout, arena, own, backend=backend)
                for layout, arena, own in zip(plan.arenas, arenas, dtypes, strict=True)
            ]
        return in_tree_order(plan, by_arena)

    placement = plan.placement
    if placement is None:
        return local(arenas)
    # Those without elements stay outside, see `over_devices`.
    full = [leaf.size > 0 for leaf in plan.leaves]
    specs = [s for s, own in zip(placement.specs_of(plan.trained), full, strict=True) if own]

    def some(arenas: Arenas) -> list[jax.Array]:
        return [x for x, own in zip(local(arenas), full, strict=True) if own]

    found = iter(placement.over_devices(some, (placement.arena_spec,), specs)(arenas))
    given, shapes = in_tree_order(plan, dtypes), _shapes_here(plan)
    return [
        next(found) if own else jnp.zeros(shapes[leaf.path], dtype)
        for leaf, own, dtype in zip(plan.leaves, full, given, strict=True)
    ]


def merge(plan: MemoryPlan, trained: Sequence[Any], others: Sequence[Any]) -> Any:
    """The whole tree, from its trained leaves and the others, both in the tree's order."""
    some, rest = iter(trained), iter(others)
    return plan.treedef.unflatten(
        [next(some) if is_trained else next(rest) for is_trained in plan.trained]
    )


def split(plan: MemoryPlan, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What stands for trained leaves, and for the others."""
    pairs = list(zip(values, plan.trained, strict=True))
    return [x for x, trained in pairs if trained], [x for x, trained in pairs if not trained]


def all_paths(plan: MemoryPlan) -> list[str]:
    """The paths of all leaves of the planned tree, also of those that are not trained."""
    template = plan.treedef.unflatten(range(plan.treedef.num_leaves))
    return [path for path, _ in leaves_with_paths(template)]


def match(plan: MemoryPlan, tree: Any, argument: str) -> list[Any]:
    """The trained leaves of a tree like the one that was planned, in the tree's order, checked.

    Leaves that are not trained may be anything there: an array, None, a whole subtree.

    Raises:
        ValueError: naming `argument` and the paths of leaves that are missing, extra, of another
            shape, of a dtype that the arena does not hold, or sharded over explicit axes in another
            way than the state.
    """
    entries, _ = split(plan, entries_of(plan, tree, argument))
    shapes_here = _shapes_here(plan)
    faults = []
    for leaf, entry in zip(plan.leaves, entries, strict=True):
        shape, dtype = getattr(entry, "shape", None), getattr(entry, "dtype", None)
        allowed = leaf_dtypes(plan.arenas[leaf.arena])
        wanted = shapes_here[leaf.path]
        if shape is None or dtype is None:
            faults.append(f"{leaf.path!r} is {_short(entry)}, wanted an array")
        elif tuple(shape) != wanted:
            faults.append(f"{leaf.path!r} has shape {tuple(shape)}, wanted {wanted}")
        elif dtype not in allowed:
            names = " or ".join(d.name for d in allowed)
            faults.append(f"{leaf.path!r} has dtype {dtype.name}, wanted {names}")
    if not faults and plan.placement is not None:
        specs = plan.placement.specs_of(plan.trained)
        for leaf, entry, spec in zip(plan.leaves, entries, specs, strict=True):
            got = plan.placement.wrong_spec(entry, spec)
            if got is not None and leaf.size:  # Others are wherever a device makes them.
                faults.append(
                    f"{leaf.path!r} is sharded as {got}, wanted {spec}; reshard it, or make the "
                    'state with sharding="leaves" from leaves that are sharded so'
                )
    if faults:
        raise ValueError(f"{argument}: {listed(faults)}")
    return entries


def _shapes_here(plan: MemoryPlan) -> dict[str, tuple[int, ...]]:
    """The shapes that leaves have here, by path: inside of `jax.shard_map` a device's own."""
    placement = plan.placement
    local = placement is not None and placement.form == "leaves" and placement.is_inside()
    shapes = {leaf.path: leaf.shape for leaf in plan.leaves}
    for layout in plan.arenas if local else ():
        for i, shape in zip(layout.leaves, layout.shapes, strict=True):
            shapes[plan.leaves[i].path] = shape
    return shapes


def entries_of(plan: MemoryPlan, tree: Any, argument: str) -> list[Any]:
    """What stands at each leaf of the planned tree: leaves, or anything where it is not trained.

    Raises:
        ValueError: if the structures do not match; names the paths.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    if treedef == plan.treedef:
        return leaves
    try:
        if not all(plan.trained):
            return plan.treedef.flatten_up_to(tree)
    except (TypeError, ValueError):
        pass
    raise ValueError(_structure_fault(plan, tree, argument))


def _structure_fault(plan: MemoryPlan, tree: Any, argument: str) -> str:
    wanted = [leaf.path for leaf in plan.leaves]
    known = set(all_paths(plan))
    got = {path for path, _ in leaves_with_paths(tree)}
    faults = [f"{path!r} is missing" for path in wanted if path not in got]
    faults += [f"{path!r} is not a leaf of the parameters" for path in sorted(got - known)]
    if not faults and not all(plan.trained):
        faults = ["the places of leaves that are not trained must be there, with None or anything"]
    if not faults:
        got_structure, wanted_structure = _short(jtu.tree_structure(tree)), _short(plan.treedef)
        faults = [f"other containers, got {got_structure}, wanted {wanted_structure}"]
    return f"{argument}: the tree does not match the parameters: {listed(faults)}"


def listed(faults: Sequence[str]) -> str:
    """The first few faults, and how many more there are."""
    more = len(faults) - _MAX_LISTED
    return "; ".join(faults[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}…"
