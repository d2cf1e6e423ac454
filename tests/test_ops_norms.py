"""norms, finish and finish_update: sums of squares, and what the scalars make of them."""

import functools

import jax
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    KINDS,
    LEAF_DTYPES,
    assert_same_bits,
    expected_update,
    make_floats,
    make_layout,
    native_backends,
    random_leaves,
    random_states,
    to_arena,
    to_leaves,
    update,
    usual_layout,
)
from prologue_oracle import expected_prologue
from reduction import segments_of, sum_of_squares, total

from jaxrenaissance import ops
from jaxrenaissance import scalars as s


@functools.cache
def jitted(layouts, gradients, by_segment, flag, backend):
    segments = [len(layout.segments) for layout in layouts]

    @jax.jit
    def run(floats, ints, operands):
        workspaces, first = [], 0
        for layout, operand in zip(layouts, operands, strict=True):
            ints, workspace = ops.norms(
                layout, ints, operand, first_leaf=first, flag=flag, backend=backend
            )
            workspaces.append(workspace)
            first += len(layout.shapes)
        return ops.finish(
            floats,
            ints,
            workspaces,
            segments,
            gradients=gradients,
            by_segment=by_segment,
            backend=backend,
        )[:3]

    return run


def finish(layouts, operands, backend, *, floats=None, gradients=None, flag=True):
    """Norms of one operand a layout, then finish, under jit: floats, ints, norms by segment."""
    floats = make_floats() if floats is None else floats
    count = len(layouts) if gradients is None else gradients
    run = jitted(tuple(layouts), count, True, flag, backend)
    operands = jax.device_put((floats, s.initial_ints(), list(operands)))
    return jax.tree.map(np.array, run(*operands))


def norm_of(*leaves):
    """In NumPy's longer doubles: neither overflows nor underflows on squares here."""
    x = np.concatenate([np.asarray(x).astype(np.longdouble).reshape(-1) for x in leaves])
    return float(np.sqrt(np.sum(x * x)))


@pytest.mark.parametrize("source", ["leaves", "arena"])
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
def test_norms_of_all_and_of_every_segment(dtype, source, backend):
    layout = usual_layout(dtype)
    leaves = random_leaves(layout, np.random.default_rng(0))
    operand = leaves if source == "leaves" else to_arena(layout, leaves, padding=np.nan)
    floats = make_floats(dtype=dtype, loss_scale=4.0)
    with jax.enable_x64(dtype == "float64"):
        floats, ints, (norms,) = finish([layout], [operand], backend, floats=floats)
    rtol = 1e-6 if dtype == "float32" else 1e-14
    np.testing.assert_allclose(floats[s.GRAD_NORM], norm_of(*leaves) / 4, rtol=rtol)
    wanted = [norm_of(x) / 4 for x in segments_of(layout, leaves)]
    np.testing.assert_allclose(norms, wanted, rtol=rtol)
    assert norms.dtype == floats.dtype == dtype
    assert ints[[s.STEP, s.CALLS]].tolist() == [1, 1]


TREES = {
    "one element": [1],
    "around a lane, a row and a chunk": [3, 4, 5, 127, 128, 129, 1023, 1024, 1025],
    "around a partial": [8191, 8192, 8193],
    "odd counts of partials": [3 * 8192 + 5, 5 * 8192, 11 * 8192 - 1, 17 * 8192 + 1024],
    "many": [n % 37 + 1 for n in range(301)],
}


@native_backends
@pytest.mark.parametrize("name", TREES)
def test_native_sums_have_the_bits_of_the_fixed_tree(name, backend):
    rng = np.random.default_rng(1)
    layout = make_layout([(n,) for n in TREES[name]])
    with jax.enable_x64(True):
        for dtypes in LEAF_DTYPES["float32"], [np.dtype("float32")]:
            leaves = random_leaves(layout, rng, dtypes)
            segments = segments_of(layout, leaves)
            for operand in leaves, to_arena(layout, leaves):
                floats = make_floats(dtype="float64")
                floats, _, (norms,) = finish([layout], [operand], backend, floats=floats)
                assert_same_bits(floats[s.GRAD_NORM], np.sqrt(total(segments)))
                assert_same_bits(norms, np.sqrt([sum_of_squares(x) for x in segments]))


