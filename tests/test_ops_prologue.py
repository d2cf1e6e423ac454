"""prologue: counters, and the scalars derived from them, against float64."""

import functools

import jax
import numpy as np
import pytest
from arenas import assert_same_bits, group_rows, make_floats, make_layout, native_backends, put
from prologue_oracle import expected_prologue

from jaxrenaissance import ops
from jaxrenaissance import scalars as s

COUNTERS = ("STEP", "CALLS", "SKIPPED", "CONSECUTIVE_SKIPS", "LAST_BAD_LEAF", "LAST_BAD_CALL")


@functools.cache
def jitted(backend):
    return jax.jit(lambda floats, ints: ops.prologue(floats, ints, backend=backend))


def prologue(floats, ints, backend):
    return [np.array(x) for x in jitted(backend)(put(floats), put(ints))]


def slots(floats, name):
    """One slot of every group's row."""
    return group_rows(floats)[:, getattr(s, name)].astype(np.float64)


def counters(ints):
    return tuple(int(ints[getattr(s, name)]) for name in COUNTERS)


def test_counters_over_good_and_bad_calls(backend):
    floats, ints = make_floats(), s.initial_ints()
    # The first bad leaf of each call, and the counters after it.
    calls = [
        (5, (0, 1, 1, 1, 5, 0)),
        (0, (0, 2, 2, 2, 0, 1)),
        (None, (1, 3, 2, 0, 0, 1)),
        (None, (2, 4, 2, 0, 0, 1)),
        (17, (2, 5, 3, 1, 17, 4)),
        (None, (3, 6, 3, 0, 17, 4)),
    ]
    for bad, wanted in calls:
        ints[s.FIRST_BAD] = s.NO_LEAF if bad is None else bad
        floats, ints = prologue(floats, ints, backend)
        assert counters(ints) == wanted
        assert ints[s.FIRST_BAD] == s.NO_LEAF
        assert ints[s.HAS_NAN] == (bad is not None)
        assert floats[s.APPLY] == (bad is None)
        assert not ints[[s.MICRO, s.CYCLE_BAD]].any()
        assert ints[s.EVERY] == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bad", [False, True])
def test_what_the_user_sets_stays_bit_for_bit(bad, dtype, backend):
    rng = np.random.default_rng(0)
    floats, ints = rng.uniform(0.1, 0.9, s.floats_size(5)).astype(dtype), s.initial_ints()
    ints[s.FIRST_BAD] = 3 if bad else s.NO_LEAF
    with jax.enable_x64(dtype == "float64"):
        new, _ = prologue(floats, ints, backend)
    written = np.zeros(floats.size, bool)
    written[[s.APPLY, s.GRAD_FACTOR, s.LOSS_SCALE, s.EMA_WEIGHT, s.EMA_WEIGHT_LOW]] = True
    group_rows(written)[:, [s.LR, s.LR_WD, s.C1, s.C2]] = True
    assert_same_bits(new[~written], floats[~written])
    assert np.isfinite(new).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("t", [1, 2, 3, 999, 10**6, 2**24 + 1, 2**24 + 3])
def test_bias_corrections_are_those_of_float64(t, dtype, backend):
    betas = [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999]
    floats = make_floats([{"lr": 0.1, "b1": b, "b2": b} for b in betas], dtype=dtype)
    for name in "C1", "C2", "LR_WD":
        group_rows(floats)[:, getattr(s, name)] = np.nan
    ints = s.initial_ints()
    ints[s.STEP] = t - 1
    with jax.enable_x64(dtype == "float64"):
        floats, ints = prologue(floats, ints, backend)
    assert ints[s.STEP] == t
    # From 1 - b as it is stored: exact for float64, 6e-8 off for float32.
    stored = slots(floats, "ONE_MINUS_B2")
    with np.errstate(divide="ignore"):
        wanted = -1 / np.expm1(t * np.log1p(-stored))
    rtol = 1e-9 if dtype == "float64" else 6.1e-8
    if backend == "xla":
        rtol = max(rtol, 1e-6)
    np.testing.assert_allclose(slots(floats, "C1"), wanted, rtol=rtol)
    np.testing.assert_allclose(slots(floats, "C2"), wanted, rtol=rtol)
    # And so they are right for the b that the user meant.
    exact = [1 / (1 - b**t) for b in betas]
    np.testing.assert_allclose(slots(floats, "C2"), exact, rtol=1.1e-6)
    np.testing.assert_array_equal(slots(floats, "LR_WD"), 0)


