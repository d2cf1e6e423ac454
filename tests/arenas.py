"""Arenas and steps in NumPy: what the tests of the ops are fed with and compared against."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import pytest

from jaxrenaissance import ops, scalars
from jaxrenaissance.arena_layout import ArenaLayout
from jaxrenaissance.plan import MemoryPlan
from jaxrenaissance.regions import Region

BFLOAT16 = np.dtype(jax.numpy.bfloat16)
LEAF_DTYPES = {
    "float32": (np.dtype("float32"), BFLOAT16, np.dtype("float16")),
    "float64": (np.dtype("float64"), np.dtype("float32"), BFLOAT16, np.dtype("float16")),
}
"""Of each arena dtype: what the leaves beside it may have."""

MOMENTS = {"sgd": 0, "momentum": 1, "nesterov": 1, "adam": 2, "lion": 1}
KINDS = tuple(MOMENTS)

# Empty, 0-d and odd leaves; slices with and without padding between them, at odd offsets of their
# leaf; more than one chunk of work. Shape, stacked axes, group.
LEAVES = (
    ((0, 3), 0, 0),
    ((), 0, 0),
    ((1,), 0, 0),
    ((5, 3, 31), 1, 0),
    ((3,), 0, 0),
    ((31,), 0, 1),
    ((0,), 0, 1),
    ((4, 32), 1, 1),
    ((33,), 0, 1),
    ((2, 40_000), 0, 0),
    ((64,), 0, 1),
    ((3, 2, 7), 2, 1),
    ((2, 0), 1, 0),
)

# Two groups that differ in every number.
NUMBERS = (
    {"lr": 0.1, "wd": 0.3, "momentum": 0.9, "b1": 0.9, "b2": 0.99, "eps": 1e-3, "eps_root": 1e-4},
    {"lr": 0.07, "wd": 0.0, "momentum": 0.5, "b1": 0.8, "b2": 0.9, "eps": 1e-2, "eps_root": 0.0},
)


def make_layout(
    shapes: Sequence[tuple[int, ...]],
    *,
    groups: Sequence[int] | int = 0,
    stacked: Sequence[int] | int = 0,
    dtype: str = "float32",
) -> ArenaLayout:
    """The layout of leaves that lie in the arena in the order given."""
    groups = [groups] * len(shapes) if isinstance(groups, int) else groups
    axes = [stacked] * len(shapes) if isinstance(stacked, int) else stacked
    plan = MemoryPlan.build(
        [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape in shapes],
        rules=lambda path, leaf: Region.W_FC_WEIGHT,
        stacked=lambda path, leaf: axes[int(path)],
        mask=[group == 0 for group in groups],
    )
    return plan.arenas[0]


def usual_layout(dtype: str = "float32") -> ArenaLayout:
    shapes, stacked, groups = zip(*LEAVES, strict=True)
    return make_layout(shapes, groups=groups, stacked=stacked, dtype=dtype)


def to_arena(layout: ArenaLayout, leaves: Sequence[object], padding: float = 0) -> np.ndarray:
    """The arena that holds the leaves; widening is exact."""
    arena = np.full(layout.size, padding, layout.dtype)
    flat = [np.asarray(leaf).reshape(-1) for leaf in leaves]
    for start, size, leaf, offset, _ in layout.segments.tolist():
        arena[start : start + size] = flat[leaf][offset : offset + size]
    return arena


def to_leaves(layout: ArenaLayout, arena: object) -> list[np.ndarray]:
    """The arena's leaves, in its own dtype."""
    arena = np.asarray(arena)
    flat = [np.zeros(int(np.prod(shape, dtype=np.int64)), arena.dtype) for shape in layout.shapes]
    for start, size, leaf, offset, _ in layout.segments.tolist():
        flat[leaf][offset : offset + size] = arena[start : start + size]
    return [x.reshape(shape) for x, shape in zip(flat, layout.shapes, strict=True)]


def group_of_elements(layout: ArenaLayout) -> np.ndarray:
    """The group of every element of the arena, -1 where it is padding."""
    groups = np.full(layout.size, -1)
    for start, size, _, _, group in layout.segments.tolist():
        groups[start : start + size] = group
    return groups


