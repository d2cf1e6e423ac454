"""prologue: counters, and the scalars derived from them, against float64."""

import functools

import jax
import numpy as np
import pytest
from arenas import assert_same_bits, make_floats, put

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
    return floats.reshape(-1, s.ROW)[1:, getattr(s, name)].astype(np.float64)


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
        assert not ints[s.HAS_NAN + 1 :].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bad", [False, True])
def test_what_the_user_sets_stays_bit_for_bit(bad, dtype, backend):
    rng = np.random.default_rng(0)
    floats, ints = rng.uniform(0.1, 0.9, s.floats_size(5)).astype(dtype), s.initial_ints()
    ints[s.FIRST_BAD] = 3 if bad else s.NO_LEAF
    with jax.enable_x64(dtype == "float64"):
        new, _ = prologue(floats, ints, backend)
    written = np.zeros((6, s.ROW), bool)
    written[0, s.APPLY] = True
    written[1:, [s.LR_WD, s.C1, s.C2]] = True
    assert_same_bits(new[~written.reshape(-1)], floats[~written.reshape(-1)])
    assert np.isfinite(new).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("t", [1, 2, 3, 999, 10**6, 2**24 + 1, 2**24 + 3])
def test_bias_corrections_are_those_of_float64(t, dtype, backend):
    betas = [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999]
    floats = make_floats([{"lr": 0.1, "b1": b, "b2": b} for b in betas], dtype=dtype)
    for name in "C1", "C2", "LR_WD":
        floats.reshape(-1, s.ROW)[1:, getattr(s, name)] = np.nan
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


def test_where_there_is_no_beta_nothing_is_corrected(backend):
    floats = make_floats([{"lr": 0.1}])
    for name in "ONE_MINUS_B1", "ONE_MINUS_B2":
        floats.reshape(-1, s.ROW)[1:, getattr(s, name)] = 0
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
        assert np.isfinite(floats).all()
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
