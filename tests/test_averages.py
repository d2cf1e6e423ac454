"""with_ema and ema_params: states that evaluate with the averages, and averages of extra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from states import assert_buffers_equal, assert_trees_equal, lora, mlp, ones_like

import jaxrenaissance as jr


def create(backend, extra=None, ema_extra=False, **options):
    optimizer = jr.sgd(1.0, backend=backend, ema_decay=0.75, **options)
    params = {"a": jnp.ones(2), "b": jnp.zeros((), jnp.bfloat16)}
    return jr.TrainState.create(params, optimizer, extra=extra, ema_extra=ema_extra)


@pytest.mark.parametrize("debias", [False, True])
def test_before_the_first_update_the_average_is_the_weights(debias, backend):
    state = create(backend, ema_debias=debias)
    assert_trees_equal(state.ema_params, state.params)
    assert_trees_equal(state.with_ema().params, state.params)
    bad = state.apply_gradients({"a": jnp.full(2, jnp.nan), "b": jnp.zeros(())})
    assert_trees_equal(bad.ema_params, state.params)
    # Weights, averages, floats and ints.
    assert len(jax.tree.leaves(state)) == 4


@pytest.mark.parametrize(("debias", "wanted"), [(False, [0.75, 0.3125]), (True, [0.0, -4 / 7])])
@pytest.mark.parametrize("jitted", [False, True])
def test_the_average_follows_the_weights(debias, wanted, jitted, backend):
    # The weights are 1, 0, -1. Debiased, the first average is the first new weight.
    state = create(backend, ema_debias=debias)
    read = (
        (lambda s: s.with_ema().params["a"])
        if not jitted
        else jax.jit(lambda s: s.with_ema().params["a"])
    )
    for value in wanted:
        state = state.apply_gradients({"a": jnp.ones(2), "b": jnp.ones((), jnp.bfloat16)})
        np.testing.assert_allclose(read(state), value, atol=1e-7)
        np.testing.assert_allclose(state.ema_params["a"], value, atol=1e-7)
    assert state.ema_params["b"].dtype == jnp.bfloat16


def test_evaluation_does_not_change_for_the_state_with_averages(backend):
    optimizer = jr.sgd(0.5, ema_decay=0.5, backend=backend)
    state = jr.TrainState.create(
        lora(), optimizer, trainable="lora/*", compute_dtype={"lora/a": "bfloat16"}
    )
    state = state.apply_gradients(lora())
    averaged = state.with_ema()
    assert jax.tree.structure(averaged) == jax.tree.structure(state)
    got = averaged.compute_params
    np.testing.assert_array_equal(got["lora"]["b"], 0.75)
    assert got["lora"]["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(got["base"]["kernel"], lora()["base"]["kernel"])
    assert_buffers_equal((averaged.moments, averaged.ints), (state.moments, state.ints))


def test_the_state_with_averages_can_be_donated_and_outlives_the_other(backend):
    state = create(backend, extra=jnp.ones(3), ema_extra=True)
    averaged = state.with_ema()
    assert len({x.unsafe_buffer_pointer() for x in (*averaged.weights, *averaged.ema)}) == 2
    step = jax.jit(lambda s: s.apply_gradients(s.compute_params), donate_argnums=0)
    jax.block_until_ready(step(averaged))


def test_averages_of_extra_follow_each_update(backend):
    stats = {"mean": jr.Packed({"m": jnp.zeros(3)}, backend=backend), "n": jnp.zeros((), int)}
    state = create(backend, extra=stats, ema_extra=True)

    @jax.jit(donate_argnums=0)
    def step(state, value):
        extra = {"mean": state.extra["mean"].replace({"m": value * jnp.ones(3)}), "n": value}
        extra["n"] = value.astype(int)
        grads = {"a": value * jnp.ones(2), "b": value}
        return state.apply_gradients(grads, extra=extra)

    average = 0.0
    for value in (4.0, jnp.nan, 8.0):
        state = step(state, jnp.float32(value))
        average = average if np.isnan(value) else 0.75 * average + 0.25 * value
        averaged = state.with_ema().extra
        np.testing.assert_allclose(averaged["mean"].tree["m"], average)
    assert int(averaged["n"]) == 8
    np.testing.assert_array_equal(state.extra["mean"].tree["m"], 8.0)
    with pytest.raises(ValueError, match=r"extra: expected a tree like state\.extra"):
        state.replace(extra=None)


def test_a_debiased_average_of_extra_in_low_precision(backend):
    extra = jnp.ones(2, jnp.bfloat16)
    state = create(backend, extra=extra, ema_extra=True, ema_debias=True)
    assert_trees_equal(state.with_ema().extra, extra)
    for value in (1.0, 3.0):
        grads = ones_like(state.params)
        state = state.apply_gradients(grads, extra=jnp.full(2, value, jnp.bfloat16))
    # (0.25 * 0.75 * 1 + 0.25 * 3) / (1 - 0.75 ** 2)
    wanted = jnp.full(2, 15 / 7).astype(jnp.bfloat16)
    assert_trees_equal(state.with_ema().extra, wanted)
    assert state.ema_extra.dtype == jnp.float32


def test_without_being_asked_extra_stays_as_it_is(backend):
    state = create(backend, extra=jnp.ones(3)).apply_gradients(
        {"a": jnp.ones(2), "b": jnp.ones(())}, extra=jnp.zeros(3)
    )
    assert_trees_equal(state.with_ema().extra, jnp.zeros(3))
    assert state.ema_extra is None


def test_members_have_averages_of_their_own(backend):
    optimizer = jr.sgd(1.0, ema_decay=0.75, ema_debias=True, backend=backend)

    def run(scale):
        params = jax.tree.map(lambda x: x * scale, mlp())
        state = jr.TrainState.create(params, optimizer, extra=params["in"], ema_extra=True)
        for _ in range(2):
            state = state.apply_gradients(ones_like(params), extra=state.params["in"])
        state = state.with_ema()
        return state.params, state.extra

    many = jax.jit(jax.vmap(run))(jnp.asarray([1.0, 2.0]))
    assert_buffers_equal(
        jax.tree.map(lambda x: x[1], many), jax.jit(run)(2.0), rtol=1e-6, atol=1e-6
    )


def test_what_has_no_average_says_so():
    state = jr.TrainState.create(mlp(), jr.sgd(0.1, backend="xla"))
    with pytest.raises(
        ValueError, match=r"ema_params: the optimizer keeps no average .*ema_decay="
    ):
        _ = state.ema_params
    with pytest.raises(ValueError, match="with_ema: the optimizer keeps no average"):
        state.with_ema()
    with pytest.raises(ValueError, match=r"ema_extra: .* make it with ema_decay="):
        jr.TrainState.create(mlp(), jr.sgd(0.1), ema_extra=True)
    with pytest.raises(TypeError, match="ema_extra: expected a bool, got 1"):
        jr.TrainState.create(mlp(), jr.sgd(0.1, ema_decay=0.5), ema_extra=1)
