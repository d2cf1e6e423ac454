"""pack and unpack: every rounding, every bit that must survive, padding."""

import dataclasses
import functools
import itertools

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
    native_backends,
    put,
    put_all,
    random_leaves,
    to_arena,
    to_leaves,
    usual_layout,
)

from jaxrenaissance import ops, scalars
from jaxrenaissance.arena_layout import ArenaLayout, line_elements, round_up

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


# Arenas of bfloat16 and float16.


def narrow(layout, name):
    """The same offsets in an arena of a 16-bit format."""
    return dataclasses.replace(layout, dtype=HALVES[name])


def pack_narrow(leaf, name, backend):
    return pack(narrow(make_layout([leaf.shape]), name), [leaf], backend)[: leaf.size]


def unpack_narrow(values, dtype, backend):
    layout = narrow(make_layout([values.shape]), values.dtype.name)
    return unpack(layout, to_arena(layout, [values]), [np.dtype(dtype)], backend)[0]


def assert_rounded(got, x, name, backend):
    """Against float64: NaNs stay some NaN; XLA on the CPU flushes subnormals."""
    wanted = np.where(np.isnan(x), np.nan, round_to(name, x))
    flushed = (np.abs(x) < 2.0**-126) | (np.abs(wanted) < 2.0 ** FORMATS[name][1])
    compare = ~flushed | (x == 0) | (backend != "xla")
    got = got.astype(np.float64)
    np.testing.assert_array_equal(got[compare], wanted[compare])
    numbers = compare & ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(x)[numbers])


@pytest.mark.parametrize("name", HALVES)
def test_a_narrow_arena_keeps_every_bit_of_its_own_dtype(name, backend):
    leaf = PATTERNS.view(HALVES[name])
    assert_same_bits(pack_narrow(leaf, name, backend), leaf)
    assert_same_bits(unpack_narrow(leaf, name, backend), leaf)


@pytest.mark.parametrize("name", HALVES)
def test_float32_is_rounded_to_a_narrow_arena(name, backend):
    odd = np.array([0, np.inf, np.nan, 1e-45, 1e-40, 6e-8, 3e-8, 3e38, 65519.9, 65520], np.float32)
    x = np.concatenate([around_ties(name, "float32"), odd, -odd])
    got = pack_narrow(x, name, backend)
    assert got.dtype == HALVES[name]
    with np.errstate(invalid="ignore"):
        assert_rounded(got, x.astype(np.float64), name, backend)
    # And against the library that defines bfloat16 for NumPy.
    normal = np.abs(x) >= 2.0 ** FORMATS[name][1]
    with np.errstate(over="ignore"):
        assert_same_bits(got[normal], x[normal].astype(HALVES[name]))


@pytest.mark.parametrize("name", HALVES)
def test_one_16_bit_format_beside_an_arena_of_the_other(name, backend):
    (other,) = set(HALVES) - {name}
    with np.errstate(invalid="ignore"):
        leaf, x = PATTERNS.view(HALVES[other]), values_of(other)
        assert_rounded(pack_narrow(leaf, name, backend), x, name, backend)
        assert_rounded(unpack_narrow(leaf, name, backend), x, name, backend)


@pytest.mark.parametrize("name", HALVES)
def test_a_narrow_arena_is_widened_to_float32_exactly(name, backend):
    got, values = unpack_narrow(PATTERNS.view(HALVES[name]), "float32", backend), values_of(name)
    compare = kept(values, backend)
    assert_same_bits(got[compare], values[compare].astype(np.float32))
    np.testing.assert_array_equal(got[~np.isfinite(values)], values[~np.isfinite(values)])


@pytest.mark.parametrize("name", HALVES)
def test_leaves_of_mixed_dtypes_in_a_narrow_arena(name, backend):
    layout = narrow(usual_layout(), name)
    dtypes = LEAF_DTYPES["float32"]
    for seed in range(3):
        # As above: memory that may be given again, full of NaNs.
        np.array(put(np.full(layout.size, np.nan, layout.dtype)) + 1)
        leaves = random_leaves(layout, np.random.default_rng(seed), dtypes)
        arena = pack(layout, leaves, backend)
        assert_same_bits(arena, to_arena(layout, leaves))
        assert not bits(arena)[group_of_elements(layout) < 0].any()
        wanted = [dtypes[(i + seed) % 3] for i in range(len(leaves))]
        for got, leaf, dtype in zip(
            unpack(layout, arena, wanted, backend), to_leaves(layout, arena), wanted, strict=True
        ):
            assert got.shape == leaf.shape
            assert_same_bits(got, leaf.astype(dtype))