def random_leaves(
    layout: ArenaLayout, rng: np.random.Generator, dtypes: Sequence[np.dtype] | None = None
) -> list[np.ndarray]:
    """Normal leaves, of each dtype that may lie beside the arena in turn."""
    dtypes = LEAF_DTYPES[layout.dtype.name] if dtypes is None else dtypes
    return [
        rng.normal(size=shape).astype(dtypes[i % len(dtypes)])
        for i, shape in enumerate(layout.shapes)
    ]


def random_states(layout: ArenaLayout, kind: str, rng: np.random.Generator) -> list[np.ndarray]:
    """Weights and moments with zero padding; second moments are positive."""
    states = [to_arena(layout, random_leaves(layout, rng)) for _ in range(1 + MOMENTS[kind])]
    return [*states[:2], *(np.abs(v) for v in states[2:])]


def make_floats(
    numbers: Sequence[Mapping[str, float]] = NUMBERS,
    *,
    dtype: str = "float32",
    step: int = 1,
    factor: float = 1.0,
    apply: bool = True,
    **header: float,
) -> np.ndarray:
    """The scalars as the prologue of this step leaves them; each number is rounded once.

    `header` are slots of the header by their names in small letters.
    """
    floats = scalars.initial_floats(len(numbers), np.dtype("float64"))
    floats[[scalars.APPLY, scalars.GRAD_FACTOR]] = apply, factor
    # What the prologue makes of it is then this factor again.
    floats[scalars.LOSS_SCALE] = floats[scalars.MIN_SCALE] = 1 / factor
    for name, value in header.items():
        floats[getattr(scalars, name.upper())] = value
    for row, given in zip(group_rows(floats), numbers, strict=True):
        n = {"wd": 0.0, "l2": 0.0, "momentum": 0.0, "b1": 0.9, "b2": 0.999, "eps": 1e-8} | given
        scale = n.get("scale", 1.0)
        row[scalars.LEARNING_RATE], row[scalars.WEIGHT_DECAY] = n["lr"], n["wd"]
        row[scalars.LR_SCALE], row[scalars.LR] = scale, n["lr"] * scale
        row[scalars.L2], row[scalars.MOMENTUM] = n["l2"], n["momentum"]
        row[scalars.ONE_MINUS_B1], row[scalars.ONE_MINUS_B2] = 1 - n["b1"], 1 - n["b2"]
        row[scalars.EPS], row[scalars.EPS_ROOT] = n["eps"], n.get("eps_root", 0.0)
        row[scalars.LR_WD] = n["lr"] * scale * n["wd"]
        row[scalars.C1], row[scalars.C2] = 1 / (1 - n["b1"] ** step), 1 / (1 - n["b2"] ** step)
    return floats.astype(dtype)


def group_rows(floats: np.ndarray) -> np.ndarray:
    """The groups' rows of the scalars, as a view."""
    return floats[scalars.HEADER :].reshape(-1, scalars.ROW)


def expected_update(
    kind: str,
    layout: ArenaLayout,
    states: Sequence[np.ndarray],
    gradient: np.ndarray,
    numbers: Sequence[Mapping[str, float]] = NUMBERS,
    *,
    step: int = 1,
    factor: float = 1.0,
    max_value: float = np.inf,
) -> list[np.ndarray]:
    """Weights and moments after one update, in float64 from the formulas; padding stays."""
    new = [np.array(x, np.float64) for x in states]
    groups = group_of_elements(layout)
    for group, n in enumerate(numbers):
        here = groups == group
        w, *moments = (x[here] for x in new)
        g = np.clip(np.asarray(gradient, np.float64)[here] * factor, -max_value, max_value)
        g = g + n.get("l2", 0.0) * w
        if kind == "sgd":
            direction = g
        elif kind == "adam":
            b1, b2 = n.get("b1", 0.9), n.get("b2", 0.999)
            m = b1 * moments[0] + (1 - b1) * g
            v = b2 * moments[1] + (1 - b2) * g**2
            corrected = v / (1 - b2**step) + n.get("eps_root", 0.0)
            direction = m / (1 - b1**step) / (np.sqrt(corrected) + n.get("eps", 1e-8))
            moments = [m, v]
        elif kind == "lion":
            b1, b2 = n.get("b1", 0.9), n.get("b2", 0.999)
            direction = np.sign(b1 * moments[0] + (1 - b1) * g)
            moments = [b2 * moments[0] + (1 - b2) * g]
        else:
            m = n["momentum"] * moments[0] + g
            direction = m if kind == "momentum" else n["momentum"] * m + g
            moments = [m]
        lr = n["lr"] * n.get("scale", 1.0)
        w = w - lr * n.get("wd", 0.0) * w - lr * direction
        for x, value in zip(new, [w, *moments], strict=True):
            x[here] = value
    return new


