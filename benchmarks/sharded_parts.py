"""The parts of ours with "zero1", each alone; and what crosses the links in a program."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bench_update import arena_steps, initial_floats
from jax.sharding import NamedSharding, PartitionSpec
from sharded_sides import EACH, SAME, Work, our_state, own_gradients

from jaxrenaissance import collectives, ops, packed, scalars
from jaxrenaissance.bench.data import random_values
from jaxrenaissance.bench.sides import Side
from jaxrenaissance.pieces import gathering

AXIS = "data"


def bare_collectives(work: Work, size: int, sums: np.dtype) -> Side:
    """One reduce-scatter and one all-gather, of pieces of ``size`` elements and nothing else.

    Each takes one element of what the one before it gave.
    """

    def local(carry: Any, _: Any) -> Any:
        whole, piece, _ = carry
        own = jax.lax.psum_scatter(whole, AXIS, tiled=True)
        piece = piece.at[0].set((own[0] / work.devices).astype(piece.dtype))
        everything = jax.lax.all_gather(piece, AXIS, tiled=True)
        return whole.at[0].set(everything[-1].astype(whole.dtype)), piece, everything

    whole = _random(work, size * work.devices**2, sums, EACH)
    piece = _random(work, size * work.devices, work.dtype, EACH)
    state = (whole, piece, _random(work, size * work.devices, work.dtype, SAME))
    specs = (EACH, EACH, SAME)
    return Side(_mapped(work, local, (specs, SAME), specs), state, ())


def local_work(work: Work, sums: np.dtype) -> Side:
    """A step of ours with "zero1" but for its collectives, on arrays of the same sizes.

    In place of a reduce-scatter a device takes its own piece, and in place of an all-gather it
    puts its piece back.
    """
    plan = our_state(work, "zero1", sums).plan
    (layout,), leaves = plan.arenas, plan.leaves_of(0)
    how = gathering(layout, leaves, plan.shards, (work.dtype,) * len(leaves))
    (whole,) = how.wholes

    def local(carry: Any, noise: Any) -> Any:
        state, everything, compute = carry
        own = packed.by_arena(plan, jax.tree.leaves(own_gradients(compute, noise)))
        arenas = collectives.whole_arenas(plan, own, dtype=sums, backend="auto")
        (gradient,) = collectives.cut(plan, arenas)
        state = arena_steps(layout, False, 1, state, gradient.astype(layout.dtype))
        piece = state[2]
        if how.narrowing is not None:
            (piece,) = ops.unpack(how.narrowing, piece, [work.dtype], backend="auto")
        place = jax.lax.axis_index(AXIS) * piece.size
        everything = jax.lax.dynamic_update_slice(everything, piece, (place,))
        new = ops.unpack(whole, everything, [work.dtype] * len(leaves), backend="auto")
        compute = plan.treedef.unflatten(packed.in_tree_order(plan, [new]))
        return state, everything, compute

    everything = _random(work, whole.size, work.dtype, SAME)
    compute = jax.tree.map(lambda x: jnp.array(x, work.dtype, copy=True), work.params)
    state = (_arena_state(work, layout.size), everything, compute)
    specs = (_STATE, SAME, SAME)
    return Side(_mapped(work, local, (specs, EACH), specs), state, work.noise)


def update_alone(work: Work, layout: Any) -> Side:
    """The update of the devices' pieces, from gradients that are pieces, too."""
    step = functools.partial(arena_steps, layout, False, 1)
    gradient = _random(work, layout.size * work.devices, layout.dtype, EACH)
    state = _arena_state(work, layout.size)
    return Side(_mapped(work, step, (_STATE, EACH), _STATE), state, gradient)


_STATE = (SAME, SAME, EACH, EACH)


def _arena_state(work: Work, size: int) -> Any:
    """AdamW's scalars, weights and moments, as `bench_update.py` has them."""
    floats, ints = jax.device_put(
        (initial_floats(), scalars.initial_ints()), NamedSharding(work.mesh, SAME)
    )
    weights = _random(work, size * work.devices, np.float32, EACH)
    return floats, ints, weights, (jnp.zeros_like(weights), jnp.zeros_like(weights))


def _random(work: Work, size: int, dtype: Any, spec: PartitionSpec) -> jax.Array:
    values = jax.device_put(random_values(size), NamedSharding(work.mesh, spec))
    return (0.1 * values).astype(dtype)


def _mapped(work: Work, local: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(
        local, mesh=work.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


class Crossing(NamedTuple):
    """What crosses the links in a compiled program.

    Attributes:
        kinds: how many collectives of each kind, as text.
        nbytes: of the whole arrays that they reduce or gather.
    """

    kinds: str
    nbytes: int


_COLLECTIVE = re.compile(
    r" = (?P<result>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|"
    r"collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b[a-z]+(?P<bits>\d+)\w*\[(?P<shape>[\d,]*)\]")


def crossing(program: str, devices: int) -> Crossing:
    """Counts the collectives in the text of a compiled program.

    The start of an asynchronous one gives its operands, too, but for most all-reduces.
    """
    kinds: dict[str, int] = {}
    total = 0
    for match in _COLLECTIVE.finditer(program):
        kind, result = match["kind"], match["result"]
        kinds[kind] = kinds.get(kind, 0) + 1
        nbytes = sum(
            int(array["bits"]) // 8 * int(np.prod([int(n) for n in array["shape"].split(",") if n]))
            for array in _ARRAY.finditer(result)
        )
        if match["start"] and kind in ("all-gather", "reduce-scatter"):
            nbytes = nbytes * devices // (devices + 1)
        elif match["start"] and result.startswith("(("):
            nbytes //= 2
        elif kind == "reduce-scatter":
            nbytes *= devices
        total += nbytes
    return Crossing(", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())), total)
