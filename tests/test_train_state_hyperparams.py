"""Numbers of a state: schedules, metrics, and replacing them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import Oracle

import jaxrenaissance as jr


def test_schedules_see_the_updates_made_before_and_are_not_advanced_by_a_skip(backend):
    optimizer = jr.adamw(
        lambda count: 0.5**count,
        weight_decay=optax.linear_schedule(0.1, 0.0, 10),
        mask="weights",
        backend=backend,
    )
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    state = jr.TrainState.create(params, optimizer)
    oracle = Oracle(
        "adamw",
        jax.tree.leaves(params),
        decayed=[False, True],
        learning_rate=lambda count: 0.5**count,
        weight_decay=lambda count: 0.1 - 0.01 * count,
    )
    step = jax.jit(lambda s, g: s.apply_gradients(g), donate_argnums=0)
    seen = []
    for value in (1.0, jnp.nan, 2.0, -3.0):
        grads = jax.tree.map(lambda x, value=value: x * value, params)
        state = step(state, grads)
        seen.append([float(state.metrics[k]) for k in ("learning_rate", "weight_decay")])
        oracle.step(jax.tree.leaves(grads))
    np.testing.assert_allclose(seen, [[1, 0.1], [0.5, 0.09], [0.5, 0.09], [0.25, 0.08]], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(state.params), oracle.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-6)
    assert step._cache_size() == 1


def test_a_schedule_that_returns_no_scalar_is_refused():
    state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(lambda _: jnp.ones(2), backend="xla"))
    with pytest.raises(ValueError, match=r"learning_rate: the schedule returned shape \(2,\)"):
        state.apply_gradients({"w": jnp.ones(2)})


def test_metrics_are_the_values_as_used_and_outlive_a_donated_state(backend):
    optimizer = jr.adamw(
        0.1, b1=0.8, b2=0.99999, eps=1e-6, weight_decay=0.2, mask="weights", backend=backend
    )
    state = jr.TrainState.create({"w": jnp.ones((2, 2))}, optimizer)
    step = jax.jit(lambda s: s.apply_gradients(s.compute_params), donate_argnums=0)
    state = step(state)
    metrics = state.metrics
    weights = state.params
    step(state)
    wanted = {
        "learning_rate": 0.1,
        "b1": 0.8,
        "b2": 0.99999,
        "eps": 1e-6,
        "eps_root": 0.0,
        "weight_decay": 0.2,
        "step": 1,
        "calls": 1,
        "skipped": 0,
        "consecutive_skips": 0,
        "has_nan": False,
    }
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        assert metrics[name].shape == ()
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6)
    np.testing.assert_allclose(weights["w"], 1 - 0.1 * (1 + 0.2), rtol=1e-6)


def test_replace_hyperparams_changes_the_numbers_and_compiles_nothing(backend):
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    state = jr.TrainState.create(
        params, jr.sgd(0.5, momentum=0.9, weight_decay=0.1, mask="weights", backend=backend)
    )
    step = jax.jit(lambda s: s.apply_gradients(jax.tree.map(jnp.zeros_like, params)))
    step(state)
    new = state.replace_hyperparams(learning_rate=1.0, weight_decay=0.25, momentum=jnp.float32(0))
    new = step(new)
    assert step._cache_size() == 1
    np.testing.assert_array_equal(new.params["kernel"], 0.75)
    np.testing.assert_array_equal(new.params["bias"], 1.0)
    assert float(state.metrics["momentum"]) == np.float32(0.9)
    assert float(new.metrics["momentum"]) == 0.0


def test_replace_hyperparams_says_where_schedules_go():
    state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(0.1))
    with pytest.raises(TypeError, match="learning_rate: replace_hyperparams takes numbers"):
        state.replace_hyperparams(learning_rate=optax.constant_schedule(1.0))


def test_replace_hyperparams_refuses_what_it_cannot_set():
    params = {"w": jnp.ones(2)}
    schedule = optax.constant_schedule(0.1)
    state = jr.TrainState.create(params, jr.adamw(schedule, mask="weights", backend="xla"))
    with pytest.raises(ValueError, match="learning_rate: it follows a schedule"):
        state.replace_hyperparams(learning_rate=0.1)
    with pytest.raises(ValueError, match=r"momentum: adamw has no such hyperparameter.*b1"):
        state.replace_hyperparams(momentum=0.1)
    with pytest.raises(ValueError, match="b1: expected a number in"):
        state.replace_hyperparams(b1=1.0)
    with pytest.raises(TypeError, match="eps: expected a number"):
        state.replace_hyperparams(eps="small")
    assert float(state.replace_hyperparams(b2=0.5).metrics["b2"]) == 0.5


def test_numbers_may_be_device_scalars_and_traced_values(backend):
    params = {"w": jnp.ones((1, 1))}

    def run(lr, momentum):
        state = jr.TrainState.create(params, jr.sgd(lr, momentum, backend=backend))
        return state.apply_gradients(params).apply_gradients(params).params["w"][0, 0]

    wanted = run(0.25, 0.5)
    assert wanted == 1 - 0.25 - 0.25 * 1.5
    device = jnp.float32(0.25)
    state = jr.TrainState.create(params, jr.sgd(device, backend=backend))
    jax.jit(lambda s: s.apply_gradients(params), donate_argnums=0)(state)
    assert float(device) == 0.25
    assert run(device, jnp.float32(0.5)) == wanted
    assert jax.jit(run)(0.25, 0.5) == wanted
    assert run(np.float64(0.25), np.float32(0.5)) == wanted
