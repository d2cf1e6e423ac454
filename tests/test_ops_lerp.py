"""lerp: values against float64, and what must be exact."""

import functools

import jax
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    LEAF_DTYPES,
    assert_close,
    assert_same_bits,
    group_of_elements,
    make_layout,
    native_backends,
    random_leaves,
    to_arena,
    usual_layout,
)

from jaxrenaissance import ops

SOURCES = ("leaves", "arena", "zero")


@functools.cache
def jitted(layout, backend):
    return jax.jit(functools.partial(ops.lerp, layout, backend=backend))


def lerp(layout, taus, targets, source, backend):
    taus = np.asarray(taus, layout.dtype)
    operands = jax.device_put((taus, list(targets), source))
    return [np.array(x) for x in jitted(layout, backend)(*operands)]


def operands(layout, source, rng):
    """A source in one of its forms, and the same as an arena."""
    leaves = random_leaves(layout, rng)
    arena = to_arena(layout, leaves)
    forms = {
        "leaves": (leaves, arena),
        "arena": (arena, arena),
        "zero": (None, np.zeros_like(arena)),
    }
    return forms[source]


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
def test_lerp_is_the_formula(dtype, source, targets, backend):
    rng = np.random.default_rng(0)
    layout = usual_layout(dtype)
    arenas = [to_arena(layout, random_leaves(layout, rng)) for _ in range(targets)]
    given, to = operands(layout, source, rng)
    taus = np.array([0.25, 0.7, 9.0], dtype)
    groups = group_of_elements(layout)
    tau = np.where(groups < 0, 0, taus[groups]).astype(np.float64)
    with jax.enable_x64(dtype == "float64"):
        got = lerp(layout, taus, arenas, given, backend)
    for x, arena in zip(got, arenas, strict=True):
        assert x.dtype == dtype
        assert_close(x, arena + tau * (to.astype(np.float64) - arena), dtype)


@pytest.mark.parametrize("source", SOURCES)
def test_one_copies_and_zero_leaves_alone_bit_for_bit(source, backend):
    rng = np.random.default_rng(1)
    layout = usual_layout()
    given, to = operands(layout, source, rng)
    target = to_arena(layout, random_leaves(layout, rng))
    groups = group_of_elements(layout)
    kinds = [np.nan, np.inf, -np.inf, 1e38, -1e38, np.finfo("f4").max]
    target = np.where(groups < 0, 0, rng.choice(kinds, layout.size)).astype(np.float32)
    for taus in (1.0, 0.0), (0.0, 1.0):
        (got,) = lerp(layout, taus, [target], given, backend)
        moved = (groups >= 0) & (np.array(taus)[groups] == 1)
        assert_same_bits(got, np.where(moved, to, target))


def test_a_source_that_is_not_finite_reaches_only_its_elements(backend):
    layout = make_layout([(5,), (33,)], groups=[0, 1])
    leaves = [np.ones(5, "f4"), np.ones(33, BFLOAT16)]
    leaves[0][4], leaves[1][32] = np.inf, np.nan
    target = to_arena(layout, [np.zeros(5), np.zeros(33)])
    arena = to_arena(layout, leaves)
    for source in leaves, arena:
        (got,) = lerp(layout, [0.5, 0.0], [target], source, backend)
        np.testing.assert_array_equal(got, to_arena(layout, [leaves[0] * 0.5, np.zeros(33)]))
        (got,) = lerp(layout, [0.5, 1.0], [target], source, backend)
        np.testing.assert_array_equal(got, to_arena(layout, [leaves[0] * 0.5, leaves[1]]))


@native_backends
@pytest.mark.parametrize("source", SOURCES)
def test_padding_of_a_target_is_never_written(source, backend):
    rng = np.random.default_rng(2)
    layout = usual_layout()
    given, _ = operands(layout, source, rng)
    padding = group_of_elements(layout) < 0
    targets = [to_arena(layout, random_leaves(layout, rng)) for _ in range(2)]
    for target in targets:
        target.view(np.uint32)[padding] = 0xFFA1B2C3
    for taus in (1.0, 0.5), (0.0, 1.0):
        for got, target in zip(lerp(layout, taus, targets, given, backend), targets, strict=True):
            assert_same_bits(got[padding], target[padding])


def test_without_elements_there_is_nothing_to_move(backend):
    layout = make_layout([(0,), (2, 0)])
    target = np.zeros(layout.size, np.float32)
    for source in [np.zeros((0,), "f4"), np.zeros((2, 0), "f4")], target, None:
        (got,) = lerp(layout, [0.5], [target], source, backend)
        assert_same_bits(got, target)