def on_elements(layout: ArenaLayout, by_segment: np.ndarray) -> np.ndarray:
    """An arena with each segment's number on its elements, 1 where it is padding."""
    numbers = np.ones(layout.size, by_segment.dtype)
    for (start, size, *_), number in zip(layout.segments.tolist(), by_segment, strict=True):
        numbers[start : start + size] = number
    return numbers


def put(x: object) -> jax.Array:
    """The array on the default device, bit for bit."""
    return jax.device_put(x)


def put_all(xs: Sequence[object]) -> list[jax.Array]:
    return [jax.device_put(x) for x in xs]


def update(
    kind: str,
    layout: ArenaLayout,
    floats: object,
    states: Sequence[object],
    gradients: object,
    *,
    ema: object = None,
    ratios: object = None,
    gated: bool = False,
    backend: str,
) -> list[np.ndarray]:
    """`ops.update` under jit, NumPy to NumPy: the weights, the moments and the average, if any."""
    run = _jitted_update(kind, layout, gated, backend)
    operands = floats, list(states), gradients, ema, ratios
    return [np.array(x) for x in run(*jax.device_put(operands))]


@functools.cache
def _jitted_update(
    kind: str, layout: ArenaLayout, gated: bool, backend: str
) -> Callable[..., list[jax.Array]]:
    @jax.jit
    def run(floats, states, gradients, ema, ratios):
        weights, *moments = states
        options = {"ema": ema, "ratios": ratios, "gated": gated, "backend": backend}
        new, moments, new_ema = ops.update(
            kind, layout, floats, weights, moments, gradients, **options
        )
        return [new, *moments, *([] if ema is None else [new_ema])]

    return run


