"""Which leaf is the first with a non-finite gradient, by each op that looks for it."""

import functools

import jax
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    LEAF_DTYPES,
    make_layout,
    put,
    put_all,
    random_leaves,
    to_arena,
    usual_layout,
)

from jaxrenaissance import ops, scalars

NAMES = {dtype.name: dtype for dtype in LEAF_DTYPES["float64"]}
# Lengths around those that one thread or one vector takes at once.
SIZES = (1, 3, 4, 31, 33, 64, 70, 129, 1027)


def arena_dtype(name):
    return "float64" if name == "float64" else "float32"


def accumulate(layout, ints, gradients, *, micro, norms, **options):
    """As micro-batch number `micro` of its cycle."""
    before, accumulator = ints[scalars.MICRO], jax.numpy.ones(layout.size, layout.dtype)
    ints = ints.at[scalars.MICRO].set(micro)
    ints, _, _ = ops.accumulate(
        layout, ints, accumulator, gradients, flag=True, norms=norms, **options
    )
    return ints.at[scalars.MICRO].set(before)


FINDERS = {
    "statistics": ops.statistics,
    "norms": lambda *operands, **options: ops.norms(*operands, flag=True, **options)[0],
    "accumulate first": functools.partial(accumulate, micro=0, norms=False),
    "accumulate more": functools.partial(accumulate, micro=1, norms=True),
}
"""The op, and how it is called: the layout, counters and gradients to the counters."""


@pytest.fixture(params=FINDERS)
def op(request):
    return request.param


@functools.cache
def jitted(op, layout, first_leaf, backend):
    return jax.jit(
        lambda ints, gradients: FINDERS[op](
            layout, ints, gradients, first_leaf=first_leaf, backend=backend
        )
    )


