"""Placement: over which devices of a mesh a state lies, and how."""

import dataclasses
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Placement:
    """Over which devices a state lies: a part of its plan, static and hashable.

    Attributes:
        mesh: the devices.
        form: "replicated": every device holds whole arenas. "zero1": each holds a piece of every
            segment. "leaves": each holds what it has of every leaf.
        axes: of the mesh; those over which gradients are averaged, and "zero1" cuts; with "leaves"
            all of them.
        reduce_dtype: in which gradients cross the links; None: as the arenas are.
        leaf_specs: with "leaves", of each leaf of the tree.
    """

    mesh: Mesh
    form: str
    axes: tuple[str, ...]
    reduce_dtype: np.dtype | None = None
    leaf_specs: tuple[PartitionSpec, ...] = ()

    @property
    def devices(self) -> int:
        """How many devices the axes count."""
        return prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def shards(self) -> int:
        """Into how many pieces the segments are cut."""
        return self.devices if self.form == "zero1" else 1

    @property
    def arena_spec(self) -> PartitionSpec:
        """Of an arena, which is the devices' pieces one after the other."""
        if self.form == "replicated":
            return PartitionSpec()
        # As XLA writes it, or the second call would compile anew.
        return PartitionSpec(self.axes[0] if len(self.axes) == 1 else self.axes)

    def specs_of(self, chosen: Sequence[bool]) -> list[PartitionSpec]:
        """Of those leaves of the tree that are chosen."""
        if self.form != "leaves":
            return [PartitionSpec()] * sum(chosen)
        return [spec for spec, own in zip(self.leaf_specs, chosen, strict=True) if own]

    def local_shape(self, shape: Sequence[int], spec: PartitionSpec) -> tuple[int, ...]:
        """What each device has of an array."""
        return NamedSharding(self.mesh, spec).shard_shape(tuple(shape))

    def is_inside(self) -> bool:
        """Whether this is traced inside of a `jax.shard_map` over the axes.

        Raises:
            ValueError: if it is one not over all of the axes, or over others of these names.
        """
        context = jax.sharding.get_abstract_mesh()
        if not context.manual_axes:
            return False
        sizes = {axis: context.shape[axis] for axis in context.manual_axes}
        wanted = {axis: self.mesh.shape[axis] for axis in self.axes}
        if wanted.items() - sizes.items():
            raise ValueError(
                f"mesh: the state lies over the axes {wanted}, and this jax.shard_map is over "
                f"{sizes}"
            )
        return True

    def over_devices(
        self, fn: Callable[..., Any], in_specs: Sequence[Any], out_specs: Any
    ) -> Callable[..., Any]:
        """The function as each device runs it, on its own parts of the operands.

        Args:
            fn: works on local arrays. It is called as it is where this is already so.
            in_specs: for each operand a `PartitionSpec`, or a tree of them.
            out_specs: likewise, for the result.
        """
        if self.is_inside():
            return fn

        def run(*operands: Any) -> Any:
            specs = jtu.tree_leaves(
                jax.tree.broadcast(tuple(in_specs), operands, is_leaf=_is_spec), is_leaf=_is_spec
            )
            leaves, treedef = jtu.tree_flatten(operands)
            # JAX 0.11 breaks down over arrays without elements on several devices of the host.
            full = [np.size(x) > 0 for x in leaves]

            def local(*some: Any) -> Any:
                rest = iter(some)
                every = [
                    next(rest) if is_full else jnp.zeros(self.local_shape(x.shape, spec), x.dtype)
                    for x, spec, is_full in zip(leaves, specs, full, strict=True)
                ]
                return fn(*treedef.unflatten(every))

            chosen = tuple(s for s, is_full in zip(specs, full, strict=True) if is_full)
            # Some of what comes out is the same on all devices by what it was made of, which
            # JAX's checks cannot know.
            each = jax.shard_map(
                local, mesh=self.mesh, in_specs=chosen, out_specs=out_specs, check_vma=False
            )
            return each(*(x for x, is_full in zip(leaves, full, strict=True) if is_full))

        return run

    def put(self, tree: Any, spec: PartitionSpec | None = None) -> Any:
        """A tree's arrays on the mesh: by the spec, or where they lie on it, or on all devices.

        What is no array is as it is, and so is what is traced, but over explicit axes.
        """
        if self.is_inside():
            return tree

        def place(x: Any) -> Any:
            if isinstance(x, jax.core.Tracer):
                if spec is None or self.wrong_spec(x, spec) is None:
                    return x
                return jax.sharding.reshard(x, NamedSharding(self.mesh, spec))
            if not isinstance(x, jax.Array | np.ndarray | np.generic):
                return x
            before = getattr(x, "sharding", None)
            if spec is not None:
                own = spec
            elif isinstance(before, NamedSharding) and before.mesh == self.mesh:
                own = before.spec
            else:
                own = PartitionSpec()
            return _put(x, NamedSharding(self.mesh, own))

        return jtu.tree_map(place, tree)

    def wrong_spec(self, x: Any, wanted: PartitionSpec) -> PartitionSpec | None:
        """How an array is sharded over explicit axes, if it is not as it should be."""
        sharding: Any = jax.typeof(x).sharding
        if sharding.mesh.empty or not sharding.mesh.are_all_axes_explicit or self.is_inside():
            return None
        got, own = (NamedSharding(self.mesh, spec) for spec in (sharding.spec, wanted))
        return None if got.is_equivalent_to(own, np.ndim(x)) else sharding.spec

    def varying(self, tree: Any) -> Any:
        """Inside of `jax.shard_map` with its checks: each device's own, so that JAX adds up no
        gradients by itself."""
        if not (self.is_inside() and self.is_checked()):
            return tree

        def mark(x: Any) -> Any:
            missing = tuple(axis for axis in self.axes if axis not in varying_axes(x))
            return jax.lax.pcast(x, missing, to="varying") if missing else x

        return jtu.tree_map(mark, tree)

    def is_checked(self) -> bool:
        """Whether the `jax.shard_map` around knows what varies over its axes."""
        return bool(varying_axes(jax.lax.axis_index(self.axes[0])))


def axes_of(spec: PartitionSpec) -> set[str]:
    """The axes of a mesh that a spec names."""
    names: set[str] = set()
    for entry in spec:
        names |= set(entry) if isinstance(entry, tuple) else {entry} if entry else set()
    return names


def _put(x: Any, sharding: NamedSharding) -> Any:
    """As `jax.device_put`, which puts on devices of several processes only what is on the host."""
    is_local = not isinstance(x, jax.Array) or x.is_fully_addressable
    if not (is_local and sharding.mesh.is_multi_process):
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(np.asarray(x), sharding)


def varying_axes(x: Any) -> frozenset[str]:
    """The axes of `jax.shard_map` over which an array varies, where its checks are on."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def spec_of(x: Any) -> PartitionSpec:
    """How an array lies on its mesh."""
    return getattr(getattr(x, "sharding", None), "spec", PartitionSpec())


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
