"""What the tests of plans share: small trees, and what holds of every plan."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jaxrenaissance.arena_layout import SEGMENT_BYTES
from jaxrenaissance.regions import W_REGIONS


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def paths(plan):
    return [leaf.path for leaf in plan.leaves]


def groups(plan):
    return {leaf.path: plan.groups[leaf.group] for leaf in plan.leaves}


def piece_of(leaf, shards, unit):
    """The shape of what each of several devices holds of a leaf: whole lines of each slice."""
    if shards == 1:
        return leaf.shape
    slices = int(np.prod(leaf.shape[: leaf.stacked]))
    size = int(np.prod(leaf.shape[leaf.stacked :]))
    lines = -(-size // (unit * shards))
    return (slices, lines * unit) if leaf.stacked else (lines * unit,)


def check_invariants(plan, shards=1):
    """Segments are aligned, disjoint, in order and cover each element; regions are in order."""
    seen = []
    for k, arena in enumerate(plan.arenas):
        unit = SEGMENT_BYTES // arena.dtype.itemsize
        start, size, leaf, inside, group = arena.segments.T
        assert arena.segments.dtype == np.int64
        assert arena.segments.shape[1] == 5
        assert not arena.segments.flags.writeable
        assert arena.size % unit == 0
        assert np.all(start % unit == 0)
        assert np.all(size > 0)
        assert np.all(start[1:] >= (start + size)[:-1])
        assert not len(start) or start[-1] + size[-1] <= arena.size

        assert len(arena.leaves) == len(arena.shapes) > 0
        order = [(plan.leaves[i].region, i) for i in arena.leaves]
        assert order == sorted(order)
        seen += arena.leaves
        for position, i in enumerate(arena.leaves):
            it = plan.leaves[i]
            rows = leaf == position
            slices = int(np.prod(it.shape[: it.stacked]))
            assert it.arena == k
            own = piece_of(it, shards, unit)
            assert own == arena.shapes[position]
            assert it.size == np.prod(it.shape)
            assert rows.sum() == (slices if it.size else 0)
            assert size[rows].sum() == np.prod(own)
            assert inside[rows].tolist() == (np.cumsum(size[rows]) - size[rows]).tolist()
            assert np.all(group[rows] == it.group)
            if it.size:
                assert start[rows][0] == it.offset

        ranges = [plan.region_range(region, arena=k) for region in W_REGIONS]
        assert ranges[0].offset == 0
        for before, after in pairwise(ranges):
            assert before.offset + before.size == after.offset
        used = ranges[-1].offset + ranges[-1].size
        assert arena.size == used
        for position, i in enumerate(arena.leaves):
            own = ranges[plan.leaves[i].region]
            inside_region = start[leaf == position]
            assert np.all(inside_region >= own.offset)
            assert np.all(inside_region < own.offset + own.size)
    assert sorted(seen) == list(range(len(plan.leaves)))


FULL = array(5)


KEY = jax.eval_shape(lambda: jax.random.key(0))


LORA = {
    "base": {"kernel": array(8, 8, dtype=jnp.int8), "scale": array(8)},
    "lora": {"a": array(8, 2), "b": array(2, 8)},
}


MASKED = {"a": {"bias": array(3), "kernel": array(3, 3)}, "b": {"kernel": array(3, 3)}}


class Pair(NamedTuple):
    kernel: Any
    bias: Any


@jtu.register_dataclass
@dataclass
class Layer:
    kernel: Any
    bias: Any