def first_bad(op, layout, gradients, backend, *, first_leaf=0, ints=None):
    """FIRST_BAD afterwards; all other counters must stay."""
    ints = scalars.initial_ints() if ints is None else ints
    operand = put_all(gradients) if isinstance(gradients, list) else put(gradients)
    got = np.array(jitted(op, layout, first_leaf, backend)(put(ints), operand))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(
        np.delete(got, scalars.FIRST_BAD), np.delete(ints, scalars.FIRST_BAD)
    )
    return int(got[scalars.FIRST_BAD])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_one_bad_element_anywhere_is_found(name, value, op, backend):
    layout = make_layout([(n,) for n in SIZES], dtype=arena_dtype(name))
    zeros = [np.zeros(n, NAMES[name]) for n in SIZES]
    with jax.enable_x64(name == "float64"):
        for i, n in enumerate(SIZES):
            for position in sorted({0, 1 % n, n // 2, n - 2 if n > 1 else 0, n - 1}):
                leaves = [x.copy() for x in zeros]
                leaves[i][position] = value
                assert first_bad(op, layout, leaves, backend) == i
                if name == arena_dtype(name):
                    assert first_bad(op, layout, to_arena(layout, leaves), backend) == i


@pytest.mark.parametrize("name", NAMES)
def test_zeros_subnormals_and_the_largest_numbers_are_not_bad(name, op, backend):
    dtype = NAMES[name]
    info = jax.numpy.finfo(dtype)
    extremes = [0.0, info.smallest_subnormal, info.smallest_normal, info.max]
    extremes = np.array([float(x) for x in extremes], np.float64).astype(dtype)
    extremes = np.concatenate([extremes, -extremes])
    layout = make_layout([(n,) for n in SIZES], dtype=arena_dtype(name))
    with jax.enable_x64(name == "float64"):
        for shift in range(3):
            leaves = [np.resize(np.roll(extremes, shift), n) for n in SIZES]
            assert all(np.isfinite(x.astype(np.float64)).all() for x in leaves)
            assert first_bad(op, layout, leaves, backend) == scalars.NO_LEAF
            if name == arena_dtype(name):
                assert first_bad(op, layout, to_arena(layout, leaves), backend) == scalars.NO_LEAF


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_16_bit_pattern_is_judged_rightly(name, op, backend):
    # Each pattern is a member of a batch, whose last element it is.
    layout = make_layout([(3,)])
    patterns = np.zeros((1 << 16, 3), np.uint16)
    patterns[:, 2] = np.arange(1 << 16)
    leaves = patterns.view(NAMES[name])
    run = jax.jit(jax.vmap(jitted(op, layout, 0, backend), (None, 0)))
    got = np.array(run(put(scalars.initial_ints()), [put(leaves)]))[:, scalars.FIRST_BAD]
    exponent = 0x7F80 if name == "bfloat16" else 0x7C00
    bad = patterns[:, 2] & exponent == exponent
    np.testing.assert_array_equal(got, np.where(bad, 0, scalars.NO_LEAF))


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
def test_the_smallest_leaf_is_named_among_leaves_of_mixed_dtypes(dtype, op, backend):
    layout = usual_layout(dtype)
    clean = random_leaves(layout, np.random.default_rng(0))
    filled = [i for i, x in enumerate(clean) if x.size]
    with jax.enable_x64(dtype == "float64"):
        assert first_bad(op, layout, clean, backend, first_leaf=7) == scalars.NO_LEAF
        for k, first in enumerate(filled):
            leaves = [x.copy() for x in clean]
            for i in filled[k:]:
                leaves[i].reshape(-1)[-1] = np.nan
            assert first_bad(op, layout, leaves, backend, first_leaf=7) == 7 + first
            arena = to_arena(layout, leaves)
            assert first_bad(op, layout, arena, backend, first_leaf=7) == 7 + first


def test_the_leaf_of_a_bad_slice_is_named_not_the_slice(op, backend):
    layout = make_layout([(4, 3), (6, 5, 7), (2,)], stacked=[1, 2, 0])
    leaves = [np.zeros(shape, BFLOAT16) for shape in layout.shapes]
    leaves[1][5, 4, 6] = np.inf
    assert first_bad(op, layout, leaves, backend) == 1
    assert first_bad(op, layout, to_arena(layout, leaves), backend) == 1


@pytest.mark.parametrize(("before", "after"), [(3, 3), (12, 11), (10, 10)])
def test_what_another_arena_found_before_stays_where_it_is_smaller(before, after, op, backend):
    layout = make_layout([(3,), (40,)])
    leaves = [np.zeros(3, np.float32), np.full(40, np.nan, np.float32)]
    ints = np.arange(100, 100 + scalars.INTS, dtype=np.int32)
    ints[scalars.FIRST_BAD] = before
    for gradients in leaves, to_arena(layout, leaves):
        assert first_bad(op, layout, gradients, backend, first_leaf=10, ints=ints) == after


def test_what_lies_in_the_padding_is_not_looked_at(op, backend):
    layout = usual_layout()
    leaves = random_leaves(layout, np.random.default_rng(0))
    arena = to_arena(layout, leaves, padding=np.nan)
    assert first_bad(op, layout, arena, backend) == scalars.NO_LEAF


def test_without_elements_nothing_is_bad(op, backend):
    layout = make_layout([(0,), (2, 0)])
    leaves = [np.zeros(shape, np.float32) for shape in layout.shapes]
    assert first_bad(op, layout, leaves, backend) == scalars.NO_LEAF
    assert first_bad(op, layout, to_arena(layout, leaves), backend) == scalars.NO_LEAF


def test_every_chunk_of_a_large_leaf_is_looked_at(op, backend):
    # Of one leaf, more than one thread's share; a bad element at each end of each 4096th stretch.
    n = 3 * 65_536 + 5
    layout = make_layout([(7,), (n,), (9,)])
    leaves = [np.zeros(7, BFLOAT16), np.zeros(n, BFLOAT16), np.zeros(9, BFLOAT16)]
    for position in [*range(0, n, 16_384), *range(16_383, n, 16_384), n - 1]:
        leaves[1][position] = -np.inf
        assert first_bad(op, layout, leaves, backend) == 1
        leaves[1][position] = 0
