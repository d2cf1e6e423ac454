"""CPU and CUDA give the same bits: those of IEEE arithmetic, one rounding an operation.

NumPy works so too: it neither contracts nor flushes. So the native backends are compared with the
formulas written in NumPy at the arena's own precision, which holds on any machine, and where there
is a GPU with one another as well.
"""

import functools

import jax
import numpy as np
import pytest
from arenas import (
    KINDS,
    LEAF_DTYPES,
    MOMENTS,
    NUMBERS,
    assert_same_bits,
    group_of_elements,
    group_rows,
    make_floats,
    make_layout,
    native_backends,
    on_elements,
    random_leaves,
    to_arena,
    to_leaves,
    update,
    usual_layout,
)

from jaxrenaissance import ops
from jaxrenaissance import scalars as s

DECAYS = ({"wd": 0.3, "l2": 0.25}, {"l2": 0.2})
DECAYED = [n | decay for n, decay in zip(NUMBERS, DECAYS, strict=True)]


def wild(layout, rng, dtypes=None):
    """Leaves over all magnitudes: subnormals, zeros of both signs, numbers that overflow."""
    leaves = []
    for x in random_leaves(layout, rng, dtypes):
        info = jax.numpy.finfo(x.dtype)
        exponents = rng.integers(info.minexp - info.nmant, info.maxexp, x.shape)
        y = np.where(rng.random(x.shape) < 0.5, np.ldexp(1.0 + rng.random(x.shape), exponents), x)
        y = np.where(rng.random(x.shape) < 0.05, 0.0, y * rng.choice([1.0, -1.0], x.shape))
        with np.errstate(over="ignore"):
            y = y.astype(x.dtype)
        leaves.append(np.where(np.isfinite(y), y, x))
    return leaves


def wild_states(layout, kind, rng):
    states = [to_arena(layout, wild(layout, rng, [layout.dtype])) for _ in range(1 + MOMENTS[kind])]
    return [*states[:2], *(np.abs(v) for v in states[2:])]


def ieee_update(kind, layout, floats, states, gradient, ratios=None, origin=None):
    """The update in the arena's own arithmetic: each operation is rounded once, in this order.

    `origin` is what the update is taken from, where that is not the weight.
    """
    ratio = None if ratios is None else on_elements(layout, ratios).astype(layout.dtype)
    dtype = layout.dtype.type
    floats = floats.astype(layout.dtype)
    new = [x.copy() for x in states]
    groups, bound = group_of_elements(layout), floats[s.MAX_VALUE]
    for group, row in enumerate(group_rows(floats)):
        here = groups == group
        w, *moments = (x[here] for x in states)
        g = np.clip(gradient[here] * floats[s.GRAD_FACTOR], -bound, bound) + row[s.L2] * w
        lr, lr_wd = row[s.LR], row[s.LR_WD]
        if ratio is not None and row[s.LR_IN_MOMENT]:
            g, lr = lr * ratio[here] * g, dtype(1)
        elif ratio is not None:
            lr, lr_wd = lr * ratio[here], lr_wd * ratio[here]
        if kind == "sgd":
            u = g
        elif kind == "adam":
            m = (dtype(1) - row[s.ONE_MINUS_B1]) * moments[0] + row[s.ONE_MINUS_B1] * g
            v = (dtype(1) - row[s.ONE_MINUS_B2]) * moments[1] + row[s.ONE_MINUS_B2] * (g * g)
            u = m * row[s.C1] / (np.sqrt(v * row[s.C2] + row[s.EPS_ROOT]) + row[s.EPS])
            moments = [m, v]
        elif kind == "lion":
            m, omb1, omb2 = moments[0], row[s.ONE_MINUS_B1], row[s.ONE_MINUS_B2]
            u = np.sign((dtype(1) - omb1) * m + omb1 * g)
            moments = [(dtype(1) - omb2) * m + omb2 * g]
        else:
            m = row[s.MOMENTUM] * moments[0] + g
            u = m if kind == "momentum" else row[s.MOMENTUM] * m + g
            moments = [m]
        w = (w if origin is None else dtype(origin)) - (lr_wd * w + lr * u)
        for x, value in zip(new, [w, *moments], strict=True):
            x[here] = value
    return new


def ieee_lerp(a, b, t):
    return a + t * (b - a)