@native_backends
def test_native_sums_of_stacked_leaves_and_of_two_arenas_have_the_bits_of_the_tree(backend):
    rng = np.random.default_rng(2)
    layouts = [usual_layout("float64"), usual_layout("float32")]
    leaves = [random_leaves(layout, rng) for layout in layouts]
    with jax.enable_x64(True):
        floats = make_floats(dtype="float64", loss_scale=8.0)
        floats, _, norms = finish(layouts, leaves, backend, floats=floats)
    segments = [segments_of(*pair) for pair in zip(layouts, leaves, strict=True)]
    assert_same_bits(floats[s.GRAD_NORM], np.sqrt(total([*segments[0], *segments[1]])) / 8)
    for got, own in zip(norms, segments, strict=True):
        assert_same_bits(got, np.sqrt([sum_of_squares(x) for x in own]) / 8)


@pytest.mark.parametrize("value", [1e30, 1e-30, 1e15, 1e-19])
@pytest.mark.parametrize("dtype", [np.dtype("float32"), BFLOAT16])
def test_no_square_overflows_and_none_is_lost(value, dtype, backend):
    layout = make_layout([(1000,), (3, 7)], stacked=[0, 1])
    leaves = [np.full(shape, value).astype(dtype) for shape in layout.shapes]
    floats, ints, (norms,) = finish([layout], [leaves], backend)
    np.testing.assert_allclose(floats[s.GRAD_NORM], norm_of(*leaves), rtol=1e-6)
    wanted = [norm_of(x) for x in segments_of(layout, leaves)]
    np.testing.assert_allclose(norms, wanted, rtol=1e-6)
    assert ints[s.HAS_NAN] == 0


def test_float16_gradients_whose_squares_float16_cannot_hold(backend):
    layout = make_layout([(300, 300)])
    leaves = [np.full((300, 300), 300, np.float16)]
    floats, *_ = finish([layout], [leaves], backend)
    np.testing.assert_allclose(floats[s.GRAD_NORM], 300 * 300, rtol=1e-6)


def test_many_bfloat16_leaves(backend):
    # In bfloat16 their sum would stop growing at 256.
    layout = make_layout([(5,)] * 300)
    leaves = [np.ones(5, BFLOAT16)] * 300
    floats, _, (norms,) = finish([layout], [leaves], backend)
    np.testing.assert_allclose(floats[s.GRAD_NORM], np.sqrt(1500), rtol=1e-6)
    np.testing.assert_allclose(norms, np.full(300, np.sqrt(5)), rtol=1e-6)


@native_backends
def test_subnormal_gradients_have_a_norm(backend):
    layout = make_layout([(16,)])
    leaves = [np.full(16, 2.0**-149, np.float32)]
    floats, _, (norms,) = finish([layout], [leaves], backend)
    assert floats[s.GRAD_NORM] == norms[0] == 2.0**-147


@pytest.mark.parametrize(
    "shapes", [[(0,), (3,), (0, 2), (40,)], [(3,), (0,)], [(0,), (3,)], [(0,)], [(0,), (2, 0)]]
)
def test_norms_land_on_their_segments_when_leaves_are_empty(shapes, backend):
    layout = make_layout(shapes)
    leaves = [np.full(shape, i + 1.0, np.float32) for i, shape in enumerate(shapes)]
    wanted = [(i + 1) * np.sqrt(x.size) for i, x in enumerate(leaves) if x.size]
    for operand in leaves, to_arena(layout, leaves):
        floats, ints, (norms,) = finish([layout], [operand], backend)
        np.testing.assert_allclose(norms, wanted, rtol=1e-6)
        np.testing.assert_allclose(floats[s.GRAD_NORM], np.sqrt(np.sum(np.square(wanted))), 1e-6)
        assert (floats[s.CLIP], ints[s.STEP]) == (1, 1)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("max_norm", [np.inf, 1e9, 3.0, 1e-12])
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
def test_finish_is_the_prologue_with_that_norm(dtype, max_norm, bad, backend):
    layout = usual_layout(dtype)
    leaves = random_leaves(layout, np.random.default_rng(3))
    if bad:
        leaves[4][1] = -np.inf
    floats = make_floats(dtype=dtype, max_norm=max_norm, loss_scale=64.0, backoff=0.5)
    ints = s.initial_ints()
    if bad:
        ints[s.FIRST_BAD] = 4
    with np.errstate(invalid="ignore"):
        wanted, counts = expected_prologue(floats, ints, norm_of(*leaves))
    with jax.enable_x64(dtype == "float64"):
        got, new_ints, _ = finish([layout], [leaves], backend, floats=floats)
    np.testing.assert_array_equal(new_ints, counts)
    np.testing.assert_allclose(got, wanted, rtol=2e-6 if dtype == "float32" else 1e-13)