def many_groups(count, dtype):
    """Floats whose groups all differ, with nothing derived yet."""
    numbers = [{"lr": 0.1 / (i + 1), "b1": 0.5, "b2": 1 - 0.5 / (i + 1)} for i in range(count)]
    floats = make_floats(numbers, dtype=dtype)
    for name in "LR", "LR_WD", "C1", "C2":
        group_rows(floats)[:, getattr(s, name)] = np.nan
    return floats


def assert_all_are_derived(floats, t):
    rates, stored = slots(floats, "LEARNING_RATE"), slots(floats, "ONE_MINUS_B2")
    np.testing.assert_allclose(slots(floats, "LR"), rates, rtol=1e-7)
    np.testing.assert_array_equal(slots(floats, "LR_WD"), 0)
    np.testing.assert_allclose(slots(floats, "C1"), 1 / (1 - 0.5**t), rtol=1e-6)
    wanted = -1 / np.expm1(t * np.log1p(-stored))
    np.testing.assert_allclose(slots(floats, "C2"), wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [1, 33, 257])
def test_however_many_groups_there_are_all_are_derived(count, dtype, backend):
    floats, ints = many_groups(count, dtype), s.initial_ints()
    ints[s.STEP] = 6
    with jax.enable_x64(dtype == "float64"):
        floats, ints = prologue(floats, ints, backend)
    assert ints[s.STEP] == 7
    assert_all_are_derived(floats, 7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [33, 257])
def test_finish_derives_all_groups_too(count, dtype, backend):
    layout = make_layout([(5,), (2000,)], dtype=dtype)
    gradients = [np.full(5, 3.0, dtype), np.zeros(2000, dtype)]

    @jax.jit
    def run(floats, ints, gradients):
        ints, workspace = ops.norms(layout, ints, gradients, flag=True, backend=backend)
        return ops.finish(floats, ints, [workspace], [2], gradients=1, backend=backend)[:2]

    ints = s.initial_ints()
    ints[s.STEP] = 6
    with jax.enable_x64(dtype == "float64"):
        operands = jax.device_put((many_groups(count, dtype), ints, gradients))
        floats, ints = [np.array(x) for x in run(*operands)]
    assert ints[s.STEP] == 7
    assert_all_are_derived(floats, 7)
    np.testing.assert_allclose(floats[s.GRAD_NORM], np.sqrt(45), rtol=1e-6)


