"""vmap: every member is as if alone, bit for bit on the native backends."""

import functools

import jax
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    LEAF_DTYPES,
    NUMBERS,
    assert_close,
    assert_same_bits,
    expected_update,
    kinds_on_native_backends,
    make_floats,
    make_layout,
    native_backends,
    random_leaves,
    random_states,
    to_arena,
)
from whole_step import assert_whole_step, whole_step, whole_step_operands

from jaxrenaissance import ops, scalars

LAYOUT = make_layout(
    [(5,), (0,), (3, 33), (), (31,)], groups=[0, 0, 1, 1, 0], stacked=[0, 0, 1, 0, 0]
)


def stack(members):
    return jax.tree.map(lambda *xs: np.stack(xs), *members)


def member(tree, *index):
    return jax.tree.map(lambda x: x[index], tree)


# Cached, as are others below: the program of a member alone is compiled once for all tests.
@functools.cache
def step_fn(kind, backend, layout=LAYOUT):
    def step(floats, ints, states, gradients):
        weights, *moments = states
        ints = ops.statistics(layout, ints, gradients, backend=backend)
        floats, ints = ops.prologue(floats, ints, backend=backend)
        weights, moments, _ = ops.update(
            kind, layout, floats, weights, moments, gradients, backend=backend
        )
        return floats, ints, [weights, *moments]

    return step


def random_operands(kind, rng, *, source="leaves", numbers=NUMBERS):
    leaves = random_leaves(LAYOUT, rng)
    gradients = leaves if source == "leaves" else to_arena(LAYOUT, leaves)
    states = random_states(LAYOUT, kind, rng)
    return make_floats(numbers, factor=0.5), scalars.initial_ints(), states, gradients


def run(fn, *operands):
    return jax.tree.map(np.array, jax.jit(fn)(*jax.device_put(operands)))


def assert_member_is(got, alone, backend):
    compare = assert_close if backend == "xla" else assert_same_bits
    jax.tree.map(compare, got, alone)


def expected_states(kind, floats, ints, states, gradients, numbers=NUMBERS):
    arena = to_arena(LAYOUT, gradients) if isinstance(gradients, list) else gradients
    return expected_update(kind, LAYOUT, states, arena, numbers, factor=0.5)


@kinds_on_native_backends
@pytest.mark.parametrize("source", ["leaves", "arena"])
def test_seeds_step_as_if_alone_and_a_nan_skips_its_member_only(kind, source, backend):
    rng = np.random.default_rng(0)
    operands = [random_operands(kind, rng, source=source) for _ in range(4)]
    bad_leaf, last = (4, 30) if source == "leaves" else (0, 0)
    (operands[2][3] if source == "arena" else operands[2][3][bad_leaf])[last] = np.nan
    step = step_fn(kind, backend)
    floats, ints, states = run(jax.vmap(step), *stack(operands))
    np.testing.assert_array_equal(ints[:, scalars.STEP], [1, 1, 0, 1])
    np.testing.assert_array_equal(ints[:, scalars.SKIPPED], [0, 0, 1, 0])
    np.testing.assert_array_equal(ints[:, scalars.LAST_BAD_LEAF], [-1, -1, bad_leaf, -1])
    for i, alone in enumerate(operands):
        got = member((floats, ints, states), i)
        assert_member_is(got, run(step, *alone), backend)
        if i == 2:
            for x, y in zip(got[2], alone[2], strict=True):
                assert_same_bits(x, y)
        else:
            for x, y in zip(got[2], expected_states(kind, *alone), strict=True):
                assert_close(x, y)


