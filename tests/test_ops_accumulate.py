"""accumulate: what is stored, what is added, what is flagged."""

import functools

import jax
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    LEAF_DTYPES,
    assert_same_bits,
    group_of_elements,
    make_floats,
    make_layout,
    native_backends,
    random_leaves,
    to_arena,
    to_leaves,
    usual_layout,
)
from reduction import segments_of, sum_of_squares, total

from jaxrenaissance import ops
from jaxrenaissance import scalars as s


@functools.cache
def jitted(layout, flag, norms, backend):
    @jax.jit
    def run(ints, accumulator, gradients):
        ints, accumulator, workspace = ops.accumulate(
            layout, ints, accumulator, gradients, flag=flag, norms=norms, backend=backend
        )
        if not norms:
            assert workspace is None
            return ints, accumulator, ()
        segments = [len(layout.segments)]
        floats = make_floats(dtype="float64" if jax.config.jax_enable_x64 else "float32")
        floats, _, by_segment, _ = ops.finish(
            jax.numpy.asarray(floats),
            ints.at[s.MICRO].set(0),
            [workspace],
            segments,
            gradients=1,
            by_segment=True,
            backend=backend,
        )
        return ints, accumulator, (floats[s.GRAD_NORM], by_segment[0])

    return run


def accumulate(layout, accumulator, gradients, backend, *, micro, flag=True, norms=False):
    """The new counters, the sum, and the norms of all and by segment; MICRO must stay."""
    ints = s.initial_ints()
    ints[s.MICRO] = micro
    operands = jax.device_put((ints, accumulator, gradients))
    new, total, norms = jax.tree.map(np.array, jitted(layout, flag, norms, backend)(*operands))
    np.testing.assert_array_equal(np.delete(new, s.FIRST_BAD), np.delete(ints, s.FIRST_BAD))
    return new, total, norms


@pytest.mark.parametrize("source", ["leaves", "arena"])
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
def test_the_first_is_stored_and_the_others_are_added(dtype, source, backend):
    rng = np.random.default_rng(0)
    layout = usual_layout(dtype)
    # What the cycle before has left is overwritten, whatever it is.
    accumulator = np.where(group_of_elements(layout) < 0, 0, np.nan).astype(dtype)
    wanted = np.zeros(layout.size, dtype)
    with jax.enable_x64(dtype == "float64"):
        for micro in range(4):
            leaves = random_leaves(layout, rng)
            arena = to_arena(layout, leaves)
            operand = leaves if source == "leaves" else arena
            ints, accumulator, (norm, by_segment) = accumulate(
                layout, accumulator, operand, backend, micro=micro, norms=True
            )
            wanted = wanted + arena if micro else arena
            assert_same_bits(accumulator, wanted)
            assert ints[s.FIRST_BAD] == s.NO_LEAF
            segments = segments_of(layout, to_leaves(layout, wanted))
            rtol = 1e-6 if dtype == "float32" else 1e-13
            np.testing.assert_allclose(norm, np.sqrt(total(segments)), rtol=rtol)
            sums = [sum_of_squares(x) for x in segments]
            np.testing.assert_allclose(by_segment, np.sqrt(sums), rtol=rtol)


@native_backends
@pytest.mark.parametrize("micro", [0, 1])
def test_native_norms_of_the_sum_have_the_bits_of_the_tree(micro, backend):
    rng = np.random.default_rng(1)
    layout = usual_layout()
    accumulator = to_arena(layout, random_leaves(layout, rng))
    leaves = random_leaves(layout, rng)
    with jax.enable_x64(True):
        for operand in leaves, to_arena(layout, leaves):
            _, got, (norm, by_segment) = accumulate(
                layout, accumulator, operand, backend, micro=micro, norms=True
            )
            segments = segments_of(layout, to_leaves(layout, got))
            assert_same_bits(norm, np.sqrt(total(segments)))
            assert_same_bits(by_segment, np.sqrt([sum_of_squares(x) for x in segments]))


@pytest.mark.parametrize("micro", [0, 1])
def test_a_sum_that_overflows_is_flagged_where_it_happens(micro, backend):
    layout = make_layout([(5,), (33,), (2,)])
    largest = np.finfo(np.float32).max
    accumulator = to_arena(layout, [np.zeros(5), np.full(33, largest), np.zeros(2)])
    leaves = [np.zeros(5, "f4"), np.zeros(33, "f4"), np.zeros(2, BFLOAT16)]
    leaves[1][32] = largest
    ints, total, _ = accumulate(layout, accumulator, leaves, backend, micro=micro)
    assert ints[s.FIRST_BAD] == (1 if micro else s.NO_LEAF)
    assert np.isfinite(total).all() == (micro == 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_was_bad_before_is_not_the_fault_of_what_comes_after(value, backend):
    layout = make_layout([(5,), (33,)])
    accumulator = to_arena(layout, [np.ones(5), np.full(33, value)])
    leaves = [np.ones(5, "f4"), np.ones(33, "f4")]
    ints, _, _ = accumulate(layout, accumulator, leaves, backend, micro=2)
    assert ints[s.FIRST_BAD] == s.NO_LEAF
    leaves[1][7] = -value
    for operand in leaves, to_arena(layout, leaves):
        ints, _, _ = accumulate(layout, accumulator, operand, backend, micro=2)
        assert ints[s.FIRST_BAD] == 1


def test_nothing_is_flagged_where_nothing_is_to_be(backend):
    layout = make_layout([(5,), (33,)])
    leaves = [np.full(5, np.nan, "f4"), np.full(33, np.inf, BFLOAT16)]
    accumulator = np.zeros(layout.size, np.float32)
    ints, total, _ = accumulate(layout, accumulator, leaves, backend, micro=1, flag=False)
    assert ints[s.FIRST_BAD] == s.NO_LEAF
    np.testing.assert_array_equal(total, to_arena(layout, leaves))


@native_backends
@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize("source", ["leaves", "arena"])
def test_padding_of_the_sum_is_never_written(source, micro, backend):
    layout = usual_layout()
    leaves = random_leaves(layout, np.random.default_rng(2))
    padding = group_of_elements(layout) < 0
    accumulator = to_arena(layout, leaves)
    accumulator.view(np.uint32)[padding] = 0xFFA1B2C3
    operand = leaves if source == "leaves" else to_arena(layout, leaves, padding=1.0)
    for norms in False, True:
        _, total, _ = accumulate(layout, accumulator, operand, backend, micro=micro, norms=norms)
        assert_same_bits(total[padding], accumulator[padding])


@native_backends
def test_subnormal_sums_are_kept(backend):
    layout = make_layout([(40,)])
    k = np.arange(40)
    accumulator = to_arena(layout, [k * 2.0**-149])
    gradient = [(2 * k * 2.0**-149).astype(np.float32)]
    for micro, units in (0, 2 * k), (1, 3 * k):
        _, total, _ = accumulate(layout, accumulator, gradient, backend, micro=micro)
        assert_same_bits(total, to_arena(layout, [units * 2.0**-149]))