def assert_bits_where_not_nan(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        assert_same_bits(x[~np.isnan(y)], y[~np.isnan(y)])


@functools.cache
def problem(kind, dtype, seed=0):
    """A layout, its scalars, states and gradients over all magnitudes, and the new states."""
    rng = np.random.default_rng(seed)
    layout = usual_layout(dtype)
    floats = make_floats(DECAYED, dtype=dtype, step=7, factor=0.7)
    states, leaves = wild_states(layout, kind, rng), wild(layout, rng)
    with np.errstate(all="ignore"):
        wanted = ieee_update(kind, layout, floats, states, to_arena(layout, leaves))
    return layout, floats, states, leaves, wanted


@native_backends
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_and_averages_have_the_bits_of_ieee_arithmetic(kind, dtype, backend):
    layout, floats, states, leaves, _ = problem(kind, dtype)
    floats = floats.copy()
    floats[s.MAX_VALUE], floats[s.ONE_MINUS_EMA] = 0.6, 0.3
    (ema,) = wild_states(layout, "sgd", np.random.default_rng(4))
    with np.errstate(all="ignore"):
        wanted = ieee_update(kind, layout, floats, states, to_arena(layout, leaves))
        wanted.append(ieee_lerp(ema, wanted[0], floats[s.ONE_MINUS_EMA]))
    with jax.enable_x64(dtype == "float64"):
        for gradients in leaves, to_arena(layout, leaves):
            for gated in False, True:
                got = update(
                    kind, layout, floats, states, gradients, ema=ema, gated=gated, backend=backend
                )
                assert_bits_where_not_nan(got, wanted)


@native_backends
@pytest.mark.parametrize("source", ["leaves", "arena", "zero"])
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
def test_lerp_has_the_bits_of_ieee_arithmetic(dtype, source, backend):
    rng = np.random.default_rng(5)
    layout = usual_layout(dtype)
    targets, leaves = wild_states(layout, "momentum", rng), wild(layout, rng)
    arena = to_arena(layout, leaves)
    given = {"leaves": leaves, "arena": arena, "zero": None}[source]
    to = np.zeros_like(arena) if source == "zero" else arena
    taus, groups = np.array([0.3, 0.007], dtype), group_of_elements(layout)
    with np.errstate(all="ignore"):
        moved = [np.where(groups < 0, a, ieee_lerp(a, to, taus[groups])) for a in targets]
    with jax.enable_x64(dtype == "float64"):
        run = jax.jit(functools.partial(ops.lerp, layout, backend=backend))
        got = [np.array(x) for x in run(*jax.device_put((taus, targets, given)))]
    assert_bits_where_not_nan(got, moved)


@native_backends
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_update_has_the_bits_of_ieee_arithmetic(kind, dtype, backend):
    layout, floats, states, leaves, wanted = problem(kind, dtype)
    tiny = np.finfo(dtype).smallest_normal
    subnormal = [(np.abs(x) < tiny) & (x != 0) for x in wanted]
    assert all(x.any() for x in subnormal[1:])
    with jax.enable_x64(dtype == "float64"):
        for gradients in leaves, to_arena(layout, leaves):
            got = update(kind, layout, floats, states, gradients, backend=backend)
            assert_bits_where_not_nan(got, wanted)


@native_backends
@pytest.mark.parametrize("own", LEAF_DTYPES["float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_an_element_depend_on_nothing_around_it(kind, own, backend):
    # Neither on the other leaves, their order and dtypes, nor on where in the arena it lies: at
    # every place the loops have other tails, vectors and threads.
    dtype = "float64" if own == np.float64 else "float32"
    rng = np.random.default_rng(1)
    floats = make_floats(DECAYED, dtype=dtype, step=7, factor=0.7)
    alone = make_layout([(1027,)], dtype=dtype)
    states, (gradient,) = wild_states(alone, kind, rng), wild(alone, rng, [own])
    with jax.enable_x64(dtype == "float64"):
        wanted = update(kind, alone, floats, states, [gradient], backend=backend)
        wanted = [to_leaves(alone, x)[0] for x in wanted]
        for before, after, stacked in [
            ((1,), (3,), 0),
            ((33,), (0,), 0),
            ((70_001,), (5, 7), 0),
            ((0, 2), (65_536,), 1),
        ]:
            # As it is, or as 13 slices of 79 elements.
            shape = (13, 79) if stacked else (1027,)
            layout = make_layout(
                [before, shape, after], groups=[1, 0, 1], stacked=[0, stacked, 0], dtype=dtype
            )

            def among_others(x, layout=layout, shape=shape, dtypes=None):
                first, _, last = wild(layout, rng, dtypes)
                return [np.abs(first), x.reshape(shape), np.abs(last)]

            leaves = among_others(gradient)
            arenas = [
                to_arena(layout, among_others(to_leaves(alone, x)[0], dtypes=[layout.dtype]))
                for x in states
            ]
            for gradients in leaves, to_arena(layout, leaves):
                got = update(kind, layout, floats, arenas, gradients, backend=backend)
                for x, y in zip(got, wanted, strict=True):
                    assert_same_bits(to_leaves(layout, x)[1].reshape(-1), y)


@native_backends
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", ["nesterov", "adam"])
def test_trust_ratios_have_the_bits_of_ieee_arithmetic(kind, dtype, backend):
    layout, floats, states, leaves, _ = problem(kind, dtype)
    floats = floats.copy()
    group_rows(floats)[1, s.LR_IN_MOMENT] = kind == "nesterov"
    # Neighbouring slices have ratios of their own.
    ratios = np.random.default_rng(7).uniform(0.01, 3, len(layout.segments)).astype(dtype)
    with np.errstate(all="ignore"):
        wanted = ieee_update(kind, layout, floats, states, to_arena(layout, leaves), ratios)
    with jax.enable_x64(dtype == "float64"):
        for gradients in leaves, to_arena(layout, leaves):
            got = update(kind, layout, floats, states, gradients, ratios=ratios, backend=backend)
            assert_bits_where_not_nan(got, wanted)


def on(device, fn, *operands):
    placed = jax.device_put(operands, device)
    return jax.tree.map(np.array, jax.jit(fn)(*placed))


@pytest.mark.gpu
@pytest.mark.native
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_and_cuda_have_the_same_bits_over_whole_steps(kind, dtype):
    # From the same counters and numbers: the prologue, several steps, many sizes, one skipped.
    rng = np.random.default_rng(2)
    sizes = [0, 1, 2, 3, 4, 5, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 4095, 4097, 70_001]
    layout = make_layout(
        [(n,) for n in sizes], groups=[i % 2 for i in range(len(sizes))], dtype=dtype
    )
    steps = [wild(layout, rng) for _ in range(4)]
    steps[2][-1][-1] = np.nan
    floats = make_floats(
        DECAYED,
        dtype=dtype,
        factor=0.7,
        max_norm=3.0,
        backoff=0.5,
        min_scale=0.1,
        one_minus_ema=0.3,
        max_ratio=50.0,
    )
    group_rows(floats)[:, s.TRUST] = 0.1, 0.2
    group_rows(floats)[1, s.LR_IN_MOMENT] = kind in ("momentum", "nesterov")
    groups = [layout.segments[:, 4].astype(np.int32)]
    states = [*wild_states(layout, kind, rng), *wild_states(layout, "sgd", rng)]
    operands = floats, s.initial_ints(), states, steps
    dtypes = [LEAF_DTYPES[dtype][i % 3] for i in range(len(sizes))]

    def run(backend, floats, ints, states, steps):
        count = [len(layout.segments)]
        for leaves in steps:
            weights, *moments, ema = states
            ints, *workspaces = ops.norms(
                layout, ints, leaves, weights=weights, products=True, flag=True, backend=backend
            )
            floats, ints, norms, (of_lars,) = ops.finish(
                floats,
                ints,
                workspaces,
                count * 3,
                gradients=1,
                by_segment=True,
                trust=2,
                groups=groups,
                backend=backend,
            )
            series = layout, floats, weights, moments, leaves
            workspaces = ops.update_norms(kind, *series, direction=True, backend=backend)
            floats, (of_lamb,) = ops.finish_ratios(
                floats, workspaces, count * 2, groups, backend=backend
            )
            ratios = of_lamb if kind == "adam" else of_lars
            (workspace,) = ops.update_norms(kind, *series, ratios=ratios, backend=backend)
            floats = ops.finish_update(floats, [workspace], count, backend=backend)
            weights, moments, ema = ops.update(
                kind,
                layout,
                floats,
                weights,
                moments,
                leaves,
                ema=ema,
                ratios=ratios,
                backend=backend,
            )
            states = [weights, *moments, ema]
            norms = [*norms, of_lars, of_lamb]
        leaves = ops.unpack(layout, states[0], dtypes, backend=backend)
        return floats, ints, states, norms, leaves, ops.pack(layout, leaves, backend=backend)

    with jax.enable_x64(dtype == "float64"):
        results = [
            on(jax.devices(name)[0], functools.partial(run, name), *operands)
            for name in ("cpu", "cuda")
        ]
    assert results[0][1][s.STEP] == 3
    for x, y in zip(*(jax.tree.leaves(r) for r in results), strict=True):
        if x.dtype.kind == "i":
            np.testing.assert_array_equal(x, y)
        else:
            nan = np.isnan(x.astype(np.float64))
            np.testing.assert_array_equal(nan, np.isnan(y.astype(np.float64)))
            assert_same_bits(x[~nan], y[~nan])


@pytest.mark.gpu
@pytest.mark.native
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
def test_cpu_and_cuda_derive_the_same_scalars(dtype):
    rng = np.random.default_rng(3)
    members = 4096
    numbers = [
        {"lr": lr, "wd": wd, "b1": 1 - 10.0**-x, "b2": 1 - 10.0**-y}
        for lr, wd, x, y in rng.uniform([0, 0, 0, 0], [1, 1, 3, 6], (members, 4))
    ]
    floats = np.stack([make_floats([n], dtype=dtype) for n in numbers])
    ints = np.stack([s.initial_ints()] * members)
    ints[:, s.STEP] = np.exp(rng.uniform(0, np.log(2**30), members))
    with jax.enable_x64(dtype == "float64"):
        (a, b), (c, d) = (
            on(
                jax.devices(name)[0],
                jax.vmap(functools.partial(ops.prologue, backend=name)),
                floats,
                ints,
            )
            for name in ("cpu", "cuda")
        )
    assert_same_bits(a, c)
    np.testing.assert_array_equal(b, d)


def test_wild_numbers_are_wild():
    layout = make_layout([(4000,)] * 4, dtype="float64")
    for x in wild(layout, np.random.default_rng(0)):
        info = jax.numpy.finfo(x.dtype)
        values = np.abs(x.astype(np.float64))
        assert ((values < float(info.smallest_normal)) & (values > 0)).any()
        assert values.max() > float(info.max) / 4
