"""Steps made of ops over a small layout, and what they give."""

import functools

import numpy as np
from arenas import (
    assert_close,
    expected_update,
    make_floats,
    make_layout,
    random_leaves,
    random_states,
    to_arena,
)

from jaxrenaissance import ops, scalars

# Without an empty leaf: JAX 0.11's shard_map on the CPU breaks down over arrays without elements.
LAYOUT = make_layout([(5,), (2, 33), (), (31,)], groups=[0, 1, 1, 0], stacked=[0, 1, 0, 0])


@functools.cache
def step_fn(kind, backend, layout=LAYOUT):
    def step(carry, gradients):
        floats, ints, (weights, *moments) = carry
        ints = ops.statistics(layout, ints, gradients, backend=backend)
        floats, ints = ops.prologue(floats, ints, backend=backend)
        weights, moments, _ = ops.update(
            kind, layout, floats, weights, moments, gradients, backend=backend
        )
        return floats, ints, [weights, *moments]

    return step


def operands(kind="adam", seed=0):
    """Scalars, counters and states, and the gradients of three steps."""
    rng = np.random.default_rng(seed)
    carry = make_floats(factor=0.5), scalars.initial_ints(), random_states(LAYOUT, kind, rng)
    return carry, [random_leaves(LAYOUT, rng) for _ in range(3)]


def wanted_states(kind, states, gradients):
    for i, leaves in enumerate(gradients):
        arena = to_arena(LAYOUT, leaves)
        states = expected_update(kind, LAYOUT, states, arena, step=i + 1, factor=0.5)
    return states


def assert_states(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        assert_close(x, y)
