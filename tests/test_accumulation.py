"""Accumulation over calls and inside a step: the mean, cycles, and bad micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from states import assert_buffers_equal, make_step, tolerance

import jaxrenaissance as jr


def model():
    rng = np.random.default_rng(0)
    return {
        "in": {"kernel": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32), "bias": jnp.zeros(5)},
        "out": {"kernel": jnp.asarray(rng.normal(size=(5, 1)), jnp.float32)},
        "w_empty": jnp.zeros((0, 2)),
    }


def loss_fn(params, x):
    h = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return jnp.mean((h @ params["out"]["kernel"]) ** 2)


def batches(cycles, every):
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(cycles, every, 8, 3)), jnp.float32)


def make(every=None, params=None, optimizer=jr.adamw, learning_rate=0.05, **options):
    if optimizer is jr.adamw:
        options = {"weight_decay": 0.1, "mask": True, "eps": 1e-3} | options
    if every is not None:
        options["accumulate"] = jr.Accumulate(every)
    params = model() if params is None else params
    return jr.TrainState.create(params, optimizer(learning_rate, **options))


def step_by_calls(state, x):
    return state.apply_gradients(jax.grad(loss_fn)(state.compute_params, x))


def step_by_scan(state, xs):
    def body(acc, x):
        return state.accumulate(acc, jax.grad(loss_fn)(state.compute_params, x)), None

    acc, _ = jax.lax.scan(body, state.zero_gradients(), xs)
    return state.apply_gradients(acc)


def assert_close(got, wanted):
    assert_buffers_equal(got, wanted, rtol=1e-5, atol=1e-6)


def states_of(state):
    return state.weights, state.moments, state.ema


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.5, "ema_decay": 0.9}])
def test_both_ways_are_one_big_batch(options, backend):
    by_calls, by_scan = make(4, backend=backend, **options), make(backend=backend, **options)
    big = by_scan
    call = jax.jit(lambda s, x: step_by_calls(s, x), donate_argnums=0)
    scan, whole = jax.jit(lambda s, xs: step_by_scan(s, xs)), jax.jit(step_by_calls)
    for micro_batches in batches(3, 4):
        for x in micro_batches:
            by_calls = call(by_calls, x)
        by_scan = scan(by_scan, micro_batches)
        big = whole(big, micro_batches.reshape(-1, 3))
        assert_close(states_of(by_calls), states_of(big))
        assert_close(states_of(by_scan), states_of(big))
        if options:
            assert float(big.metrics["clip_factor"]) < 1
            for state in (by_calls, by_scan):
                for name in ("grad_norm", "clip_factor"):
                    np.testing.assert_allclose(state.metrics[name], big.metrics[name], rtol=1e-5)
    assert [int(n) for n in (by_calls.step, by_calls.calls, by_calls.skipped)] == [3, 12, 0]
    assert [int(n) for n in (by_scan.step, by_scan.calls, by_scan.skipped)] == [3, 3, 0]
    assert call._cache_size() == scan._cache_size() == 1


def test_it_is_multi_steps_of_optax(backend):
    params = {"kernel": jnp.ones((5, 31)), "bias": jnp.zeros(33)}
    rng = np.random.default_rng(2)
    state, step = make(3, params, backend=backend), make_step()
    theirs = optax.MultiSteps(optax.adamw(0.05, eps=1e-3, weight_decay=0.1), every_k_schedule=3)
    wanted, opt_state = params, theirs.init(params)
    update = jax.jit(theirs.update)
    for i in range(9):
        before = state
        grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
        state = step(state, grads)
        updates, opt_state = update(grads, opt_state, wanted)
        wanted = optax.apply_updates(wanted, updates)
        assert_close(state.params, wanted)
        if i % 3 < 2:
            assert_buffers_equal(states_of(state), states_of(before))


# Bad micro-batches.


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_micro_batch_skips_its_cycle_and_not_the_next(value, backend):
    params = {"a": jnp.ones((5, 31)), "b": jnp.ones(33)}
    state = make(3, params, ema_decay=0.5, max_norm=100.0, backend=backend)
    step = make_step()

    def gradient(i, bad):
        grads = jax.tree.map(lambda x: x * (1.0 + i), params)
        return grads | {"b": grads["b"].at[32].set(value)} if bad else grads

    clean = make(3, params, ema_decay=0.5, max_norm=100.0, backend=backend)
    for where in range(3):
        before = state
        for i in range(3):
            state = step(state, gradient(i, i == where))
            assert bool(state.has_nan) == (i == where)
            assert_buffers_equal(states_of(state), states_of(before))
        assert int(state.skipped) == int(before.skipped) + 1
        assert int(state.consecutive_skips) == 1
        for i in range(3):
            state, clean = step(state, gradient(i, False)), step(clean, gradient(i, False))
        assert_buffers_equal(states_of(state), states_of(clean))
        assert int(state.step) == where + 1
        assert int(state.consecutive_skips) == 0
    assert step._cache_size() == 1


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}])
def test_a_sum_that_overflows_is_a_bad_cycle(options, backend):
    params = {"a": jnp.ones(3), "b": jnp.ones(33)}
    state = make(2, params, jr.sgd, backend=backend, **options)
    step = make_step()
    large = params | {"b": params["b"].at[32].set(3e38)}
    first = step(state, large)
    assert not bool(first.has_nan)
    second = step(first, large)
    assert bool(second.has_nan)
    assert int(second.skipped) == 1
    assert_buffers_equal(second.weights, state.weights)
    with pytest.raises(FloatingPointError, match="'b'"):
        jr.check(second, max_consecutive=0)
    for _ in range(2):
        second = step(second, params)
    assert int(second.step) == 1
    assert np.isfinite(second.weights[0]).all()
    scan = make(None, params, jr.sgd, backend=backend, **options)
    acc = scan.accumulate(scan.accumulate(scan.zero_gradients(), large), large)
    skipped = scan.apply_gradients(acc)
    assert int(skipped.skipped) == 1
    assert_buffers_equal(skipped.weights, scan.weights)


def test_the_first_bad_leaf_of_a_cycle_is_named(backend):
    params = {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones(3)}
    state, step = make(2, params, backend=backend), make_step()
    state = step(state, params | {"b": jnp.full(3, jnp.nan)})
    state = step(state, params)
    with pytest.raises(FloatingPointError, match=r"call 0 .*'b'"):
        jr.check(state, max_consecutive=0)


def test_without_the_finite_check_a_cycle_is_never_skipped_and_the_next_is_clean(backend):
    params = {"a": jnp.ones(3)}
    state = make(2, params, jr.sgd, skip_nonfinite=False, backend=backend)
    step = make_step()
    state = step(step(state, {"a": jnp.asarray([1.0, jnp.nan, 1.0])}), params)
    np.testing.assert_array_equal(np.isnan(state.params["a"]), [False, True, False])
    state = step(step(state.replace(params=params), params), params)
    np.testing.assert_allclose(state.params["a"], 0.95, rtol=1e-6)
    assert [int(n) for n in (state.step, state.skipped)] == [2, 0]


# Counting.


def test_schedules_and_bias_correction_count_updates(backend):
    params = {"w": jnp.ones(3)}
    state = make(
        2, params, jr.adam, learning_rate=lambda count: 0.1 / 2**count, eps=0.0, backend=backend
    )
    step, seen = make_step(), []
    for value in (1.0, 1.0, np.nan, 1.0, 1.0, 1.0):
        state = step(state, {"w": jnp.full(3, value)})
        seen.append((int(state.step), float(state.params["w"][0])))
    steps, weights = zip(*seen, strict=True)
    assert steps == (0, 1, 1, 1, 1, 2)
    # Adam's updates by a constant gradient are the learning rate.
    np.testing.assert_allclose(weights, [1, 0.9, 0.9, 0.9, 0.9, 0.85], rtol=1e-6)
    np.testing.assert_allclose(state.metrics["learning_rate"], 0.05, rtol=1e-6)


def test_cycles_of_other_lengths_share_one_program(backend):
    params, step = {"w": jnp.zeros(3)}, make_step()
    for every in (1, 2, 5):
        state = make(every, params, jr.sgd, learning_rate=1.0, backend=backend)
        for i in range(10):
            state = step(state, {"w": jnp.full(3, -float(i))})
        assert int(state.step) == 10 // every
        np.testing.assert_allclose(state.params["w"], 45 / every, rtol=1e-6)
    assert step._cache_size() == 1


def test_a_cycle_of_one_is_the_plain_step(backend):
    one, plain, step = make(1, backend=backend), make(backend=backend), jax.jit(step_by_calls)
    for x in batches(3, 1)[:, 0]:
        one, plain = step(one, x), step(plain, x)
    assert_buffers_equal(states_of(one), states_of(plain), **tolerance(backend))
    assert int(one.step) == 3


def test_plain_steps_and_accumulated_ones_may_take_turns(backend):
    params = {"w": jnp.zeros(3)}
    state = make(None, params, jr.sgd, learning_rate=1.0, backend=backend)
    for values in ([-1.0], [-1.0, -3.0], [-4.0], [-1.0, -2.0, -3.0]):
        grads = [{"w": jnp.full(3, value)} for value in values]
        if len(grads) == 1:
            state = state.apply_gradients(grads[0])
            continue
        acc = state.zero_gradients()
        for g in grads:
            acc = state.accumulate(acc, g)
        state = state.apply_gradients(acc)
    np.testing.assert_allclose(state.params["w"], 1 + 2 + 4 + 2, rtol=1e-6)
    assert int(state.step) == 4


# Dtypes and the rest.


def test_low_precision_gradients_add_up_in_float32(backend):
    params = {"w": jnp.zeros(3)}
    state, step = make(4, params, jr.sgd, learning_rate=4.0, backend=backend), make_step()
    for value in (256.0, 1.0, 1.0, 1.0):
        state = step(state, {"w": jnp.full(3, value, jnp.bfloat16)})
    # In bfloat16, 256 + 1 is 256.
    np.testing.assert_array_equal(state.params["w"], -259.0)


def test_float64_gradients_add_up_in_float64(backend):
    with jax.enable_x64(True):
        params = {"a": jnp.zeros(3, jnp.float64), "b": jnp.zeros(2, jnp.float32)}
        state = make(2, params, jr.sgd, learning_rate=2.0, backend=backend)
        step = make_step()
        for value in (1.0, 1e-12):
            grads = {"a": jnp.full(3, value, jnp.float64), "b": jnp.ones(2, jnp.float32)}
            state = step(state, grads)
        np.testing.assert_allclose(-1 - state.params["a"], 1e-12, rtol=1e-3)
        np.testing.assert_array_equal(state.params["b"], -2.0)


def test_extra_is_held_back_by_its_own_micro_batch_alone(backend):
    state = jr.TrainState.create(
        {"w": jnp.zeros(3)},
        jr.sgd(1.0, accumulate=jr.Accumulate(2), backend=backend),
        extra=jnp.zeros(()),
    )
    step = jax.jit(lambda s, g, extra: s.apply_gradients({"w": g}, extra=extra))
    kept = []
    for i, value in enumerate((1.0, jnp.nan, 1.0, 1.0)):
        state = step(state, jnp.full(3, value), jnp.float32(i))
        kept.append(float(state.extra))
    assert kept == [0.0, 0.0, 2.0, 3.0]


def test_a_frozen_leaf_has_no_place_in_the_sum(backend):
    params = {"base": jnp.arange(4, dtype=jnp.int8), "w": jnp.zeros(3)}
    optimizer = jr.sgd(1.0, accumulate=jr.Accumulate(2), backend=backend)
    state = jr.TrainState.create(params, optimizer, trainable="w")
    assert [x.shape for x in state.accumulator] == [(state.plan.arenas[0].size,)]
    for _ in range(2):
        state = state.apply_gradients({"base": None, "w": jnp.ones(3)})
    np.testing.assert_array_equal(state.params["w"], -1.0)
    np.testing.assert_array_equal(state.params["base"], np.arange(4))


def test_the_sums_padding_stays_zero(backend):
    state, step = make(2, backend=backend), jax.jit(step_by_calls)
    layout = state.plan.arenas[0]
    padding = np.ones(layout.size, bool)
    for start, size, *_ in layout.segments.tolist():
        padding[start : start + size] = False
    assert padding.any()
    for x in batches(1, 3)[0]:
        state = step(state, x)
        assert not np.asarray(state.accumulator[0])[padding].any()
        assert not np.asarray(state.weights[0])[padding].any()
