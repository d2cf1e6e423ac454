"""pack and unpack: every rounding, every bit that must survive, padding."""

import functools

import jax
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    LEAF_DTYPES,
    assert_same_bits,
    bits,
    group_of_elements,
    make_layout,
    put,
    put_all,
    random_leaves,
    to_arena,
    to_leaves,
    usual_layout,
)

from jaxrenaissance import ops

PATTERNS = np.arange(1 << 16, dtype=np.uint16)
HALVES = {"bfloat16": BFLOAT16, "float16": np.dtype("float16")}
# Digits of the significand, exponent of the smallest normal number, of the first beyond the range.
FORMATS = {"float32": (24, -126, 128), "bfloat16": (8, -126, 128), "float16": (11, -14, 16)}


@functools.cache
def jitted(op, layout, backend, dtypes=()):
    arguments = (tuple(dtypes),) if op is ops.unpack else ()
    return jax.jit(lambda x: op(layout, x, *arguments, backend=backend))


def pack(layout, leaves, backend):
    return np.array(jitted(ops.pack, layout, backend)(put_all(leaves)))


def unpack(layout, arena, dtypes, backend):
    return [np.array(x) for x in jitted(ops.unpack, layout, backend, tuple(dtypes))(put(arena))]


def pack_one(leaf, backend, dtype="float32"):
    layout = make_layout([leaf.shape], dtype=dtype)
    return pack(layout, [leaf], backend)[: leaf.size]


def unpack_one(values, dtype, backend):
    layout = make_layout([values.shape], dtype=values.dtype.name)
    return unpack(layout, to_arena(layout, [values]), [np.dtype(dtype)], backend)[0]


def round_to(name, x):
    """float64 to the nearest number of a format, ties to even, as float64."""
    digits, lowest, beyond = FORMATS[name]
    exponent = np.maximum(np.frexp(x)[1] - 1, lowest)
    unit = np.ldexp(1.0, exponent - digits + 1)
    rounded = np.rint(x / unit) * unit
    return np.where(np.abs(rounded) >= 2.0**beyond, np.copysign(np.inf, x), rounded)


def values_of(name):
    """The value of every bit pattern of a 16-bit format, by its definition, in float64."""
    digits, lowest, _ = FORMATS[name]
    stored = digits - 1
    sign = np.where(PATTERNS >> 15, -1.0, 1.0)
    field = (PATTERNS & 0x7FFF) >> stored
    fraction = (PATTERNS & ((1 << stored) - 1)).astype(np.float64)
    top = (1 << (15 - stored)) - 1
    significand = np.where(field > 0, fraction + (1 << stored), fraction)
    values = sign * np.ldexp(significand, lowest - stored + np.maximum(field, 1).astype(int) - 1)
    return np.where(field == top, np.where(fraction > 0, np.nan, sign * np.inf), values)


def around_ties(name, dtype):
    """Every finite number of a 16-bit format, the ties between neighbours, and what lies beside."""
    values = values_of(name)
    values = values[np.isfinite(values)]
    positive = np.sort(values[~np.signbit(values)])
    beyond = 2.0 ** FORMATS[name][2]
    ties = (positive + np.append(positive[1:], beyond)) / 2
    with np.errstate(over="ignore"):
        exact = np.concatenate([positive, ties, [beyond]]).astype(dtype)
    x = np.concatenate([exact, np.nextafter(exact, np.inf), np.nextafter(exact[1:], -np.inf)])
    x = x[np.isfinite(x)]
    return np.concatenate([x, -x])


def kept(x, backend):
    """Which of these values are compared: XLA flushes subnormals of float32."""
    return np.isfinite(x) & (backend != "xla" or np.abs(x) >= 2.0**-126)


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("name", HALVES)
def test_every_16_bit_pattern_is_widened_exactly(name, dtype, backend):
    leaf, values = PATTERNS.view(HALVES[name]), values_of(name)
    with jax.enable_x64(dtype == "float64"):
        got = pack_one(leaf, backend, dtype)
    compare = kept(values, backend)
    assert_same_bits(got[compare], values[compare].astype(dtype))
    np.testing.assert_array_equal(got[~np.isfinite(values)], values[~np.isfinite(values)])


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("name", HALVES)
def test_every_16_bit_pattern_comes_back(name, dtype, backend):
    values = values_of(name)
    with jax.enable_x64(dtype == "float64"):
        got = unpack_one(values.astype(dtype), name, backend)
    assert got.dtype == HALVES[name]
    assert np.isnan(got[np.isnan(values)].astype(np.float32)).all()
    compare = kept(values, backend) | np.isinf(values)
    np.testing.assert_array_equal(bits(got)[compare], PATTERNS[compare])


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("name", HALVES)
def test_ties_go_to_even_and_their_neighbours_to_the_nearest(name, dtype, backend):
    # From float64 there is one rounding: by way of float32, as XLA goes to bfloat16, the neighbours
    # would become ties.
    x = around_ties(name, "float32" if backend == "xla" else dtype).astype(dtype)
    wanted = round_to(name, x.astype(np.float64))
    with jax.enable_x64(dtype == "float64"):
        got = unpack_one(x, name, backend).astype(np.float64)
    compare = kept(x, backend) & (backend != "xla" or np.abs(wanted) >= 2.0 ** FORMATS[name][1])
    np.testing.assert_array_equal(got[compare], wanted[compare])
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))
    assert np.isinf(wanted).any()