@pytest.mark.parametrize("name", ["float32", *HALVES])
def test_members_of_a_batch_and_a_leaf_that_they_share(name, backend):
    layout = make_layout([(5,), (0,), (3, 33), (), (1031,)], stacked=[0, 0, 1, 0, 0])
    layout = layout if name == "float32" else narrow(layout, name)
    dtypes = [LEAF_DTYPES["float32"][i % 3] for i in range(5)]
    members = [random_leaves(layout, np.random.default_rng(seed), dtypes) for seed in range(3)]
    leaves = [np.stack(xs) for xs in zip(*members, strict=True)]
    leaves[2] = members[0][2]
    axes = [0, 0, None, 0, 0]

    # In one program, XLA leaves out what the xla backend rounds on a GPU, to widen it again.
    pack = jax.jit(jax.vmap(lambda x: ops.pack(layout, x, backend=backend), (axes,)))
    unpack = jax.jit(jax.vmap(lambda x: ops.unpack(layout, x, dtypes, backend=backend)))
    packed = pack(put_all(leaves))
    arenas, copies = jax.tree.map(np.array, (packed, unpack(packed)))
    for i, own in enumerate(members):
        wanted = to_arena(layout, [*own[:2], leaves[2], *own[3:]])
        assert_same_bits(arenas[i], wanted)
        for x, y, dtype in zip(copies, to_leaves(layout, wanted), dtypes, strict=True):
            assert_same_bits(x[i], y.astype(dtype))


# One more than each of CUDA's tables holds.
@native_backends
@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, count) for name in HALVES for count in (65, 449)), ("bfloat16", 2001)],
)
def test_many_segments_of_a_narrow_arena(name, count, backend):
    layout = narrow(make_layout([(1 + i % 70,) for i in range(count)]), name)
    dtypes = [LEAF_DTYPES["float32"][i % 3] for i in range(count)]
    members = [random_leaves(layout, np.random.default_rng(seed), dtypes) for seed in range(2)]
    leaves = [np.stack(xs) for xs in zip(*members, strict=True)]

    def both(leaves):
        arena = ops.pack(layout, leaves, backend=backend)
        return arena, ops.unpack(layout, arena, dtypes, backend=backend)

    alone = jax.tree.map(lambda x: np.array(x)[None], jax.jit(both)(put_all(members[0])))
    together = jax.tree.map(np.array, jax.jit(jax.vmap(both))(put_all(leaves)))
    for results, own in (alone, members[:1]), (together, members):
        for i, member in enumerate(own):
            wanted = to_arena(layout, member)
            assert_same_bits(results[0][i], wanted)
            for x, y, dtype in zip(results[1], to_leaves(layout, wanted), dtypes, strict=True):
                assert_same_bits(x[i], y.astype(dtype))


# Layouts that cut leaves.


