"""Leaves of every awkward size: none, one, exactly a tile, very many, and beyond 2³¹ elements."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    LEAF_DTYPES,
    assert_all_ops_are_right,
    assert_close,
    assert_same_bits,
    expected_update,
    make_floats,
    make_layout,
    native_backends,
    random_leaves,
    random_states,
    to_arena,
)

from jaxrenaissance import ops, scalars
from jaxrenaissance.bench import launches

# Blocks of CUDA's threads take 1024 elements, chunks of the CPU's 16,384; two threads
# share the work from 8 or 16 chunks on.
FEW = {
    "empty first": [(0,), (5,), (33,)],
    "empty last": [(5,), (33,), (0, 4)],
    "empty alone": [(0,)],
    "empty only": [(0,), (3, 0), (0,)],
    "every second empty": [(0 if i % 2 else 1 + i,) for i in range(20)],
    "all but one empty": [(0,)] * 9 + [(3,)] + [(0,)] * 9,
    "scalars": [(), (3,), (), ()],
    "a scalar alone": [()],
    "small": [(1,), (3,), (31,), (33,)],
}
SHAPES = FEW | {
    "a line each": [(32,), (32,), (16,), (32,)],
    "one tile": [(1024,)],
    "one tile and one": [(1025,), (1024,), (1023,)],
    "ends on a tile": [(31,), (992,), (7,), (2016,), (3,)],
    "one chunk": [(16_384,)],
    "one chunk and one": [(16_385,), (16_383,)],
    "ends on a chunk": [(1,), (16_352,), (2,), (32_736,), (3,)],
    "chunks for two threads": [(262_144,)],
    "chunks for two threads and one": [(1,), (262_145,)],
}


@native_backends
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_leaves_of_awkward_sizes(name, dtype, backend):
    check_sizes(name, dtype, backend)


@pytest.mark.parametrize("name", FEW)
def test_few_elements_on_the_xla_backend(name):
    check_sizes(name, "float32", "xla")


def check_sizes(name, dtype, backend):
    shapes, allowed = SHAPES[name], LEAF_DTYPES[dtype]
    layout = make_layout(shapes, groups=[i % 2 for i in range(len(shapes))], dtype=dtype)
    gradients = random_leaves(layout, np.random.default_rng(0))
    copies = [allowed[i // 2 % len(allowed)] for i in range(len(shapes))]
    assert_all_ops_are_right("adam", layout, gradients, copies, backend=backend)


def many_leaves(count):
    """Leaves of 0 to 5 elements, in two runs of groups."""
    shapes = [(i % 6,) for i in range(count)]
    return make_layout(shapes, groups=[int(i < count // 3) for i in range(count)])


def test_a_hundred_leaves(backend):
    layout = many_leaves(100)
    gradients = random_leaves(layout, np.random.default_rng(0))
    copies = [x.dtype for x in gradients]
    assert_all_ops_are_right("sgd", layout, gradients, copies, backend=backend)


# The first ones have one leaf with elements more than a table of CUDA's launches holds; 5000
# fill 8 of the CPU's chunks. XLA takes time that grows with the square of how many there are.
MORE_THAN_A_TABLE = [
    next(count for count in itertools.count() if count - -(-count // 6) == most + 1)
    for most in (
        64,
        launches.OF_OTHERS_IN_A_BATCH,
        launches.SEGMENTS_A_LAUNCH["changes"],
        launches.SEGMENTS_A_LAUNCH["norms"],
        launches.SEGMENTS_OF_OTHERS,
    )
]


@native_backends
@pytest.mark.parametrize(
    "count", [*MORE_THAN_A_TABLE, 5000, pytest.param(21_000, marks=pytest.mark.gpu)]
)
def test_thousands_of_leaves(count, backend):
    layout = many_leaves(count)
    gradients = random_leaves(layout, np.random.default_rng(0))
    copies = [x.dtype for x in gradients]
    assert_all_ops_are_right("momentum", layout, gradients, copies, backend=backend)


@native_backends
def test_21_000_leaves_step_and_the_last_is_looked_at(backend):
    layout = many_leaves(21_000)
    rng = np.random.default_rng(0)
    states, gradients = random_states(layout, "sgd", rng), random_leaves(layout, rng)

    @jax.jit
    def step(floats, ints, weights, gradients):
        ints = ops.statistics(layout, ints, gradients, backend=backend)
        floats, ints = ops.prologue(floats, ints, backend=backend)
        new, _, _ = ops.update("sgd", layout, floats, weights, (), gradients, backend=backend)
        return ints, new

    operands = jax.device_put((make_floats(), scalars.initial_ints(), states[0], gradients))
    ints, weights = step(*operands)
    assert ints[scalars.STEP] == 1
    wanted = expected_update("sgd", layout, states, to_arena(layout, gradients))
    assert_close(weights, wanted[0])
    last = max(i for i, x in enumerate(gradients) if x.size)
    operands[3][last] = operands[3][last].at[-1].set(jnp.nan)
    ints, weights = step(*operands)
    assert ints[scalars.LAST_BAD_LEAF] == last
    assert_same_bits(weights, states[0])


# Beyond 2³¹ elements, where a 32-bit index wraps.

BEYOND = 2**31 + 5
GIANTS = {
    "one leaf": [(BEYOND,)],
    "several leaves": [(BEYOND // 2,), (BEYOND // 3,), (3, BEYOND // 9), (77,)],
}


def giant_layout(name):
    return make_layout(GIANTS[name], groups=[i % 2 for i in range(len(GIANTS[name]))])


def require_memory(size):
    stats = jax.devices()[0].memory_stats() or {}
    if stats.get("bytes_limit", size) < size:
        pytest.skip(f"needs {size / 1e9:.0f} GB of the device's memory")


@functools.partial(jax.jit, static_argnums=(0, 1))
def pattern(n, dtype):
    """0 to 250 over and over, from an index of 32 bits without a sign."""
    return (jax.lax.iota(np.uint32, n) % np.uint32(251)).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def cut(x, start, end):
    """x[start:end] by a static slice: only its indices have 64 bits, and only inside jit."""
    return jax.lax.slice(x, (start,), (end,))


def probe(x):
    """The first elements, those around 2³¹ and the last ones."""
    middle = min(2**31, x.size - 3)
    starts = [0, x.size // 2, middle - 2, x.size - 3]
    flat = x.reshape(-1)
    return np.concatenate([np.asarray(cut(flat, a, a + 3)) for a in starts])


def probed_pattern(n):
    middle = min(2**31, n - 3)
    starts = np.array([0, n // 2, middle - 2, n - 3])
    return ((starts[:, None] + np.arange(3)).reshape(-1) % 251).astype(np.float32)


@pytest.mark.gpu
@pytest.mark.native
@pytest.mark.parametrize("name", GIANTS)
def test_pack_and_unpack_beyond_2_31_elements(name):
    require_memory(50e9)
    layout = giant_layout(name)
    dtypes = [LEAF_DTYPES["float32"][i % 3] for i in range(len(layout.shapes))]
    leaves = [
        pattern(int(np.prod(shape)), dtype).reshape(shape)
        for shape, dtype in zip(layout.shapes, dtypes, strict=True)
    ]
    arena = ops.pack(layout, leaves, backend="cuda")
    for start, size, *_ in layout.segments.tolist():
        stretch = cut(arena, start, start + size)
        np.testing.assert_array_equal(probe(stretch), probed_pattern(size))
        del stretch
    del leaves
    dtypes.reverse()
    for leaf, shape, dtype in zip(
        ops.unpack(layout, arena, dtypes, backend="cuda"), layout.shapes, dtypes, strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (shape, dtype)
        np.testing.assert_array_equal(probe(leaf), probed_pattern(leaf.size))


@pytest.mark.gpu
@pytest.mark.native
@pytest.mark.parametrize("source", ["leaves", "arena"])
@pytest.mark.parametrize("name", GIANTS)
def test_a_step_beyond_2_31_elements_reaches_the_last(name, source):
    require_memory(70e9)
    layout = giant_layout(name)
    numbers = [{"lr": 1.0, "b1": 0.5, "b2": 0.5, "eps": 0.0}, {"lr": 2.0, "b1": 0.5, "b2": 0.5}]
    last = len(layout.shapes) - 1

    @functools.partial(jax.jit, static_argnums=0)
    def make_gradients(tail):
        leaves = []
        for i, shape in enumerate(layout.shapes):
            flat = jnp.ones(int(np.prod(shape)) - 1, BFLOAT16)
            end = jnp.full(1, tail if i == last else 1.0, BFLOAT16)
            leaves.append(jnp.concatenate([flat, end]).reshape(shape))
        return leaves if source == "leaves" else ops.pack(layout, leaves, backend="cuda")

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3, 4))
    def step(floats, ints, weights, m, v, gradients):
        ints = ops.statistics(layout, ints, gradients, backend="cuda")
        _, workspace = ops.norms(layout, ints, gradients, flag=False, backend="cuda")
        floats, ints, *_ = ops.finish(
            floats, ints, [workspace], [len(layout.segments)], gradients=1, backend="cuda"
        )
        new, moments, _ = ops.update(
            "adam", layout, floats, weights, (m, v), gradients, backend="cuda"
        )
        return floats, ints, new, *moments

    size = layout.size
    state = jax.device_put((make_floats(numbers), scalars.initial_ints()))
    state = *state, pattern(size, np.float32), jnp.zeros(size), jnp.zeros(size)
    state = step(*state, make_gradients(float("nan")))
    assert state[1][scalars.LAST_BAD_LEAF] == last
    np.testing.assert_array_equal(probe(state[2]), probed_pattern(size))
    state = step(*state, make_gradients(1.0))
    assert (int(state[1][scalars.STEP]), int(state[1][scalars.SKIPPED])) == (1, 1)
    parameters = sum(int(np.prod(shape)) for shape in layout.shapes)
    np.testing.assert_allclose(state[0][scalars.GRAD_NORM], np.sqrt(parameters), rtol=1e-7)
    # m = v = 1/2, and both corrections are 2: the step is the learning rate, in every element.
    for start, count, leaf, _, group in layout.segments.tolist():
        for offset in 0, count // 2, count - 3:
            at = start + offset
            before = (np.arange(at, at + 3) % 251).astype(np.float32)
            weights, m, v = (np.asarray(cut(x, at, at + 3)) for x in state[2:])
            np.testing.assert_allclose(weights, before - numbers[group]["lr"], atol=1e-4)
            np.testing.assert_array_equal(m, 0.5, f"leaf {leaf}")
            np.testing.assert_array_equal(v, 0.5)
    moved = jax.jit(lambda m: jnp.sum(m == 0.5, dtype=np.uint32))(state[3])
    assert int(moved) == parameters


@pytest.mark.gpu
@pytest.mark.native
@pytest.mark.parametrize("name", GIANTS)
def test_sums_and_lerps_beyond_2_31_elements_reach_the_last(name):
    require_memory(60e9)
    layout = giant_layout(name)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(accumulator, target):
        ints = jnp.asarray(scalars.initial_ints()).at[scalars.MICRO].set(1)
        ints, total, _ = ops.accumulate(
            layout, ints, accumulator, accumulator, flag=True, norms=False, backend="cuda"
        )
        (target,) = ops.lerp(layout, jnp.full(2, 0.5), [target], total, backend="cuda")
        return ints, total, target

    arena = jax.jit(
        lambda: ops.pack(layout, [jnp.ones(x, BFLOAT16) for x in layout.shapes], backend="cuda")
    )
    ints, total, target = run(arena(), jnp.zeros(layout.size))
    assert ints[scalars.FIRST_BAD] == scalars.NO_LEAF
    for start, size, *_ in layout.segments.tolist():
        for offset in 0, size // 2, size - 3:
            at = start + offset
            np.testing.assert_array_equal(cut(total, at, at + 3), 2)
            np.testing.assert_array_equal(cut(target, at, at + 3), 1)


@pytest.mark.gpu
@pytest.mark.native
def test_a_batch_beyond_2_31_elements():
    require_memory(40e9)
    members, n = 33, 2**26 + 1
    layout = make_layout([(3,), (n,)])
    floats = make_floats([{"lr": 0.5}])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(weights, scale):
        def one(weights, scale):
            leaves = [jnp.full(3, scale), jnp.full(n, scale).astype(BFLOAT16)]
            return ops.update("sgd", layout, floats, weights, (), leaves, backend="cuda")[0]

        return jax.vmap(one)(weights, scale)

    scale = np.arange(members, dtype=np.float32)
    weights = step(jnp.zeros((members, layout.size)), scale)
    assert weights.size > 2**31
    for i in range(0, members, 8):
        end = layout.segments[1, 0] + n
        tail = jax.lax.slice(weights, (i, end - 2), (i + 1, end + 1))
        np.testing.assert_array_equal(tail[0], [-i / 2, -i / 2, 0])