def test_float64_is_rounded_to_float32_once(backend):
    rng = np.random.default_rng(0)
    x = np.ldexp(rng.normal(size=20_000), rng.integers(-160, 130, 20_000))
    x = x[np.abs(x) < np.finfo(np.float32).max]
    float32 = x.astype(np.float32).astype(np.float64)
    ties = (float32 + np.nextafter(float32.astype("f4"), np.float32(0)).astype(np.float64)) / 2
    x = np.concatenate([x, ties, np.nextafter(ties, np.inf), [3e38, 3.5e38, 1e300, 5e-324, -1e39]])
    wanted = round_to("float32", x)
    with jax.enable_x64(True):
        got = unpack_one(x, "float32", backend).astype(np.float64)
    compare = kept(wanted, backend) | np.isinf(wanted)
    np.testing.assert_array_equal(got[compare], wanted[compare])
    assert np.isinf(wanted).sum() == 3


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("name", HALVES)
def test_nan_stays_nan(name, dtype, backend):
    # Also where all payload bits are among those that go.
    unsigned = np.uint32 if dtype == "float32" else np.uint64
    digits = 23 if dtype == "float32" else 52
    top = np.array([0x7F800000 if digits == 23 else 0x7FF0000000000000], unsigned)
    payloads = np.array([1, 2, (1 << (digits - 1)) - 1, 1 << (digits - 1), (1 << digits) - 1])
    sign = unsigned(1) << unsigned(31 if digits == 23 else 63)
    x = np.concatenate([top | payloads.astype(unsigned), top | sign | payloads.astype(unsigned)])
    with jax.enable_x64(dtype == "float64"):
        assert np.isnan(unpack_one(x.view(dtype), name, backend).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
def test_the_arenas_own_dtype_keeps_every_bit(dtype, backend):
    rng = np.random.default_rng(1)
    layout = usual_layout(dtype)
    size = layout.dtype.itemsize
    leaves = [
        rng.integers(0, 256, (*shape, size), np.uint8).view(dtype).reshape(shape)
        for shape in layout.shapes
    ]
    with jax.enable_x64(dtype == "float64"):
        arena = pack(layout, leaves, backend)
        assert_same_bits(arena, to_arena(layout, leaves))
        got = unpack(layout, arena, [layout.dtype] * len(leaves), backend)
    for x, y in zip(got, leaves, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
def test_leaves_of_mixed_dtypes_come_back_and_padding_is_zero(dtype, backend):
    layout = usual_layout(dtype)
    with jax.enable_x64(dtype == "float64"):
        for seed in range(3):
            # Memory that the arena may be given again holds NaNs.
            np.array(put(np.full(layout.size, np.nan, dtype)) + 1)
            leaves = random_leaves(layout, np.random.default_rng(seed))
            arena = pack(layout, leaves, backend)
            assert_same_bits(arena, to_arena(layout, leaves))
            assert not bits(arena)[group_of_elements(layout) < 0].any()
            got = unpack(layout, arena, [x.dtype for x in leaves], backend)
            for x, y in zip(got, leaves, strict=True):
                assert x.shape == y.shape
                assert_same_bits(x, y)


def test_unpack_does_not_read_padding_and_rounds_each_leaf_to_its_dtype(backend):
    layout = usual_layout()
    rng = np.random.default_rng(2)
    leaves = random_leaves(layout, rng, [np.dtype("float32")])
    arena = to_arena(layout, leaves, padding=np.nan)
    dtypes = [LEAF_DTYPES["float32"][i % 3] for i in range(len(leaves))]
    got = unpack(layout, arena, dtypes, backend)
    for x, leaf, dtype in zip(got, to_leaves(layout, arena), dtypes, strict=True):
        assert x.dtype == dtype
        np.testing.assert_array_equal(
            x.astype(np.float64), round_to(dtype.name, leaf.astype(np.float64))
        )


@pytest.mark.parametrize("shape", [(), (1,), (0,)])
def test_a_single_leaf(shape, backend):
    layout = make_layout([shape])
    leaf = np.full(shape, 1.5, np.float16)
    arena = pack(layout, [leaf], backend)
    assert_same_bits(arena, to_arena(layout, [leaf]))
    assert_same_bits(unpack(layout, arena, [leaf.dtype], backend)[0], leaf)