def cut_layout(dtype, shapes, pieces, rng):
    """Leaves cut at random places, and the pieces in a random order; some still follow others."""
    rows = []
    for leaf, shape in enumerate(shapes):
        size = int(np.prod(shape))
        cuts = np.sort(rng.choice(np.arange(1, size), min(pieces, size) - 1, replace=False))
        bounds = [0, *cuts.tolist(), size]
        rows += [(end - low, leaf, low) for low, end in itertools.pairwise(bounds)]
    runs = np.array_split(np.arange(len(rows)), max(len(rows) * 2 // 3, 1))
    order = np.concatenate([runs[i] for i in rng.permutation(len(runs))])
    segments, start = [], 0
    for size, leaf, offset in (rows[i] for i in order):
        segments.append((start, size, leaf, offset, 0))
        start += round_up(size, line_elements(dtype))
    leaves = tuple(range(len(shapes)))
    return ArenaLayout(dtype, start, leaves, tuple(shapes), np.array(segments, np.int64))


CUT_DTYPES = {"float32": np.dtype("float32"), "float64": np.dtype("float64")} | HALVES


def check_cut_layout(dtype, shapes, pieces, backend):
    rng = np.random.default_rng(pieces)
    layout = cut_layout(dtype, shapes, pieces, rng)
    assert (np.diff(layout.segments[:, 2]) < 0).any()
    allowed = LEAF_DTYPES["float64" if dtype == np.float64 else "float32"]
    leaves = random_leaves(layout, rng, allowed)
    with jax.enable_x64(dtype == np.float64):
        arena = pack(layout, leaves, backend)
        assert_same_bits(arena, to_arena(layout, leaves))
        dtypes = [x.dtype for x in leaves]
        for got, leaf in zip(unpack(layout, arena, dtypes, backend), leaves, strict=True):
            # What was rounded on the way is what the arena's dtype makes of it.
            narrower = dtype.itemsize < 4
            assert_same_bits(got, leaf.astype(dtype).astype(leaf.dtype) if narrower else leaf)


@pytest.mark.parametrize("name", CUT_DTYPES)
def test_leaves_that_are_cut_into_segments_out_of_order(name, backend):
    check_cut_layout(CUT_DTYPES[name], [(37, 11), (64,), (5, 1000)], 7, backend)


@native_backends
@pytest.mark.parametrize("pieces", [150, 700])
@pytest.mark.parametrize("name", CUT_DTYPES)
def test_leaves_that_are_cut_into_many_segments(name, pieces, backend):
    check_cut_layout(CUT_DTYPES[name], [(3000,), (41, 1000), (2000,)], pieces, backend)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_leaf_cut_on_lines_as_shards_are(name, backend):
    # Slices of one size, of which only some follow each other.
    dtype = CUT_DTYPES[name]
    rows = [(64 * i, 64, 0, 64 * k, 0) for i, k in enumerate([2, 3, 0, 1, 5, 4])]
    layout = ArenaLayout(dtype, 384, (0,), ((384,),), np.array(rows, np.int64))
    leaf = np.arange(384).astype(dtype)
    arena = pack(layout, [leaf], backend)
    assert_same_bits(arena, to_arena(layout, [leaf]))
    assert_same_bits(unpack(layout, arena, [dtype], backend)[0], leaf)


# Lines between segments, as where a leaf is too small for a piece on every device.


def apart_layout(dtype, size, rows):
    """Segments (start, size) of one leaf, one after the other in it."""
    offsets = np.cumsum([0, *(n for _, n in rows)]).tolist()
    segments = [(*row, 0, offset, 0) for row, offset in zip(rows, offsets, strict=False)]
    return ArenaLayout(dtype, size, (0,), ((offsets[-1],),), np.array(segments, np.int64))


@pytest.mark.parametrize(
    "rows", [[(0, 40), (128, 40)], [(32, 80)], [(96, 1), (160, 33), (256, 1500), (1856, 3)]]
)
@pytest.mark.parametrize("name", CUT_DTYPES)
def test_whole_lines_between_segments(name, rows, backend):
    dtype = CUT_DTYPES[name]
    layout = apart_layout(dtype, rows[-1][0] + 4096, rows)
    leaf = np.arange(1, 1 + layout.shapes[0][0]).astype(dtype)
    with jax.enable_x64(name == "float64"):
        np.array(put(np.full(layout.size, np.nan, dtype)) + 1)
        arena = pack(layout, [leaf], backend)
        assert_same_bits(arena, to_arena(layout, [leaf]))
        arena = to_arena(layout, [leaf], padding=np.nan)
        assert_same_bits(unpack(layout, arena, [dtype], backend)[0], leaf)


@native_backends
@pytest.mark.parametrize("count", [65, 449, 2001])
@pytest.mark.parametrize("name", CUT_DTYPES)
def test_whole_lines_between_many_segments(name, count, backend):
    # Also between those of two launches, and more than a tile or a bucket of tiles.
    dtype, rows, start = CUT_DTYPES[name], [], 64
    for i in range(count):
        rows.append((start, 1 + i % 70))
        lines = 150 if i % 200 == 64 else i % 4
        start += round_up(rows[-1][1], 32) + 32 * lines
    layout = apart_layout(dtype, start + 320, rows)
    assert rows[64][0] - rows[63][0] > 64
    leaves = np.random.default_rng(0).normal(size=(2, *layout.shapes[0])).astype(dtype)

    def both(leaf):
        arena = ops.pack(layout, [leaf], backend=backend)
        return arena, ops.unpack(layout, arena, [dtype], backend=backend)[0]

    with jax.enable_x64(name == "float64"):
        alone = jax.tree.map(lambda x: np.array(x)[None], jax.jit(both)(put(leaves[0])))
        together = jax.tree.map(np.array, jax.jit(jax.vmap(both))(put(leaves)))
    for arenas, copies in alone, together:
        for arena, copy, leaf in zip(arenas, copies, leaves, strict=False):
            assert_same_bits(arena, to_arena(layout, [leaf]))
            assert_same_bits(copy, leaf)


@pytest.mark.gpu
@pytest.mark.native
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_lines_between_segments_are_for_pack_and_unpack_alone(backend):
    leaf = put(np.ones(80, np.float32))
    apart = apart_layout(np.dtype("float32"), 256, [(0, 40), (128, 40)])
    overlapping = apart_layout(np.dtype("float32"), 256, [(0, 40), (32, 40)])
    ints = put(scalars.initial_ints())
    for fn in (
        lambda: ops.statistics(apart, ints, [leaf], backend=backend),
        lambda: ops.pack(overlapping, [leaf], backend=backend),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="the segments do not follow each"):
            jax.block_until_ready(jax.jit(fn)())


@pytest.mark.parametrize("name", HALVES)
def test_a_float64_leaf_beside_a_narrow_arena_is_refused(name, backend):
    layout = narrow(make_layout([(5,)]), name)
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match=r"leaves\[0\]: got float64\[5\], wanted float32 or"):
            pack(layout, [np.zeros(5)], backend)
        with pytest.raises(ValueError, match=r"dtypes\[0\]: got float64, wanted one of float32"):
            unpack(layout, np.zeros(layout.size, layout.dtype), [np.dtype("float64")], backend)
    with pytest.raises(ValueError, match=f"arena: got float32.*wanted {name}"):
        unpack(layout, np.zeros(layout.size, np.float32), [np.dtype("float32")], backend)