@kinds_on_native_backends
def test_numbers_alone_may_differ_and_all_else_is_shared(kind, backend):
    _, ints, states, gradients = random_operands(kind, np.random.default_rng(1))
    rates = [0.0, 0.01, 0.3]
    many = [[n | {"lr": lr, "wd": 2 * lr} for n in NUMBERS] for lr in rates]
    batch = np.stack([make_floats(numbers, factor=0.5) for numbers in many])
    step = step_fn(kind, backend)
    axes = (0, None, None, None)
    got = run(jax.vmap(step, axes), batch, ints, states, gradients)
    assert got[1].shape == (3, scalars.INTS)
    for i, numbers in enumerate(many):
        alone = (batch[i], ints, states, gradients)
        assert_member_is(member(got, i), run(step, *alone), backend)
        wanted = expected_states(kind, *alone, numbers=numbers)
        for x, y in zip(member(got[2], i), wanted, strict=True):
            assert_close(x, y)


@functools.cache
def update_fn(backend):
    def update(floats, w, m, v, *leaves):
        w, moments, _ = ops.update("adam", LAYOUT, floats, w, (m, v), leaves, backend=backend)
        return [w, *moments]

    return update


@pytest.mark.parametrize("batched", range(8))
def test_any_single_operand_may_be_the_one_that_is_batched(batched, backend):
    # floats, weights, two moments and four of the five leaves.
    rng = np.random.default_rng(2)
    floats, _, states, leaves = random_operands("adam", rng)
    operands = [floats, *states, *leaves]
    batched += batched > 4  # the empty leaf has nothing that could differ
    many = list(operands)
    scale = np.array([1.0, 0.5, 0.25, 2.0]).astype(operands[batched].dtype)
    many[batched] = np.stack([operands[batched] * s for s in scale])
    axes = [0 if i == batched else None for i in range(len(operands))]
    fn = update_fn(backend)
    got = run(jax.vmap(fn, axes), *many)
    for i in range(4):
        alone = [x[i] if axis == 0 else x for x, axis in zip(many, axes, strict=True)]
        assert_member_is(member(got, i), run(fn, *alone), backend)


def test_batch_axes_may_lie_anywhere(backend):
    rng = np.random.default_rng(3)
    operands = [random_operands("momentum", rng) for _ in range(3)]
    floats, ints, states, leaves = stack(operands)
    states = [states[0].T, states[1]]
    leaves = [np.moveaxis(x, 0, -1) for x in leaves]
    axes, out_axes = (0, 0, [1, 0], -1), (0, 1, [1, 0])
    step = step_fn("momentum", backend)
    _, ints, (w, m) = run(jax.vmap(step, axes, out_axes), floats, ints, states, leaves)
    assert ints.shape == (scalars.INTS, 3)
    for i, alone in enumerate(operands):
        for x, y in zip((w[:, i], m[i]), expected_states("momentum", *alone), strict=True):
            assert_close(x, y)


@pytest.mark.parametrize("source", ["leaves", "arena"])
def test_nested_over_seeds_numbers_and_gradients(source, backend):
    rng = np.random.default_rng(4)
    seeds = [random_operands("adam", rng, source=source) for _ in range(2)]
    rates = [[n | {"lr": lr} for n in NUMBERS] for lr in (0.01, 0.1, 0.3)]
    floats = np.stack([make_floats(numbers, factor=0.5) for numbers in rates])
    states, gradients = stack([x[2] for x in seeds]), stack([x[3] for x in seeds])
    bad = gradients if source == "arena" else gradients[0]
    bad[1, 4] = -np.inf
    step = step_fn("adam", backend)
    ints = scalars.initial_ints()
    # Outermost seeds of the states, then numbers, innermost gradients.
    nested = jax.vmap(step, (None, None, None, 0))
    nested = jax.vmap(nested, (0, None, None, None))
    nested = jax.vmap(nested, (None, None, 0, None))
    got = run(nested, floats, ints, states, gradients)
    assert got[0].shape == (2, 3, 2, scalars.floats_size(2))
    np.testing.assert_array_equal(got[1][..., scalars.SKIPPED], np.broadcast_to([0, 1], (2, 3, 2)))
    for i in range(2):
        for j, numbers in enumerate(rates):
            for k in range(2):
                alone = floats[j], ints, member(states, i), member(gradients, k)
                wanted = expected_states("adam", *alone, numbers=numbers) if k == 0 else alone[2]
                for x, y in zip(member(got[2], i, j, k), wanted, strict=True):
                    assert_close(x, y)
    last = (floats[2], ints, member(states, 1), member(gradients, 0))
    assert_member_is(member(got, 1, 2, 0), run(step, *last), backend)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1, 3), (0,), (2, 0), (1,)])
