"""replace, and what a state carries beside the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from states import assert_buffers_equal, assert_trees_equal, batch, loss_fn, mlp

import jaxrenaissance as jr


def test_replace_params_keeps_moments_and_counters(backend):
    params = mlp()
    state = jr.TrainState.create(params, jr.adam(0.1, backend=backend)).apply_gradients(params)
    new = state.replace(params=mlp(1))
    assert_trees_equal(new.params, mlp(1))
    assert_buffers_equal((new.moments, new.ints), (state.moments, state.ints))
    assert int(new.step) == 1
    with pytest.raises(ValueError, match=r"params: 'in/bias' has shape \(6,\), wanted \(5,\)"):
        state.replace(params=mlp(1, width=6))
    with pytest.raises(TypeError):
        state.replace(weights=())


def test_extra_keeps_shapes_and_dtypes():
    extra = {"n": jnp.zeros(3, jnp.bfloat16)}
    for skip_nonfinite in (True, False):
        optimizer = jr.sgd(0.1, skip_nonfinite=skip_nonfinite)
        state = jr.TrainState.create({"w": jnp.ones(2)}, optimizer, extra=extra)
        with pytest.raises(ValueError, match=r"extra: 'n' has shape .* dtype float32, wanted"):
            state.apply_gradients({"w": jnp.ones(2)}, extra={"n": jnp.zeros(3)})


@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_a_skipped_step_keeps_extra(backend, skip_nonfinite):
    optimizer = jr.sgd(0.1, skip_nonfinite=skip_nonfinite, backend=backend)
    stats = {"mean": jr.Packed({"m": jnp.zeros(3)}, backend=backend), "n": jnp.zeros(2)}
    state = jr.TrainState.create({"w": jnp.ones(2)}, optimizer, extra=stats)

    @jax.jit(donate_argnums=0)
    def step(state, grad):
        extra = {"mean": state.extra["mean"].replace({"m": grad[:1] + jnp.zeros(3)}), "n": grad}
        return state.apply_gradients({"w": grad}, extra=extra)

    state = step(state, jnp.array([2.0, 3.0]))
    state = step(state, jnp.array([5.0, jnp.nan]))
    assert bool(state.has_nan) == skip_nonfinite
    kept = (2.0, [2.0, 3.0]) if skip_nonfinite else (5.0, [5.0, np.nan])
    np.testing.assert_array_equal(state.extra["mean"].tree["m"], kept[0])
    np.testing.assert_array_equal(state.extra["n"], kept[1])
    if skip_nonfinite:
        with pytest.raises(ValueError, match=r"^extra: expected a tree like state\.extra"):
            state.apply_gradients({"w": jnp.ones(2)}, extra={"n": jnp.ones(2)})


def test_extra_carries_batch_statistics_through_the_step(backend):
    stats = {"mean": jnp.zeros(3), "var": jnp.ones(3)}
    state = jr.TrainState.create(
        mlp(), jr.sgd(0.1, backend=backend), extra=jr.Packed(stats, backend=backend)
    )

    @jax.jit(donate_argnums=0)
    def step(state, x):
        new = {"mean": x.mean(0), "var": state.extra.tree["var"] * 2}
        state = state.apply_gradients(jax.grad(loss_fn)(state.compute_params, x))
        return state.replace(extra=state.extra.replace(new))

    for _ in range(2):
        state = step(state, batch())
    assert step._cache_size() == 1
    np.testing.assert_array_equal(state.extra.tree["var"], 4.0)
    np.testing.assert_allclose(state.extra.tree["mean"], batch().mean(0), rtol=1e-5)
    assert jr.TrainState.create({}, jr.sgd(0.1), extra={"n": 3}).extra["n"] == 3