def test_a_cycle_keeps_its_last_norm_until_it_is_complete(backend):
    layout = make_layout([(16,)])
    floats, ints = make_floats(max_norm=2.0, loss_scale=2.0), s.initial_ints()
    ints[s.EVERY] = 2
    run = jitted((layout,), 1, False, True, backend)
    seen = []
    for value in 1.0, 6.0, 3.0, 12.0:
        operands = jax.device_put((floats, ints, [[np.full(16, value, np.float32)]]))
        floats, ints, norms = jax.tree.map(np.array, run(*operands))
        assert norms == ()
        seen.append([float(floats[i]) for i in (s.APPLY, s.GRAD_NORM, s.CLIP, s.GRAD_FACTOR)])
    # Divided by the scale and by the two of the cycle: 4 · 6 / 4 and 4 · 12 / 4.
    first, second = [6, 2 / 6, 2 / 24], [12, 2 / 12, 2 / 48]
    wanted = [[0, 0, 1, 1], [1, *first], [0, *first], [1, *second]]
    np.testing.assert_allclose(seen, wanted, rtol=1e-6)


def test_the_norm_of_the_weights_is_of_theirs_alone(backend):
    layout = usual_layout()
    rng = np.random.default_rng(4)
    leaves, weights = random_leaves(layout, rng), to_arena(layout, random_leaves(layout, rng))
    floats, _, norms = finish([layout, layout], [leaves, weights], backend, gradients=1, flag=False)
    assert len(norms) == 1
    np.testing.assert_allclose(floats[s.GRAD_NORM], norm_of(*leaves), rtol=1e-6)
    np.testing.assert_allclose(floats[s.PARAM_NORM], norm_of(weights), rtol=1e-6)
    # And without gradients: what is known of them is nothing.
    floats, _, norms = finish([layout], [weights], backend, gradients=0, flag=False)
    np.testing.assert_allclose(floats[s.PARAM_NORM], norm_of(weights), rtol=1e-6)
    assert (floats[s.GRAD_FACTOR], floats[s.APPLY], norms) == (1, 1, ())


def test_a_float32_arena_beside_a_float64_one(backend):
    layouts = [usual_layout("float64"), usual_layout("float32")]
    rng = np.random.default_rng(5)
    leaves = [random_leaves(layout, rng) for layout in layouts]
    with jax.enable_x64(True):
        floats = make_floats(dtype="float64", max_norm=1.0)
        new, ints, norms = finish(layouts, leaves, backend, floats=floats)
        assert ints[s.STEP] == 1
        np.testing.assert_allclose(new[s.GRAD_NORM], norm_of(*leaves[0], *leaves[1]), rtol=1e-14)
        for got, layout, own in zip(norms, layouts, leaves, strict=True):
            wanted = [norm_of(x) for x in segments_of(layout, own)]
            np.testing.assert_allclose(got, wanted, rtol=1e-14)
        leaves[1][4][2] = np.nan
        new, ints, _ = finish(layouts, leaves, backend, floats=floats)
    assert (new[s.APPLY], ints[s.LAST_BAD_LEAF]) == (0, len(layouts[0].shapes) + 4)


def test_counters_stay_where_nothing_is_to_be_flagged(backend):
    layout = make_layout([(40,)])
    leaves = [np.full(40, np.nan, np.float32)]
    ints = np.arange(100, 100 + s.INTS, dtype=np.int32)
    for operand in leaves, to_arena(layout, leaves):
        run = lambda x, ints: ops.norms(layout, ints, x, flag=False, backend=backend)[0]  # noqa: E731
        np.testing.assert_array_equal(jax.jit(run)(operand, ints), ints)