def test_pack_and_unpack_under_nested_vmap(shape, backend):
    rng = np.random.default_rng(5)
    dtypes = [LEAF_DTYPES["float32"][i % 3] for i in range(len(LAYOUT.shapes))]
    leaves = [
        rng.normal(size=(*shape, *own)).astype(dtype)
        for own, dtype in zip(LAYOUT.shapes, dtypes, strict=True)
    ]
    pack = lambda leaves: ops.pack(LAYOUT, leaves, backend=backend)  # noqa: E731
    unpack = lambda arena: ops.unpack(LAYOUT, arena, dtypes, backend=backend)  # noqa: E731
    for _ in shape:
        pack, unpack = jax.vmap(pack), jax.vmap(unpack)
    arenas = run(pack, leaves)
    assert arenas.shape == (*shape, LAYOUT.size)
    for index in np.ndindex(shape):
        assert_same_bits(arenas[index], to_arena(LAYOUT, member(leaves, *index)))
    for x, y in zip(run(unpack, arenas), leaves, strict=True):
        assert_same_bits(x, y)


def test_some_leaves_may_be_shared(backend):
    rng = np.random.default_rng(6)
    leaves = random_leaves(LAYOUT, rng)
    many = [np.stack([x, 2 * x]) if i in (0, 2) else x for i, x in enumerate(leaves)]
    axes = [0 if i in (0, 2) else None for i in range(len(leaves))]

    def both(*leaves):
        arena = ops.pack(LAYOUT, leaves, backend=backend)
        ints = ops.statistics(
            LAYOUT, jax.numpy.asarray(scalars.initial_ints()), leaves, backend=backend
        )
        return arena, ints[scalars.FIRST_BAD]

    many[2][1, 2, 32] = np.nan
    arenas, first_bad = run(jax.vmap(both, axes), *many)
    np.testing.assert_array_equal(first_bad, [scalars.NO_LEAF, 2])
    for i in range(2):
        alone = [x[i] if axis == 0 else x for x, axis in zip(many, axes, strict=True)]
        np.testing.assert_array_equal(arenas[i], to_arena(LAYOUT, alone))
    many[2][1, 2, 32] = 0
    many[4][30] = np.inf  # Shared: bad for all.
    np.testing.assert_array_equal(run(jax.vmap(both, axes), *many)[1], [4, 4])


def test_prologue_of_shared_scalars_and_of_shared_counters(backend):
    def prologue(floats, ints):
        return ops.prologue(floats, ints, backend=backend)

    ints = np.stack([scalars.initial_ints()] * 3)
    ints[:, scalars.STEP] = [0, 9, 99]
    ints[1, scalars.FIRST_BAD] = 6
    floats, new = run(jax.vmap(prologue, (None, 0)), make_floats(), ints)
    np.testing.assert_array_equal(floats[:, scalars.APPLY], [1, 0, 1])
    np.testing.assert_array_equal(new[:, scalars.STEP], [1, 9, 100])
    c1 = floats[:, scalars.float_index(1, scalars.C1)]
    np.testing.assert_allclose(c1, [1 / (1 - NUMBERS[1]["b1"] ** t) for t in (1, 9, 100)], 1e-6)

    many = np.stack([make_floats([{"lr": lr, "wd": 0.5}]) for lr in (0.1, 0.2)])
    floats, new = run(jax.vmap(prologue, (0, None)), many, ints[0])
    np.testing.assert_array_equal(new[:, scalars.STEP], [1, 1])
    decays = floats[:, scalars.float_index(0, scalars.LR_WD)]
    np.testing.assert_allclose(decays, [0.05, 0.1], 1e-6)