def changes(
    kind: str,
    layout: ArenaLayout,
    floats: object,
    moments: Sequence[object],
    gradients: Sequence[object],
    weights: Sequence[object] | None,
    dtypes: Sequence[np.dtype],
    *,
    ratios: object = None,
    backend: str,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """`ops.changes` under jit, NumPy to NumPy: the moments, and the changes."""
    run = _jitted_changes(kind, layout, tuple(dtypes), backend)
    operands = floats, list(moments), list(gradients), weights, ratios
    return jax.tree.map(np.array, run(*jax.device_put(operands)))


@functools.cache
def _jitted_changes(
    kind: str, layout: ArenaLayout, dtypes: tuple[np.dtype, ...], backend: str
) -> Callable[..., tuple[list[jax.Array], list[jax.Array]]]:
    @jax.jit
    def run(floats, moments, gradients, weights, ratios):
        new, leaves = ops.changes(
            kind,
            layout,
            floats,
            moments,
            gradients,
            weights,
            dtypes,
            ratios=ratios,
            backend=backend,
        )
        return list(new), leaves

    return run


def bits(x: object) -> np.ndarray:
    """The array's bits, as unsigned integers."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def assert_same_bits(got: object, wanted: object) -> None:
    assert np.asarray(got).dtype == np.asarray(wanted).dtype
    np.testing.assert_array_equal(bits(got), bits(wanted))


def assert_close(got: object, wanted: object, dtype: str = "float32") -> None:
    """Close as arithmetic in this dtype on values around 1 allows."""
    tolerance = {"float64": 1e-14, "float32": 4e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance)


def native_backends(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test on the native backends only: XLA on the CPU flushes subnormals and contracts."""
    params = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
    return pytest.mark.native(pytest.mark.parametrize("backend", params, indirect=True)(test))


def kinds_on_native_backends(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test with every kind on the native backends, and with one on the xla backend, whose
    updates are jax.numpy and know nothing of transformations."""
    params = [("xla", "adam")]
    for kind in KINDS:
        params.append(pytest.param("cpu", kind, marks=pytest.mark.native))
        params.append(pytest.param("cuda", kind, marks=[pytest.mark.native, pytest.mark.gpu]))
    return pytest.mark.parametrize(("backend", "kind"), params, indirect=["backend"])(test)


def assert_all_ops_are_right(
    kind: str,
    layout: ArenaLayout,
    gradients: Sequence[np.ndarray],
    copies: Sequence[np.dtype],
    *,
    backend: str,
    seed: int = 0,
) -> None:
    """One step from leaves and one from an arena with an average, one that gives changes, pack,
    unpack to `copies`' dtypes, norms, a sum, and a lerp.

    Where a gradient is not finite, the step must be skipped and the first such leaf be named.
    """
    states = random_states(layout, kind, np.random.default_rng(seed))
    floats = make_floats(dtype=layout.dtype.name, factor=0.5, one_minus_ema=0.25)

    @jax.jit
    def run(floats, ints, states, gradients):
        weights, *moments = states
        leaves = ops.unpack(layout, weights, copies, backend=backend)
        packed = ops.pack(layout, gradients, backend=backend)
        ints = ops.statistics(layout, ints, gradients, first_leaf=3, backend=backend)
        _, workspace = ops.norms(layout, ints, gradients, flag=False, backend=backend)
        floats, ints, *_ = ops.finish(
            floats, ints, [workspace], [len(layout.segments)], gradients=1, backend=backend
        )
        new, same = (
            ops.update(kind, layout, floats, weights, moments, g, ema=packed, backend=backend)
            for g in (gradients, packed)
        )
        found, total, _ = ops.accumulate(
            layout, ints, packed, gradients, flag=True, norms=False, backend=backend
        )
        taus = jax.numpy.ones(len(NUMBERS), layout.dtype)
        (moved,) = ops.lerp(layout, taus, [weights], gradients, backend=backend)
        new, same = ([w, *m, e] for w, m, e in (new, same))
        # Moments do not depend on the weights, which are here what they were unpacked to.
        change = ops.changes(
            kind, layout, floats, moments, gradients, leaves, copies, backend=backend
        )
        others = [total, moved]
        return leaves, packed, floats, ints, new, same, found[scalars.FIRST_BAD], others, change

    with jax.enable_x64(layout.dtype == np.float64):
        operands = jax.device_put((floats, scalars.initial_ints(), states, list(gradients)))
        results = jax.tree.map(np.array, run(*operands))
    leaves, packed, floats, ints, new, same, found, others, (moments, change) = results
    for x in others:
        assert_same_bits(x, packed)
    assert_same_bits(packed, to_arena(layout, gradients))
    for x, y, copy in zip(leaves, to_leaves(layout, states[0]), copies, strict=True):
        assert x.dtype == copy
        # From float64, both NumPy and XLA go to bfloat16 by way of float32.
        ulp = 2.0**-8 if layout.dtype == np.float64 and copy == BFLOAT16 else 0
        np.testing.assert_allclose(x.astype(np.float64), y.astype(copy).astype(np.float64), ulp)
    bad = [i for i, g in enumerate(gradients) if not np.isfinite(g.astype(np.float64)).all()]
    assert ints[scalars.LAST_BAD_LEAF] == (3 + bad[0] if bad else -1)
    assert found == (bad[0] if bad else scalars.NO_LEAF)
    if not bad:
        norm = np.linalg.norm(packed.astype(np.float64)) / 2
        np.testing.assert_allclose(floats[scalars.GRAD_NORM], norm, rtol=1e-5)
    assert ints[scalars.STEP] == (0 if bad else 1)
    wanted = states if bad else expected_update(kind, layout, states, packed, factor=0.5)
    copy = to_arena(layout, leaves)
    with_copy = [copy, *states[1:]]
    if not bad:
        with_copy = expected_update(kind, layout, with_copy, packed, factor=0.5)
    for x, y, dtype in zip(change, to_leaves(layout, with_copy[0] - copy), copies, strict=True):
        assert x.dtype == dtype
        assert_close(x, y, dtype.name)
    for x, y in zip(moments, new[1:-1], strict=True):
        assert_same_bits(x, y)
    wanted = [*wanted, packed if bad else packed + 0.25 * (wanted[0] - packed)]
    padding = group_of_elements(layout) < 0
    for x, y, z in zip(new, same, wanted, strict=True):
        assert_same_bits(x, y)
        assert not bits(x)[padding].any()
        assert_close(x, z, layout.dtype.name)