def test_a_gradient_that_is_not_finite_has_such_a_norm_and_changes_nothing_else(backend):
    layout = make_layout([(40,), (3,)])
    for value in np.inf, np.nan:
        leaves = [np.ones(40, np.float32), np.ones(3, BFLOAT16)]
        leaves[0][39] = value
        floats = make_floats(max_norm=1.0, loss_scale=4.0, backoff=0.5)
        floats, ints, (norms,) = finish([layout], [leaves], backend, floats=floats)
        assert (floats[s.APPLY], floats[s.LOSS_SCALE], ints[s.LAST_BAD_LEAF]) == (0, 2, 0)
        np.testing.assert_array_equal(np.isfinite(norms), [False, True])


# The norm of the update.


def update_norm(kind, layout, floats, states, gradients, backend):
    @jax.jit
    def run(floats, states, gradients):
        weights, *moments = states
        (workspace,) = ops.update_norms(
            kind, layout, floats, weights, moments, gradients, backend=backend
        )
        return ops.finish_update(floats, [workspace], [len(layout.segments)], backend=backend)

    return np.array(run(*jax.device_put((floats, states, gradients))))


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_of_the_update_is_that_of_what_changes(kind, dtype, backend):
    rng = np.random.default_rng(6)
    layout = usual_layout(dtype)
    states, leaves = random_states(layout, kind, rng), random_leaves(layout, rng)
    gradient = to_arena(layout, leaves)
    new = expected_update(kind, layout, states, gradient, step=3, factor=0.5, max_value=0.7)
    floats = make_floats(dtype=dtype, step=3, factor=0.5, max_value=0.7, update_norm=7.0)
    with jax.enable_x64(dtype == "float64"):
        # On the xla backend, where a gradient comes from does not depend on the kind.
        for operand in [leaves] if backend == "xla" and kind != "adam" else [leaves, gradient]:
            got = update_norm(kind, layout, floats, states, operand, backend)
            wanted = norm_of(new[0] - states[0])
            rtol = 2e-6 if dtype == "float32" else 1e-13
            np.testing.assert_allclose(got[s.UPDATE_NORM], wanted, rtol=rtol)
            assert_same_bits(np.delete(got, s.UPDATE_NORM), np.delete(floats, s.UPDATE_NORM))


@native_backends
@pytest.mark.parametrize("kind", KINDS)
def test_the_native_norm_of_the_update_has_the_bits_of_the_tree(kind, backend):
    rng = np.random.default_rng(7)
    layout = usual_layout()
    states, leaves = random_states(layout, kind, rng), random_leaves(layout, rng)
    with jax.enable_x64(True):
        floats = make_floats(dtype="float64")
        new = update(kind, layout, floats, states, leaves, backend=backend)
        change = new[0].astype(np.float64) - states[0]
        wanted = np.sqrt(total(segments_of(layout, to_leaves(layout, change))))
        for operand in leaves, to_arena(layout, leaves):
            got = update_norm(kind, layout, floats, states, operand, backend)
            assert_same_bits(got[s.UPDATE_NORM], wanted)


def test_a_call_that_does_not_update_has_an_update_of_norm_zero(backend):
    layout = make_layout([(40,), (0,)])
    states = random_states(layout, "sgd", np.random.default_rng(8))
    for value in 1.0, np.nan:
        leaves = [np.full(40, value, np.float32), np.zeros(0, np.float32)]
        floats = make_floats(apply=False, update_norm=7.0)
        assert update_norm("sgd", layout, floats, states, leaves, backend)[s.UPDATE_NORM] == 0


def test_without_arenas_finish_is_the_prologue(backend):
    floats, ints = jax.device_put((make_floats(), s.initial_ints()))
    new, counts, norms, _ = ops.finish(
        floats, ints, [], [], gradients=0, by_segment=True, backend=backend
    )
    wanted = expected_prologue(np.array(floats), np.array(ints))
    np.testing.assert_allclose(new, wanted[0], rtol=1e-6)
    np.testing.assert_array_equal(counts, wanted[1])
    assert norms == ()
    assert ops.finish_update(floats, [], [], backend=backend) is floats