def test_a_batch_without_members_has_no_results(backend):
    floats, ints, states, gradients = stack([random_operands("adam", np.random.default_rng(7))])
    empty = jax.tree.map(lambda x: x[:0], (floats, ints, states, gradients))
    floats, ints, states = run(jax.vmap(step_fn("adam", backend)), *empty)
    assert floats.shape == (0, scalars.floats_size(2))
    assert [x.shape for x in states] == [(0, LAYOUT.size)] * 3


def test_scan_inside_vmap_and_vmap_inside_scan(backend):
    rng = np.random.default_rng(8)
    operands = [random_operands("adam", rng) for _ in range(2)]
    leaves = stack([stack([random_leaves(LAYOUT, rng) for _ in range(2)]) for _ in range(3)])
    step = step_fn("adam", backend)

    def train(floats, ints, states, many):
        body = lambda carry, g: (step(*carry, g), None)  # noqa: E731
        return jax.lax.scan(body, (floats, ints, states), many)[0]

    def train_together(floats, ints, states, many):
        body = lambda carry, g: (jax.vmap(step)(*carry, g), None)  # noqa: E731
        return jax.lax.scan(body, (floats, ints, states), many)[0]

    floats, ints, states, _ = stack(operands)
    # Time is the leaves' first axis, the members their second.
    one = run(jax.vmap(train, (0, 0, 0, 1)), floats, ints, states, leaves)
    other = run(train_together, floats, ints, states, leaves)
    for i in range(2):
        wanted = operands[i][2]
        for t in range(3):
            gradient = to_arena(LAYOUT, member(leaves, t, i))
            wanted = expected_update("adam", LAYOUT, wanted, gradient, step=t + 1, factor=0.5)
        for got in one, other:
            for x, y in zip(member(got[2], i), wanted, strict=True):
                assert_close(x, y)


# Everything at once.


@pytest.mark.parametrize("source", ["leaves", "arena"])
def test_all_of_a_step_under_vmap_and_a_nan_skips_its_member_only(source, backend):
    rng = np.random.default_rng(10)
    operands = [whole_step_operands(LAYOUT, rng, source) for _ in range(3)]
    bad = operands[1][3]
    (bad if source == "arena" else bad[4])[0] = np.nan
    fn = whole_step(LAYOUT, backend)
    got = run(jax.vmap(fn), *stack(operands))
    np.testing.assert_array_equal(got[1][:, scalars.STEP], [1, 0, 1])
    np.testing.assert_array_equal(got[0][:, scalars.LOSS_SCALE], [4, 2, 4])
    for i, alone in enumerate(operands):
        own = member(got, i)
        assert_member_is(own, run(fn, *alone), backend)
        if i == 1:
            for x, y in zip(own[2][:4], alone[2][:4], strict=True):
                assert_same_bits(x, y)
            assert own[0][scalars.UPDATE_NORM] == 0
        elif source == "leaves":
            assert_whole_step(LAYOUT, own, alone)


