"""changes: what an update adds to weights that are leaves, against float64 and the update."""

import jax
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    KINDS,
    LEAF_DTYPES,
    NUMBERS,
    assert_close,
    assert_same_bits,
    changes,
    expected_update,
    group_of_elements,
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
from test_same_bits import DECAYED, assert_bits_where_not_nan, ieee_update, wild, wild_states

from jaxrenaissance import ops
from jaxrenaissance import scalars as s

DECAY = [NUMBERS[0] | {"wd": 0.2, "l2": 0.4}, NUMBERS[1] | {"l2": 0.1}]
NO_DECAY = [n | {"wd": 0.0} for n in NUMBERS]


def of_other_dtypes(layout):
    """For each leaf the dtype after that of `random_leaves`."""
    dtypes = LEAF_DTYPES[layout.dtype.name]
    return [dtypes[(i + 1) % len(dtypes)] for i in range(len(layout.shapes))]


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_changes_and_moments_are_those_of_the_update(kind, dtype, backend):
    rng = np.random.default_rng(0)
    layout = usual_layout(dtype)
    (_, *moments), leaves = random_states(layout, kind, rng), random_leaves(layout, rng)
    weights, dtypes = random_leaves(layout, rng), of_other_dtypes(layout)
    states = [to_arena(layout, weights), *moments]
    wanted = expected_update(
        kind, layout, states, to_arena(layout, leaves), DECAY, step=3, factor=0.625
    )
    floats = make_floats(DECAY, dtype=dtype, step=3, factor=0.625)
    with jax.enable_x64(dtype == "float64"):
        new, got = changes(kind, layout, floats, moments, leaves, weights, dtypes, backend=backend)
        _, *same = update(kind, layout, floats, states, leaves, backend=backend)
    for x, y, own in zip(got, to_leaves(layout, wanted[0] - states[0]), dtypes, strict=True):
        assert x.dtype == own
        assert_close(x, y, own.name)
    for x, y, z in zip(new, same, wanted[1:], strict=True):
        assert_close(x, z, dtype)
        if backend != "xla":
            assert_same_bits(x, y)


