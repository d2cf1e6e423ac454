"""update: values against float64, and every bit that must stay."""

import functools

import jax
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    KINDS,
    LEAF_DTYPES,
    MOMENTS,
    NUMBERS,
    assert_close,
    assert_same_bits,
    bits,
    expected_update,
    group_of_elements,
    make_floats,
    make_layout,
    native_backends,
    put,
    random_leaves,
    random_states,
    to_arena,
    update,
    usual_layout,
)

from jaxrenaissance import ops, scalars

DECAY = {
    "none": ({}, {}),
    "decoupled": ({"wd": 0.3}, {"wd": 0.0}),
    "l2": ({"wd": 0.0, "l2": 0.4}, {"wd": 0.0, "l2": 0.2}),
    "both": ({"wd": 0.2, "l2": 0.4}, {"wd": 0.0, "l2": 0.1}),
}


def with_decay(name):
    return [numbers | decay for numbers, decay in zip(NUMBERS, DECAY[name], strict=True)]


@pytest.mark.parametrize("decay", DECAY)
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_update_is_the_formula_from_leaves_and_from_an_arena(kind, dtype, decay, backend):
    rng = np.random.default_rng(0)
    layout, numbers = usual_layout(dtype), with_decay(decay)
    states, leaves = random_states(layout, kind, rng), random_leaves(layout, rng)
    gradient = to_arena(layout, leaves)
    wanted = expected_update(kind, layout, states, gradient, numbers, step=3, factor=0.625)
    floats = make_floats(numbers, dtype=dtype, step=3, factor=0.625)
    with jax.enable_x64(dtype == "float64"):
        for operand in leaves, gradient:
            got = update(kind, layout, floats, states, operand, backend=backend)
            assert {x.dtype.name for x in got} == {dtype}
            for x, y in zip(got, wanted, strict=True):
                assert_close(x, y, dtype)


def test_a_float32_arena_beside_a_float64_one_has_float64_scalars(backend):
    rng = np.random.default_rng(1)
    layout = usual_layout()
    states, leaves = random_states(layout, "adam", rng), random_leaves(layout, rng)
    wanted = expected_update("adam", layout, states, to_arena(layout, leaves), factor=0.5)
    with jax.enable_x64(True):
        floats = make_floats(dtype="float64", factor=0.5)
        got = update("adam", layout, floats, states, leaves, backend=backend)
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == np.float32
        assert_close(x, y)


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_where_apply_is_zero(kind, dtype, backend):
    rng = np.random.default_rng(2)
    layout = usual_layout(dtype)
    # Random bits: subnormals, infinities, quiet and signalling NaNs among them, in padding too.
    states = [
        rng.integers(0, 256, (layout.size, layout.dtype.itemsize), np.uint8).view(dtype)[:, 0]
        for _ in random_states(layout, kind, rng)
    ]
    assert np.isnan(states[0]).any()
    leaves = [np.full_like(g, np.nan) for g in random_leaves(layout, rng)]
    floats = make_floats(dtype=dtype, apply=False)
    with jax.enable_x64(dtype == "float64"):
        for gradients in leaves, to_arena(layout, leaves):
            for new, old in zip(
                update(kind, layout, floats, states, gradients, backend=backend),
                states,
                strict=True,
            ):
                assert_same_bits(new, old)