def test_where_there_is_no_beta_nothing_is_corrected(backend):
    floats = make_floats([{"lr": 0.1}])
    for name in "ONE_MINUS_B1", "ONE_MINUS_B2":
        group_rows(floats)[:, getattr(s, name)] = 0
    for t in 1, 2:
        ints = s.initial_ints()
        ints[s.STEP] = t - 1
        floats, _ = prologue(floats, ints, backend)
        assert slots(floats, "C1").tolist() == slots(floats, "C2").tolist() == [1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_decay_is_the_rate_times_the_decay_rounded_once(dtype, backend):
    rng = np.random.default_rng(0)
    numbers = [{"lr": 10.0 ** -rng.uniform(0, 5), "wd": rng.uniform()} for _ in range(9)]
    floats = make_floats([*numbers, {"lr": 0.0, "wd": 0.5}, {"lr": 0.5}], dtype=dtype)
    with jax.enable_x64(dtype == "float64"):
        floats, _ = prologue(floats, s.initial_ints(), backend)
    wanted = slots(floats, "LEARNING_RATE") * slots(floats, "WEIGHT_DECAY")
    np.testing.assert_array_equal(slots(floats, "LR_WD"), wanted.astype(dtype))


def test_a_first_step_that_is_skipped_leaves_the_next_the_first(backend):
    floats, ints = make_floats([{"lr": 0.1, "b1": 0.9, "b2": 0.99999}], step=7), s.initial_ints()
    for _ in range(3):
        ints[s.FIRST_BAD] = 0
        floats, ints = prologue(floats, ints, backend)
        assert ints[s.STEP] == 0
        assert not np.isnan(floats).any()
    floats, ints = prologue(floats, ints, backend)
    assert ints[s.STEP] == 1
    np.testing.assert_allclose(slots(floats, "C1"), 1 / 0.1, rtol=1e-6)
    np.testing.assert_allclose(slots(floats, "C2"), 1 / 1e-5, rtol=1e-6)


def test_a_skip_does_not_advance_the_bias_corrections(backend):
    floats, ints = make_floats([{"lr": 0.1}]), s.initial_ints()
    for bad, t in [(False, 1), (False, 2), (True, 2), (True, 2), (False, 3)]:
        ints[s.FIRST_BAD] = 4 if bad else s.NO_LEAF
        floats, ints = prologue(floats, ints, backend)
        assert ints[s.STEP] == t
        np.testing.assert_allclose(slots(floats, "C1"), 1 / (1 - 0.9**t), rtol=1e-6)


def test_steps_count_exactly_past_what_float32_can(backend):
    floats, ints = make_floats(), s.initial_ints()
    ints[[s.STEP, s.CALLS]] = 2**24 - 1, 2**24 + 6
    for i in range(4):
        floats, ints = prologue(floats, ints, backend)
        assert ints[[s.STEP, s.CALLS]].tolist() == [2**24 + i, 2**24 + 7 + i]


def random_scalars(rng, dtype, groups=3):
    """Scalars and counters in the middle of anything."""
    floats = rng.uniform(0.1, 0.9, s.floats_size(groups)).astype(dtype)
    floats[[s.LOSS_SCALE, s.MIN_SCALE, s.MAX_SCALE]] = 2.0 ** rng.integers(-2, 12, 3)
    floats[[s.GROWTH, s.BACKOFF]] = rng.choice([1, 2, 3.5]), rng.choice([1, 0.5, 0.3])
    floats[s.EMA_WEIGHT_LOW] *= 1e-8
    floats[s.MAX_NORM] = rng.choice([0.01, 100, np.inf])
    ints = s.initial_ints()
    ints[[s.STEP, s.CALLS, s.SKIPPED]] = rng.integers(0, 1000, 3)
    ints[s.CONSECUTIVE_SKIPS] = rng.integers(0, 3)
    ints[s.FIRST_BAD] = rng.choice([4, s.NO_LEAF])
    ints[s.EVERY] = rng.choice([1, 2, 3])
    ints[s.MICRO], ints[s.CYCLE_BAD] = rng.integers(0, ints[s.EVERY]), rng.integers(0, 2)
    ints[s.GOOD_STEPS], ints[s.GROWTH_INTERVAL] = rng.integers(0, 3), rng.choice([1, 3, 2**31 - 1])
    return floats, ints


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_from_any_state_a_call_is_that_of_the_model_in_python(dtype, backend):
    rng = np.random.default_rng(1)
    with jax.enable_x64(dtype == "float64"):
        for _ in range(200):
            floats, ints = random_scalars(rng, dtype)
            new, counts = prologue(floats, ints, backend)
            wanted, wanted_counts = expected_prologue(floats, ints)
            np.testing.assert_array_equal(counts, wanted_counts)
            rtol, low = 3e-6 if dtype == "float32" else 1e-13, s.EMA_WEIGHT_LOW
            np.testing.assert_allclose(np.delete(new, low), np.delete(wanted, low), rtol=rtol)
            both = [s.EMA_WEIGHT, low]
            got, total = (np.float64(x[both]).sum() for x in (new, wanted))
            np.testing.assert_allclose(got, total, rtol=1e-7 if backend == "xla" else 1e-14)


@native_backends
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_native_scalars_have_the_bits_of_float64_rounded_once(dtype, backend):
    rng = np.random.default_rng(2)
    with jax.enable_x64(dtype == "float64"):
        for _ in range(200):
            floats, ints = random_scalars(rng, dtype)
            new, _ = prologue(floats, ints, backend)
            assert_same_bits(new, expected_prologue(floats, ints)[0])


def test_a_cycle_updates_in_its_last_call_and_divides_by_its_length(backend):
    floats, ints = make_floats(loss_scale=8.0, min_scale=1.0), s.initial_ints()
    ints[s.EVERY] = 3
    seen = []
    for bad in 6 * [False] + [False, True, False] + 3 * [False]:
        ints[s.FIRST_BAD] = 2 if bad else s.NO_LEAF
        floats, ints = prologue(floats, ints, backend)
        seen.append((floats[s.APPLY], ints[s.STEP], ints[s.SKIPPED], ints[s.HAS_NAN]))
        assert ints[s.CYCLE_BAD] == (len(seen) == 8)
    good = [(0, 0, 0, 0), (0, 0, 0, 0), (1, 1, 0, 0), (0, 1, 0, 0), (0, 1, 0, 0), (1, 2, 0, 0)]
    assert seen == [
        *good,
        (0, 2, 0, 0),
        (0, 2, 0, 1),
        (0, 2, 1, 0),
        *2 * [(0, 2, 1, 0)],
        (1, 3, 1, 0),
    ]
    np.testing.assert_allclose(floats[s.GRAD_FACTOR], 1 / 24, rtol=1e-7)


def test_a_number_of_micro_batches_that_shrinks_ends_the_cycle(backend):
    floats, ints = make_floats(), s.initial_ints()
    ints[[s.EVERY, s.MICRO]] = 2, 5
    floats, ints = prologue(floats, ints, backend)
    assert (floats[s.APPLY], ints[s.MICRO]) == (1, 0)
    np.testing.assert_allclose(floats[s.GRAD_FACTOR], 1 / 6, rtol=1e-7)


def test_the_loss_scale_grows_after_its_interval_and_backs_off_at_once(backend):
    scale = {"loss_scale": 16, "growth": 2, "backoff": 0.25, "min_scale": 2, "max_scale": 64}
    floats, ints = make_floats(**scale), s.initial_ints()
    ints[s.GROWTH_INTERVAL] = 3
    factors, scales = [], []
    for bad in [0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, *9 * [0], 0, 0, 0]:
        ints[s.FIRST_BAD] = 2 if bad else s.NO_LEAF
        floats, ints = prologue(floats, ints, backend)
        factors.append(float(floats[s.GRAD_FACTOR]))
        scales.append(float(floats[s.LOSS_SCALE]))
    assert scales == [
        16,
        16,
        32,
        32,
        8,
        8,
        8,
        16,
        4,
        2,
        2,
        2,
        2,
        2,
        4,
        4,
        4,
        8,
        8,
        8,
        16,
        16,
        16,
        32,
    ]
    # A call's gradients have the scale that was there before it.
    assert factors == [1 / x for x in [16, *scales[:-1]]]


@pytest.mark.parametrize(
    ("scale", "least", "most"), [(2.0**126, 1, 2.0**127), (2.0**-125, 2.0**-126, 1)]
)
@pytest.mark.parametrize("bad", [False, True])
def test_the_loss_scale_reaches_neither_infinity_nor_zero(scale, least, most, bad, backend):
    floats, ints = make_floats(growth=4.0, backoff=0.25), s.initial_ints()
    floats[[s.LOSS_SCALE, s.MIN_SCALE, s.MAX_SCALE]] = scale, least, most
    ints[s.GROWTH_INTERVAL] = 1
    for _ in range(5):
        ints[s.FIRST_BAD] = 0 if bad else s.NO_LEAF
        floats, ints = prologue(floats, ints, backend)
        assert least <= floats[s.LOSS_SCALE] <= most


@pytest.mark.parametrize("bad", [False, True])
def test_only_an_update_adds_to_the_weight_of_the_average(bad, backend):
    floats, ints = make_floats(one_minus_ema=0.25), s.initial_ints()
    ints[s.EVERY] = 2
    weight = 0.0
    for i in range(6):
        ints[s.FIRST_BAD] = 1 if bad and i < 4 else s.NO_LEAF
        floats, ints = prologue(floats, ints, backend)
        if i % 2 and not (bad and i < 4):
            weight += 0.25 * (1 - weight)
        assert floats[s.EMA_WEIGHT] == weight
        assert floats[s.EMA_WEIGHT_LOW] == 0


@pytest.mark.parametrize("one_minus_decay", [1e-5, 1e-3, 0.5, 1.0])
def test_the_weight_of_the_average_is_right_after_many_steps(one_minus_decay, backend):
    # In float32 alone it would stop growing where an addend is half of a unit in the last place.
    count = 200_000
    floats, ints = make_floats(one_minus_ema=one_minus_decay), s.initial_ints()

    @jax.jit
    def run(floats, ints):
        step = lambda _, carry: ops.prologue(*carry, backend=backend)  # noqa: E731
        return jax.lax.fori_loop(0, count, step, (floats, ints))

    floats, ints = jax.tree.map(np.array, run(put(floats), put(ints)))
    assert ints[s.STEP] == count
    stored = np.float64(floats[s.ONE_MINUS_EMA])
    wanted = 1.0 if stored == 1 else -np.expm1(count * np.log1p(-stored))
    got = np.float64(floats[s.EMA_WEIGHT]) + np.float64(floats[s.EMA_WEIGHT_LOW])
    np.testing.assert_allclose(got, wanted, rtol=1e-6 if backend == "xla" else 1e-12)


def test_the_rate_of_a_group_has_its_factor(backend):
    floats = make_floats([{"lr": 0.5, "wd": 0.25, "scale": 3.0}, {"lr": 0.5, "scale": 0.0}])
    for name in "LR", "LR_WD":
        group_rows(floats)[:, getattr(s, name)] = np.nan
    floats, _ = prologue(floats, s.initial_ints(), backend)
    assert slots(floats, "LR").tolist() == [1.5, 0]
    assert slots(floats, "LR_WD").tolist() == [0.375, 0]
