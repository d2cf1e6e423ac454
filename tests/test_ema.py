"""Averages of the weights: their values, how they are read, and what leaves them alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from states import assert_buffers_equal, make_step, random_like

import jaxrenaissance as jr


def model():
    rng = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(rng.normal(size=(5, 31)), jnp.float32),
        "bias": jnp.asarray(rng.normal(size=33), jnp.float32),
        "empty": jnp.zeros((0, 2)),
    }


def make(params, *, learning_rate=0.1, compute_dtype=None, trainable=None, **options):
    return jr.TrainState.create(
        params, jr.sgd(learning_rate, **options), compute_dtype=compute_dtype, trainable=trainable
    )


def assert_close(got, wanted, rtol=1e-6, atol=1e-7):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    assert_buffers_equal(got, wanted, rtol, atol)


def test_an_average_starts_as_a_copy_and_follows(backend):
    params = model()
    state = make(params, ema_decay=0.75, backend=backend)
    assert_buffers_equal(state.ema_params, params)
    step, rng = make_step(), np.random.default_rng(1)
    wanted = jax.tree.map(np.float64, params)
    for _ in range(5):
        state = step(state, random_like(params, rng))
        wanted = jax.tree.map(lambda e, w: 0.75 * e + 0.25 * np.float64(w), wanted, state.params)
        assert_close(state.ema_params, wanted)
    assert float(state.metrics["ema_decay"]) == 0.75


def test_a_debiased_average_is_that_of_optax(backend):
    params = model()
    state = make(params, ema_decay=0.9, ema_debias=True, backend=backend)
    # Nothing was averaged yet: 0 / 0 is read as the weights.
    assert_buffers_equal(state.ema_params, params)
    assert_buffers_equal(state.with_ema().params, params)
    theirs = optax.ema(0.9, debias=True)
    ema_state = theirs.init(params)
    step, rng = make_step(), np.random.default_rng(2)
    for _ in range(10):
        state = step(state, random_like(params, rng))
        wanted, ema_state = theirs.update(state.params, ema_state)
        assert_close(state.ema_params, wanted, 2e-6, 1e-6)


@pytest.mark.parametrize("debias", [False, True])
def test_the_decay_may_follow_a_schedule(debias, backend):
    def warming_up(count):
        return (1 + count) / (10 + count)

    params = model()
    state = make(params, ema_decay=warming_up, ema_debias=debias, backend=backend)
    step, rng = make_step(), np.random.default_rng(3)
    ema = jax.tree.map(lambda x: np.float64(x) * (not debias), params)
    weight = 0.0 if debias else 1.0
    for count in range(8):
        state = step(state, random_like(params, rng))
        decay = warming_up(count)
        ema = jax.tree.map(lambda e, w, d=decay: d * e + (1 - d) * np.float64(w), ema, state.params)
        weight = decay * weight + 1 - decay
        np.testing.assert_allclose(state.metrics["ema_decay"], decay, rtol=1e-6)
        assert_close(state.ema_params, jax.tree.map(lambda e, c=weight: e / c, ema), 2e-6, 1e-6)


def test_the_decay_may_be_set_and_compiles_nothing(backend):
    params = {"w": jnp.zeros(3)}
    state = make(params, learning_rate=1.0, ema_decay=0.5, backend=backend)
    step, grads = make_step(), {"w": jnp.full(3, -1.0)}
    state = step(state, grads)
    np.testing.assert_array_equal(state.ema_params["w"], 0.5)
    state = step(state.replace_hyperparams(ema_decay=0.75), grads)
    np.testing.assert_array_equal(state.ema_params["w"], 0.75 * 0.5 + 0.25 * 2)
    # 0: the weights themselves.
    state = step(state.replace_hyperparams(ema_decay=0.0), grads)
    np.testing.assert_array_equal(state.ema_params["w"], 3.0)
    assert step._cache_size() == 1


@pytest.mark.parametrize("decay", [0.5, 0.999, 0.99999])
def test_a_debiased_average_of_constant_weights_is_the_weights(decay, backend):
    params = model()
    state = make(params, learning_rate=0.0, ema_decay=decay, ema_debias=True, backend=backend)
    zeros = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def run(state):
        first = state.apply_gradients(zeros)
        last = jax.lax.fori_loop(0, 2999, lambda _, s: s.apply_gradients(zeros), first)
        return first, last

    first, last = run(state)
    assert_close(first.ema_params, params, 3e-7, 0)
    # 3000 roundings of a running sum to float32.
    assert_close(last.ema_params, params, 2e-5, 0)


@pytest.mark.parametrize("debias", [False, True])
def test_a_skipped_step_leaves_the_average_bit_for_bit(debias, backend):
    params = model()
    state = make(params, ema_decay=0.9, ema_debias=debias, backend=backend)
    step = make_step()
    bad = params | {"kernel": params["kernel"].at[4, 30].set(jnp.nan)}
    for grads in (bad, params, bad):
        skipped = step(state, bad)
        assert_buffers_equal(skipped.ema, state.ema)
        assert_buffers_equal(skipped.ema_params, state.ema_params)
        state = step(state, grads)
    # As if the bad calls had not been.
    alone = step(make(params, ema_decay=0.9, ema_debias=debias, backend=backend), params)
    assert_buffers_equal(state.ema_params, alone.ema_params)


def test_the_average_does_not_share_a_buffer_with_the_weights(backend):
    state = make({"w": jnp.ones(32)}, ema_decay=0.9, backend=backend)
    step = make_step(donate_argnums=0)
    state = step(state, {"w": jnp.ones(32)})
    read = state.ema_params
    state = step(state, {"w": jnp.ones(32)})
    np.testing.assert_allclose(read["w"], 0.99, rtol=1e-6)
    np.testing.assert_allclose(state.ema_params["w"], 0.9 * 0.99 + 0.1 * 0.8, rtol=1e-6)


# Reading it.


@pytest.mark.parametrize("debias", [False, True])
def test_a_state_with_the_average_for_its_weights_evaluates_as_any_other(debias, backend):
    params = model() | {"frozen": jnp.arange(3, dtype=jnp.int8)}
    state = make(
        params,
        ema_decay=0.5,
        ema_debias=debias,
        compute_dtype="bfloat16",
        trainable=["kernel", "bias", "empty"],
        backend=backend,
    )
    step = make_step()
    for value in (1.0, -2.0):
        state = step(state, jax.tree.map(lambda x, v=value: jnp.full(x.shape, v), params))
    average = state.ema_params
    with_ema = state.with_ema()
    assert_buffers_equal(with_ema.params, average)
    assert_buffers_equal(with_ema.params["frozen"], params["frozen"])
    assert with_ema.compute_params["kernel"].dtype == jnp.bfloat16
    assert_buffers_equal(with_ema.compute_params["kernel"], average["kernel"].astype(jnp.bfloat16))
    assert not (average["kernel"] == state.params["kernel"]).any()
    # Inside jit too, by the same code; and the state that trains is untouched.
    inside = jax.jit(lambda s: s.with_ema().params)(state)
    assert_close(inside, average, 1e-6)
    assert int(with_ema.step) == 2


def test_averages_are_read_in_the_dtypes_that_were_given_and_kept_in_full(backend):
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    state = make(params, learning_rate=2.0**-10, ema_decay=0.5, backend=backend)
    state = make_step()(state, params)
    assert state.ema_params["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.ema[0][:4], 1 - 2.0**-11)


def test_float64_leaves_are_averaged_in_float64(backend):
    with jax.enable_x64(True):
        params = {"a": jnp.ones(3, jnp.float64), "b": jnp.ones(2, jnp.float32)}
        state = make(params, learning_rate=1e-9, ema_decay=0.5, backend=backend)
        state = make_step()(state, params)
        assert state.ema_params["a"].dtype == jnp.float64
        np.testing.assert_allclose(1 - state.ema_params["a"], 5e-10, rtol=1e-6)
        np.testing.assert_array_equal(state.ema_params["b"], 1.0)