@pytest.mark.parametrize("source", ["leaves", "arena"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_never_written(kind, source, backend):
    rng = np.random.default_rng(3)
    layout = usual_layout()
    padding = group_of_elements(layout) < 0
    states, gradients = random_states(layout, kind, rng), random_leaves(layout, rng)
    if backend != "xla":  # It sweeps over padding, which is zero and stays zero.
        for x in states:
            x.view(np.uint32)[padding] = 0xFFA1B2C3
    if source == "arena":
        gradients = to_arena(layout, gradients, padding=0.0 if backend == "xla" else np.nan)
    for new, old in zip(
        update(kind, layout, make_floats(), states, gradients, backend=backend),
        states,
        strict=True,
    ):
        assert_same_bits(new[padding], old[padding])
        assert (bits(new)[~padding] != bits(old)[~padding]).mean() > 0.99


@pytest.mark.parametrize("what", ["weight", "first moment", "second moment", "gradient"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_with_its_element(what, value, backend):
    rng = np.random.default_rng(4)
    layout = make_layout([(5,), (33,), (2, 70)], groups=[0, 1, 0])
    states, leaves = random_states(layout, "adam", rng), random_leaves(layout, rng, [BFLOAT16])
    where = np.zeros(layout.size, bool)
    where[[layout.segments[1, 0] + 32, layout.segments[2, 0]]] = True
    gradient = to_arena(layout, leaves)
    index = ["weight", "first moment", "second moment", "gradient"].index(what)
    [*states, gradient][index][where] = value
    leaves[1][32] = gradient[layout.segments[1, 0] + 32]
    leaves[2][0, 0] = gradient[layout.segments[2, 0]]
    for gradients in leaves, gradient:
        w, m, v = update("adam", layout, make_floats(), states, gradients, backend=backend)
        for x in w, m, v:
            assert np.isfinite(x[~where]).all()
        touched = {"weight": (w,), "first moment": (m, w), "second moment": (v,)}.get(what, (m, v))
        for x in touched:
            assert not np.isfinite(x[where]).any()
        if np.isnan(value):  # Never hidden by the choice between u and 0.
            assert np.isnan(w[where]).all()


def test_zero_gradients_of_zero_moments_divide_nothing_by_zero(backend):
    layout = make_layout([(3,), (33,)], groups=[0, 1])
    states = [to_arena(layout, [np.ones(3), np.full(33, -2.0)]), *np.zeros((2, layout.size), "f4")]
    gradients = [np.zeros(3, "f4"), np.zeros(33, BFLOAT16)]
    numbers = ({"lr": 0.0, "wd": 0.5, "eps": 1e-8}, {"lr": 0.5, "eps": 0.0})
    new = update("adam", layout, make_floats(numbers), states, gradients, backend=backend)
    for x, y in zip(new, states, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_nan_weight_is_not_hidden_where_nothing_moves(backend):
    layout = make_layout([(40,)])
    weights = np.zeros(layout.size, np.float32)
    weights[[0, 39]] = np.nan
    states = [weights, *np.zeros((2, layout.size), np.float32)]
    floats = make_floats([{"lr": 0.0, "eps": 0.0}])
    new, *_ = update("adam", layout, floats, states, [np.zeros(40, "f4")], backend=backend)
    np.testing.assert_array_equal(np.isnan(new), np.isnan(weights))


@native_backends
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tiny"), [("float32", 2.0**-149), ("float64", 2.0**-1074)])
def test_subnormals_are_kept(dtype, tiny, kind, backend):
    layout = make_layout([(67,)], dtype=dtype)
    k = np.arange(layout.size) * (np.arange(layout.size) < 67)
    weights, moment = (8 * k * tiny).astype(dtype), (4 * k * tiny).astype(dtype)
    gradient = (2 * k * tiny).astype(dtype)
    # All factors are powers of two, so every result is a multiple of the smallest subnormal.
    numbers = [{"lr": 0.5, "momentum": 0.5, "b1": 0.5, "b2": 0.5, "eps": 1.0}]
    with jax.enable_x64(dtype == "float64"):
        floats = make_floats(numbers, dtype=dtype)
        states = [weights, moment, np.zeros_like(moment)][: 1 + MOMENTS[kind]]
        for gradients in gradient, [gradient[:67]]:
            new = update(kind, layout, floats, states, gradients, backend=backend)
            # In units of k times the smallest subnormal. Adam: c1 = 2, and the denominator is 1.
            wanted = {
                "sgd": [8 - 1],
                "momentum": [8 - 2, 4],
                "nesterov": [8 - 2, 4],
                "adam": [8 - 3, 3, 0],
                "lion": [8, 3],
            }[kind]
            wanted = [units * k * tiny for units in wanted]
            if kind == "lion":  # Of its sum it is the sign that counts.
                wanted[0] = wanted[0] - 0.5 * (k > 0)
            for x, y in zip(new, wanted, strict=True):
                assert_same_bits(x, y.astype(dtype))


@native_backends
def test_subnormal_second_moments_and_half_gradients_are_kept(backend):
    layout = make_layout([(40,), (40,), (40,)])
    k = np.arange(40)
    half, brain = (k * 2.0**-24).astype("f2"), (k * 2.0**-133).astype(BFLOAT16)
    squares = ((2.0 * k).astype("f4") * np.float32(2.0**-75)).astype("f4")  # squared: 4k² 2^-150
    zeros = np.zeros((2, layout.size), np.float32)
    v = to_arena(layout, [0 * k, 0 * k, k * 2.0**-148])
    floats = make_floats([{"lr": 0.0, "b1": 0.5, "b2": 0.5, "eps": 1.0}])
    _, m, new_v = update(
        "adam", layout, floats, [zeros[0], zeros[1], v], [half, brain, squares], backend=backend
    )
    wanted_m = to_arena(layout, [k * 2.0**-25, k * 2.0**-134, k * 2.0**-75])
    assert_same_bits(m, wanted_m)
    # v = (k 2^-148 + 4 k² 2^-150) / 2, both halves exact.
    wanted_v = to_arena(layout, [k**2 * 2.0**-49, 0 * k, (k + k**2) * 2.0**-149])
    assert_same_bits(new_v, wanted_v)


def test_decay_and_update_are_added_before_they_are_rounded(backend):
    # Each alone is less than half a unit in the last place of a weight of 1, together they are not.
    layout = make_layout([(33,)])
    numbers = [{"lr": 2.0**-10, "wd": 2.0**-15.6}]
    gradient = np.full(33, 2.0**-15.6, np.float32)
    ones = np.ones(layout.size, np.float32)
    new, *_ = update("sgd", layout, make_floats(numbers), [ones], [gradient], backend=backend)
    np.testing.assert_array_equal(new[:33], np.float32(1 - 2.0**-24))
    assert 1 - np.float32(2.0**-25.6) == 1


def steps(kind, layout, numbers, gradients, count, *, backend, start=0):
    """States and scalars after `count` steps with the same gradients, from weights of 1."""
    ints = scalars.initial_ints()
    ints[scalars.STEP] = start
    one = to_arena(layout, [np.ones(shape) for shape in layout.shapes])
    states = [one, *(np.zeros_like(one) for _ in range(MOMENTS[kind]))]

    run = jitted_steps(kind, layout, backend)
    operands = jax.device_put((count, make_floats(numbers), ints, states, gradients))
    return jax.tree.map(np.array, run(*operands))


@functools.cache
def jitted_steps(kind, layout, backend):
    @jax.jit
    def run(count, floats, ints, states, gradients):
        def step(_, carry):
            floats, ints, (weights, *moments) = carry
            ints = ops.statistics(layout, ints, gradients, backend=backend)
            floats, ints = ops.prologue(floats, ints, backend=backend)
            weights, moments, _ = ops.update(
                kind, layout, floats, weights, moments, gradients, backend=backend
            )
            return floats, ints, [weights, *moments]

        return jax.lax.fori_loop(0, count, step, (floats, ints, states))

    return run


@pytest.mark.parametrize("dtype", LEAF_DTYPES["float32"])
def test_second_moments_do_not_stall(dtype, backend):
    layout = make_layout([(40,)])
    _, ints, (_, m, v) = steps(
        "adam", layout, [{"lr": 1e-3}], [np.ones(40, dtype)], 3000, backend=backend
    )
    assert ints[scalars.STEP] == 3000
    np.testing.assert_allclose(v[:40], 1 - 0.999**3000, rtol=1e-4)
    np.testing.assert_allclose(m[:40], 1, rtol=1e-4)
    assert 0.950 < v[0] < 0.951


@pytest.mark.parametrize("b2", [0.999, 0.9999, 0.99999])
@pytest.mark.parametrize("gradient", [1.0, 1e-3])
def test_the_first_step_of_adam_is_the_learning_rate(b2, gradient, backend):
    layout = make_layout([(40,)])
    gradients = [np.full(40, gradient, np.float32)]
    *_, (w, _, v) = steps(
        "adam", layout, [{"lr": 0.25, "b2": b2, "eps": 0.0}], gradients, 1, backend=backend
    )
    np.testing.assert_allclose(w[:40], 0.75, rtol=1e-6)
    np.testing.assert_allclose(v[:40], (1 - b2) * gradient**2, rtol=1e-6)


@pytest.mark.parametrize("b2", [0.999, 0.9999, 0.99999])
@pytest.mark.parametrize("start", [10**6 - 1, 2**24 + 2])
def test_steps_that_come_late_are_corrected_as_in_float64(b2, start, backend):
    layout = make_layout([(40,)])
    gradients = [np.linspace(-2, 2, 40, dtype=np.float32)]
    numbers = {"lr": 0.25, "b1": 0.9, "b2": b2, "eps": 1e-3}
    _, ints, (w, *_) = steps("adam", layout, [numbers], gradients, 2, backend=backend, start=start)
    assert ints[scalars.STEP] == start + 2
    states = [np.ones(layout.size), *np.zeros((2, layout.size))]
    gradient = to_arena(layout, gradients)
    for t in start + 1, start + 2:
        states = expected_update("adam", layout, states, gradient, [numbers], step=t)
    np.testing.assert_allclose(w[:40], states[0][:40], rtol=2e-6, atol=2e-6)


def test_a_first_step_that_overflows_is_not_counted(backend):
    layout = make_layout([(3,), (40,)], groups=[0, 1])
    gradients = [np.ones(3, np.float32), np.ones(40, BFLOAT16)]
    bad = [gradients[0], gradients[1].copy()]
    bad[1][39] = np.inf
    numbers = [{"lr": 0.25, "eps": 0.0}, {"lr": 0.5, "eps": 0.0}]
    floats, ints, states = steps("adam", layout, numbers, bad, 3, backend=backend)
    np.testing.assert_array_equal(states[0], to_arena(layout, [np.ones(3), np.ones(40)]))
    assert not states[1].any()
    assert not states[2].any()
    assert ints[[scalars.STEP, scalars.SKIPPED, scalars.HAS_NAN]].tolist() == [0, 3, 1]

    @jax.jit
    def step(floats, ints, weights, *moments):
        floats, ints = ops.prologue(floats, ints, backend=backend)
        return ops.update("adam", layout, floats, weights, moments, gradients, backend=backend)[0]

    new = step(put(floats), put(ints), *(put(x) for x in states))
    wanted = to_arena(layout, [np.full(3, 0.75), np.full(40, 0.5)])
    np.testing.assert_allclose(new, wanted, rtol=1e-6)


# The average of the weights, and bounds.


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_average_follows_the_new_weights(kind, dtype, backend):
    rng = np.random.default_rng(5)
    layout = usual_layout(dtype)
    states, leaves = random_states(layout, kind, rng), random_leaves(layout, rng)
    ema, gradient = to_arena(layout, random_leaves(layout, rng)), to_arena(layout, leaves)
    wanted = expected_update(kind, layout, states, gradient, factor=0.5)
    floats = make_floats(dtype=dtype, factor=0.5, one_minus_ema=0.125)
    # On the xla backend, where a gradient comes from does not depend on the kind.
    for operand in [leaves] if backend == "xla" and kind != "adam" else [leaves, gradient]:
        with jax.enable_x64(dtype == "float64"):
            *got, average = update(kind, layout, floats, states, operand, ema=ema, backend=backend)
            alone = update(kind, layout, floats, states, operand, backend=backend)
        for x, y, z in zip(got, alone, wanted, strict=True):
            assert_close(x, z, dtype)
            if backend != "xla":
                assert_same_bits(x, y)
        assert_close(average, ema + 0.125 * (wanted[0] - ema), dtype)


def test_an_average_without_a_decay_is_the_weights_whatever_it_was(backend):
    rng = np.random.default_rng(6)
    layout = usual_layout()
    states, leaves = random_states(layout, "sgd", rng), random_leaves(layout, rng)
    values = rng.choice([np.nan, np.inf, 1e38, -1e38], layout.size)
    ema = np.where(group_of_elements(layout) < 0, 0, values).astype(np.float32)
    floats = make_floats(one_minus_ema=1.0)
    weights, average = update("sgd", layout, floats, states, leaves, ema=ema, backend=backend)
    assert_same_bits(average, weights)


def test_an_average_with_a_decay_of_one_stays(backend):
    rng = np.random.default_rng(7)
    layout = usual_layout()
    states, leaves = random_states(layout, "sgd", rng), random_leaves(layout, rng)
    ema = to_arena(layout, random_leaves(layout, rng))
    floats = make_floats(one_minus_ema=0.0)
    _, average = update("sgd", layout, floats, states, leaves, ema=ema, backend=backend)
    np.testing.assert_array_equal(average, ema)


# The xla backend has no gate.
@native_backends
@pytest.mark.parametrize("apply", [False, True])
@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gated_update_is_the_same(kind, dtype, apply, backend):
    rng = np.random.default_rng(8)
    layout = usual_layout(dtype)
    states, leaves = random_states(layout, kind, rng), random_leaves(layout, rng)
    ema, gradient = to_arena(layout, random_leaves(layout, rng)), to_arena(layout, leaves)
    floats = make_floats(dtype=dtype, one_minus_ema=0.25, apply=apply)
    with jax.enable_x64(dtype == "float64"):
        for average, operand in (None, gradient), (ema, gradient), (ema, leaves):
            got, wanted = (
                update(kind, layout, floats, states, operand, ema=average, gated=g, backend=backend)
                for g in (True, False)
            )
            for x, y in zip(got, wanted, strict=True):
                assert_same_bits(x, y)
            if not apply:
                olds = states if average is None else [*states, average]
                for x, y in zip(got, olds, strict=True):
                    assert_same_bits(x, y)


@native_backends
def test_padding_of_the_average_is_never_written(backend):
    rng = np.random.default_rng(9)
    layout = usual_layout()
    padding = group_of_elements(layout) < 0
    states, leaves = random_states(layout, "adam", rng), random_leaves(layout, rng)
    ema = to_arena(layout, random_leaves(layout, rng))
    ema.view(np.uint32)[padding] = 0xFFA1B2C3
    for rate in 0.5, 1.0:
        floats = make_floats(one_minus_ema=rate)
        new = update("adam", layout, floats, states, leaves, ema=ema, backend=backend)[-1]
        assert_same_bits(new[padding], ema[padding])


@pytest.mark.parametrize("source", ["leaves", "arena"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_clamped_after_they_are_scaled_and_before_the_decay(kind, source, backend):
    rng = np.random.default_rng(10)
    layout, numbers = usual_layout(), with_decay("both")
    states, leaves = random_states(layout, kind, rng), random_leaves(layout, rng)
    gradient = to_arena(layout, leaves)
    options = {"factor": 4.0, "max_value": 1.5}
    wanted = expected_update(kind, layout, states, gradient, numbers, **options)
    operand = leaves if source == "leaves" else gradient
    floats = make_floats(numbers, **options)
    for x, y in zip(
        update(kind, layout, floats, states, operand, backend=backend), wanted, strict=True
    ):
        assert_close(x, y)


def test_a_bound_hides_no_nan_and_clamps_infinities(backend):
    layout = make_layout([(5,)])
    gradient = [np.array([np.nan, np.inf, -np.inf, 0.25, -9], np.float32)]
    floats = make_floats([{"lr": 1.0}], max_value=0.5)
    states = [np.zeros(layout.size, np.float32)]
    new, *_ = update("sgd", layout, floats, states, gradient, backend=backend)
    np.testing.assert_array_equal(new[:5], [np.nan, -0.5, 0.5, -0.25, 0.5])


def test_a_group_may_have_a_factor_on_its_rate(backend):
    rng = np.random.default_rng(11)
    layout = usual_layout()
    numbers = [NUMBERS[0] | {"scale": 0.25}, NUMBERS[1] | {"scale": 3.0}]
    states, leaves = random_states(layout, "adam", rng), random_leaves(layout, rng)
    wanted = expected_update("adam", layout, states, to_arena(layout, leaves), numbers)
    floats = make_floats(numbers)
    got = update("adam", layout, floats, states, leaves, backend=backend)
    for x, y in zip(got, wanted, strict=True):
        assert_close(x, y)
