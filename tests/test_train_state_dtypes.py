"""Dtypes of a state: compute dtypes, full precision, float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import Oracle
from states import assert_trees_equal, batch, mlp, train_step

import jaxrenaissance as jr


@pytest.mark.parametrize(
    ("compute_dtype", "kernel", "norm", "bias"),
    [
        (None, "float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "float32", "bfloat16"),
        ("float16", "float16", "float32", "float16"),
        (jnp.bfloat16, "bfloat16", "bfloat16", "bfloat16"),
        (np.dtype("float16"), "float16", "float16", "float16"),
        ({"*/kernel": "bfloat16"}, "bfloat16", "float32", "float32"),
        ({jr.Region.W_BN_WEIGHT: jnp.float16, "*": "bfloat16"}, "bfloat16", "float16", "bfloat16"),
    ],
)
def test_compute_params_have_the_compute_dtype(compute_dtype, kernel, norm, bias, backend):
    params = mlp()
    optimizer = jr.adamw(1e-2, mask="weights", backend=backend)
    state = jr.TrainState.create(params, optimizer, compute_dtype=compute_dtype)
    compute = state.compute_params
    assert compute["in"]["kernel"].dtype == kernel
    assert compute["norm"]["scale"].dtype == norm
    assert compute["in"]["bias"].dtype == bias
    assert_trees_equal(compute, jax.tree.map(lambda x, y: x.astype(y.dtype), params, compute))
    assert_trees_equal(state.params, params)
    state, _ = jax.jit(train_step)(state, batch())
    assert int(state.step) == 1


@pytest.mark.parametrize(
    ("compute_dtype", "error", "message"),
    [
        ("int8", ValueError, "compute_dtype: got int8 for the leaf 'norm/bias'"),
        ("nonsense", TypeError, "compute_dtype: expected .* or a mapping .*, got 'nonsense'"),
        ({"*/nothing": "bfloat16"}, ValueError, "compute_dtype: the pattern .* matches no leaf"),
        ({jr.Region.M_FC_BIAS: "bfloat16"}, ValueError, "expected a region of series W"),
        (np.float64, ValueError, "compute_dtype: got float64 for the leaf"),
    ],
)
def test_bad_compute_dtypes_are_refused(compute_dtype, error, message):
    with pytest.raises(error, match=message):
        jr.TrainState.create(mlp(), jr.sgd(0.1, backend="xla"), compute_dtype=compute_dtype)


def test_low_precision_params_are_kept_in_full_precision_between_steps(backend):
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    state = jr.TrainState.create(params, jr.sgd(1e-4, backend=backend))
    for _ in range(50):
        state = state.apply_gradients(params)
    # Each step alone is lost in bfloat16, 1 - 1e-4 = 1.
    assert state.params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(state.params["w"].astype(float), 0.99609375)
    np.testing.assert_allclose(state.weights[0][:16], 0.995, rtol=1e-5)


def test_float64_leaves_stay_float64_in_states_and_arithmetic(backend):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {
            "a": jnp.asarray(rng.normal(size=(5, 7))),
            "b": jnp.asarray(rng.normal(size=7), jnp.float32),
            "c": jnp.asarray(rng.normal(size=3)),
        }
        optimizer = jr.adamw(1e-2, b2=0.99999, weight_decay=0.1, mask=True, backend=backend)
        state = jr.TrainState.create(params, optimizer)
        assert [w.dtype for w in state.weights] == [jnp.float32, jnp.float64]
        assert state.floats.dtype == jnp.float64
        numbers = {"learning_rate": 1e-2, "b2": 0.99999, "weight_decay": 0.1}
        oracle = Oracle("adamw", jax.tree.leaves(params), **numbers)
        step = jax.jit(lambda s, g: s.apply_gradients(g), donate_argnums=0)
        for _ in range(5):
            grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
            state = step(state, grads)
            oracle.step(jax.tree.leaves(grads))
        new = state.params
        assert new["a"].dtype == jnp.float64
        for path, wanted in zip(params, oracle.weights, strict=True):
            rtol = 1e-5 if path == "b" else 1e-12
            np.testing.assert_allclose(new[path], wanted, rtol=rtol, atol=rtol / 10)
        assert step._cache_size() == 1


def test_float32_models_under_x64_stay_float32(backend):
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float32), mlp())
        schedule = optax.cosine_decay_schedule(1e-2, 10)
        state = jr.TrainState.create(params, jr.adamw(schedule, mask="weights", backend=backend))
        state, _ = jax.jit(train_step)(state, batch())
        assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}
        assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