@native_backends
@pytest.mark.parametrize("kind", KINDS)
def test_leaves_of_many_chunks_are_those_of_small_ones(kind, backend):
    rng = np.random.default_rng(6)
    size, pieces = 1536, 200  # no piece ends where a chunk does
    large, small = make_layout([(size * pieces,)]), make_layout([(size,)] * pieces)
    dtype = np.dtype(BFLOAT16)
    (gradient,), (weight,) = (random_leaves(large, rng, [dtype]) for _ in range(2))
    _, *moments = random_states(large, kind, rng)
    floats = make_floats(DECAY, step=3, factor=0.625)
    cut = [np.split(x, pieces) for x in (gradient, weight)]
    got = changes(kind, large, floats, moments, [gradient], [weight], [dtype], backend=backend)
    wanted = changes(kind, small, floats, moments, *cut, [dtype] * pieces, backend=backend)
    for x, y in zip(got[0], wanted[0], strict=True):
        assert_same_bits(x, y)
    assert_same_bits(got[1][0], np.concatenate(wanted[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_without_weights_they_are_zero(kind, backend):
    rng = np.random.default_rng(1)
    layout = usual_layout()
    (_, *moments), leaves = random_states(layout, kind, rng), random_leaves(layout, rng)
    zeros = [np.zeros_like(x) for x in leaves]
    dtypes = [np.dtype("float32")] * len(leaves)
    floats = make_floats(NO_DECAY, factor=0.5)
    got, wanted = (
        changes(kind, layout, floats, moments, leaves, weights, dtypes, backend=backend)
        for weights in (None, zeros)
    )
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert any(x.any() for x in got[1])


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_changes_nothing(kind, dtype, backend):
    rng = np.random.default_rng(2)
    layout = usual_layout(dtype)
    moments = [
        rng.integers(0, 256, (layout.size, layout.dtype.itemsize), np.uint8).view(dtype)[:, 0]
        for _ in random_states(layout, kind, rng)[1:]
    ]
    leaves = [np.full_like(g, np.nan) for g in random_leaves(layout, rng)]
    floats = make_floats(dtype=dtype, apply=False)
    dtypes = of_other_dtypes(layout)
    with jax.enable_x64(dtype == "float64"):
        new, got = changes(kind, layout, floats, moments, leaves, leaves, dtypes, backend=backend)
    for x, y in zip(new, moments, strict=True):
        assert_same_bits(x, y)
    for x in got:
        np.testing.assert_array_equal(x.astype(np.float64), 0)


@native_backends
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "sgd"])
def test_padding_of_moments_is_never_written(kind, backend):
    rng = np.random.default_rng(3)
    layout = usual_layout()
    padding = group_of_elements(layout) < 0
    (_, *moments), leaves = random_states(layout, kind, rng), random_leaves(layout, rng)
    for x in moments:
        x.view(np.uint32)[padding] = 0xFFA1B2C3
    dtypes = of_other_dtypes(layout)
    new, _ = changes(kind, layout, make_floats(), moments, leaves, leaves, dtypes, backend=backend)
    for x, y in zip(new, moments, strict=True):
        assert_same_bits(x[padding], y[padding])


def test_a_change_is_not_rounded_as_the_weight_is(backend):
    layout = make_layout([(33,)])
    gradient = np.linspace(1e-6, 2e-6, 33, dtype=np.float32)
    weights = np.full(33, 1e6, np.float32)  # whose unit in the last place is 0.06
    _, (got,) = changes(
        "sgd",
        layout,
        make_floats([{"lr": 0.5}]),
        [],
        [gradient],
        [weights],
        [np.dtype("float32")],
        backend=backend,
    )
    np.testing.assert_array_equal(got, -0.5 * gradient)


@native_backends
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_they_have_the_bits_of_ieee_arithmetic(kind, dtype, backend):
    rng = np.random.default_rng(4)
    layout = usual_layout(dtype)
    floats = make_floats(DECAYED, dtype=dtype, step=7, factor=0.7, max_value=0.6)
    floats[s.HEADER + s.LR_IN_MOMENT] = kind == "momentum"
    leaves, weights = wild(layout, rng), wild(layout, rng)
    _, *moments = wild_states(layout, kind, rng)
    ratios = rng.uniform(0.5, 2, len(layout.segments)).astype(layout.dtype)
    # From −0 on, the new weight is the change itself.
    states = [to_arena(layout, weights), *moments]
    with np.errstate(all="ignore"):
        wanted = ieee_update(
            kind, layout, floats, states, to_arena(layout, leaves), ratios, origin=-0.0
        )
    dtypes = [layout.dtype] * len(leaves)
    with jax.enable_x64(dtype == "float64"):
        new, got = changes(
            kind, layout, floats, moments, leaves, weights, dtypes, ratios=ratios, backend=backend
        )
    assert_bits_where_not_nan(new, wanted[1:])
    assert_bits_where_not_nan(got, to_leaves(layout, wanted[0]))


@pytest.mark.parametrize("shared", ["nothing", "gradients", "weights", "floats"])
def test_members_are_as_if_alone(shared, backend):
    rng = np.random.default_rng(5)
    layout = make_layout([(5,), (0,), (3, 33), (), (31,)], stacked=[0, 0, 1, 0, 0])
    dtypes = [np.dtype("float32"), BFLOAT16, np.dtype("float16"), *[np.dtype("float32")] * 2]
    members = [
        {
            "floats": make_floats([{"lr": 0.1 * (i + 1), "wd": 0.1}]),
            "moments": random_states(layout, "adam", rng)[1:],
            "gradients": random_leaves(layout, rng),
            "weights": random_leaves(layout, rng),
        }
        for i in range(3)
    ]
    members[1]["floats"][s.APPLY] = shared == "floats"
    for x in members:
        x.update({name: members[0][name] for name in x if name == shared})
    axes = {name: None if name == shared else 0 for name in members[0]}

    def run(operands):
        return ops.changes("adam", layout, **operands, dtypes=dtypes, backend=backend)

    batch = {
        name: members[0][name]
        if name == shared
        else jax.tree.map(lambda *xs: np.stack(xs), *(x[name] for x in members))
        for name in axes
    }
    got = jax.jit(jax.vmap(run, (axes,)))(jax.device_put(batch))
    alone_fn = jax.jit(run)
    for i, x in enumerate(members):
        alone = alone_fn(jax.device_put(x))
        own = jax.tree.map(lambda y, i=i: y[i], got)
        compare = assert_same_bits if backend != "xla" else assert_close_any
        jax.tree.map(compare, own, alone)


def assert_close_any(got, wanted):
    assert got.dtype == wanted.dtype
    assert_close(got, np.asarray(wanted, np.float64), got.dtype.name)