def test_all_of_a_step_under_nested_vmap_with_shared_operands(backend):
    rng = np.random.default_rng(11)
    floats, ints, states, gradients, taus = whole_step_operands(LAYOUT, rng)
    # Outermost clipping norms and taus, then weights; innermost gradients.
    many_floats = np.stack([floats, floats])
    many_floats[1, scalars.MAX_NORM] = np.inf
    many_taus = np.stack([taus, taus[::-1]])
    many_states = stack(
        [states, whole_step_operands(LAYOUT, rng)[2], whole_step_operands(LAYOUT, rng)[2]]
    )
    many_gradients = stack([gradients, random_leaves(LAYOUT, rng)])
    fn = whole_step(LAYOUT, backend)
    nested = jax.vmap(fn, (None, None, None, 0, None))
    nested = jax.vmap(nested, (None, None, 0, None, None))
    nested = jax.vmap(nested, (0, None, None, None, 0))
    got = run(nested, many_floats, ints, many_states, many_gradients, many_taus)
    assert got[0].shape == (2, 3, 2, floats.size)
    for index in [(0, 0, 0), (0, 2, 1), (1, 1, 0)]:
        i, j, k = index
        alone = (
            many_floats[i],
            ints,
            member(many_states, j),
            member(many_gradients, k),
            many_taus[i],
        )
        own = member(got, *index)
        assert_member_is(own, run(fn, *alone), backend)
        if i == 0:
            assert_whole_step(LAYOUT, own, alone)


@functools.cache
def update_norm_fn(backend):
    def update_norm(floats, states, leaves):
        weights, *moments = states
        where = {"backend": backend}
        (words,) = ops.update_norms("momentum", LAYOUT, floats, weights, moments, leaves, **where)
        floats = ops.finish_update(floats, [words], [len(LAYOUT.segments)], **where)
        return floats[scalars.UPDATE_NORM]

    return update_norm


@pytest.mark.parametrize("batched", range(3))
def test_norms_of_updates_where_one_operand_alone_is_batched(batched, backend):
    rng = np.random.default_rng(13)
    states, leaves = random_states(LAYOUT, "momentum", rng), random_leaves(LAYOUT, rng)
    operands = [make_floats(), states, leaves]
    scale = np.array([1.0, 0.5, 2.0])
    many = list(operands)
    many[batched] = jax.tree.map(
        lambda x: np.stack([x * k for k in scale]).astype(x.dtype), operands[batched]
    )
    axes = [0 if i == batched else None for i in range(3)]
    fn = update_norm_fn(backend)
    got = run(jax.vmap(fn, axes), *many)
    for i in range(3):
        alone = [member(x, i) if axis == 0 else x for x, axis in zip(many, axes, strict=True)]
        assert_member_is(got[i], run(fn, *alone), backend)
        if batched > 0:
            gradient = to_arena(LAYOUT, alone[2])
            new, *_ = expected_update("momentum", LAYOUT, alone[1], gradient)
            np.testing.assert_allclose(got[i], np.linalg.norm(new - alone[1][0]), rtol=1e-5)


def test_lerp_over_factors_alone_and_with_targets_that_are_shared(backend):
    rng = np.random.default_rng(12)
    target, source = (to_arena(LAYOUT, random_leaves(LAYOUT, rng)) for _ in range(2))
    taus = np.array([[0.0, 0.5], [1.0, 0.25], [0.5, 0.0]], np.float32)

    def fn(taus, target, source):
        return ops.lerp(LAYOUT, taus, [target], source, backend=backend)

    (got,) = run(jax.vmap(fn, (0, None, None)), taus, target, source)
    for i in range(3):
        assert_member_is(got[i], run(fn, taus[i], target, source)[0], backend)
    assert_close(got[2][:5], 0.5 * (target[:5] + source[:5]))


@pytest.mark.parametrize("source", ["leaves", "arena"])
def test_more_members_than_a_grid_has_rows(source, backend):
    # A CUDA grid has at most 65,535 blocks in its second and third dimension.
    count = 70_001
    layout = make_layout([(3,), (2,)], groups=[0, 1])
    rng = np.random.default_rng(9)
    leaves = [
        rng.normal(size=(count, 3)).astype(np.float32),
        rng.normal(size=(count, 2)).astype(BFLOAT16),
    ]
    bad = np.array([0, 65_535, 65_536, count - 1])
    leaves[1][bad, 1] = np.nan
    arenas = np.zeros((count, layout.size), np.float32)
    second = layout.segments[1, 0]
    arenas[:, :3], arenas[:, second : second + 2] = leaves[0], leaves[1]
    numbers = [{"lr": 0.5, "momentum": 0.5}, {"lr": 0.25, "momentum": 0.5}]
    step = step_fn("momentum", backend, layout)

    def fn(floats, ints, states, gradients):
        floats, ints, states = step(floats, ints, states, gradients)
        leaves = ops.unpack(layout, states[0], [np.float32, BFLOAT16], backend=backend)
        return ints, states, ops.pack(layout, leaves, backend=backend)

    zero = np.zeros(layout.size, np.float32)
    operands = make_floats(numbers), scalars.initial_ints(), [zero + 1, zero]
    gradients = leaves if source == "leaves" else arenas
    ints, (w, m), packed = run(jax.vmap(fn, (None, None, None, 0)), *operands, gradients)
    good = np.full(count, True)
    good[bad] = False
    np.testing.assert_array_equal(ints[:, scalars.STEP], good)
    np.testing.assert_array_equal(ints[:, scalars.LAST_BAD_LEAF], np.where(good, -1, 1))
    where = np.zeros(layout.size, bool)
    where[[0, 1, 2, second, second + 1]] = True
    np.testing.assert_array_equal(m[good], np.where(where, arenas[good], 0))
    rates = np.where(np.arange(layout.size) < second, 0.5, 0.25)
    np.testing.assert_allclose(
        w[good][:, where], (1 - rates * arenas[good])[:, where], rtol=1e-6, atol=1e-6
    )
    assert (w[bad] == 1).all()
    assert not m[bad].any()
    np.testing.assert_array_equal(packed[:, :3], w[:, :3])
    np.testing.assert_allclose(packed[:, where], w[:, where], rtol=2.0**-8)
    assert not packed[:, ~where].any()
    # The weight of padding is what it was: it was 1 here.
    if backend != "xla":
        assert (w[:, ~where] == 1).all()


# Segments in a batch and in all, of which tables of CUDA's launches hold one less.
@native_backends
@pytest.mark.parametrize("shared", ["nothing", "gradients"])
@pytest.mark.parametrize("segments", [449, 2001])
def test_more_segments_than_a_table_holds_are_right_in_a_batch(segments, shared, backend):
    layout = make_layout(
        [(i % 5 + 1,) for i in range(segments)], groups=[i % 2 for i in range(segments)]
    )
    rng = np.random.default_rng(0)

    def operands():
        states, gradients = random_states(layout, "momentum", rng), random_leaves(layout, rng)
        return make_floats(NUMBERS, factor=0.5), scalars.initial_ints(), states, gradients

    first, second = operands(), operands()
    first[3][-1][...] = np.nan
    if shared == "gradients":
        first[3][-1][...] = 1.0
        second = (*second[:3], first[3])
    step = step_fn("momentum", backend, layout)

    def step_and_more(floats, ints, states, gradients):
        floats, ints, states = step(floats, ints, states, gradients)
        leaves = ops.unpack(layout, states[0], [np.float32] * segments, backend=backend)
        packed = ops.pack(layout, gradients, backend=backend)
        (moved,) = ops.lerp(layout, np.float32([0.5, 0.25]), [packed], leaves, backend=backend)
        return floats, ints, states, leaves, packed, moved

    axes = (0, 0, 0, None if shared == "gradients" else 0)
    batch = stack([first[:3], second[:3]])
    gradients = first[3] if shared == "gradients" else stack([first[3], second[3]])
    got = run(jax.vmap(step_and_more, axes), *batch, gradients)
    skipped = [0, 0] if shared == "gradients" else [1, 0]
    np.testing.assert_array_equal(got[1][:, scalars.SKIPPED], skipped)
    for i, alone in enumerate([first, second]):
        assert_member_is(member(got, i), run(step_and_more, *alone), backend)
