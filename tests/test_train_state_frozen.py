"""Leaves that are not trained: kept as they are, merged, and never differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from states import assert_trees_equal, lora

import jaxrenaissance as jr


@pytest.mark.parametrize(
    "trainable",
    [
        "lora/*",
        ["lora/a", "*/b"],
        lambda path, leaf: path.startswith("lora") and leaf.dtype == jnp.float32,
        {"base": False, "half": False, "lora": True},
    ],
)
def test_leaves_not_trained_keep_their_bits_and_have_no_state(trainable, backend):
    params = lora()
    state = jr.TrainState.create(params, jr.adam(0.1, backend=backend), trainable=trainable)
    assert state.plan.num_parameters == 5
    assert len(state.frozen) == 3
    assert_trees_equal(state.params["lora"], params["lora"])
    assert state.params["base"]["key"] == params["base"]["key"]

    def loss(trained):
        merged = state.merge(trained)
        w = merged["base"]["kernel"] + merged["lora"]["a"] @ merged["lora"]["b"]
        return jnp.sum(w * merged["half"].astype(jnp.float32))

    trained = state.trainable_params
    assert trained["base"] == {"kernel": None, "key": None}
    grads = jax.grad(loss)(trained)
    new = jax.jit(lambda s, g: s.apply_gradients(g), donate_argnums=0)(state, grads)
    # Donated, and still there: the state had copies.
    np.testing.assert_array_equal(params["base"]["kernel"], np.arange(6).reshape(2, 3))
    after = new.params
    np.testing.assert_array_equal(after["base"]["kernel"], params["base"]["kernel"])
    np.testing.assert_array_equal(after["half"], params["half"])
    assert after["base"]["kernel"].dtype == jnp.int8
    assert jax.random.key_data(after["base"]["key"]).tolist() == [0, 3]
    np.testing.assert_allclose(after["lora"]["a"], 0.9, rtol=1e-6)


def test_gradients_of_leaves_not_trained_are_ignored_whatever_they_are(backend):
    params = lora()
    state = jr.TrainState.create(params, jr.sgd(1.0, backend=backend), trainable="lora/*")
    nan = {"kernel": np.zeros((2, 3), jax.dtypes.float0), "key": "nothing"}
    grads = [
        {"base": nan, "half": jnp.full(3, jnp.nan), "lora": params["lora"]},
        {"base": {"kernel": (), "key": 0}, "half": {"sub": [1, 2]}, "lora": params["lora"]},
        {"base": {"kernel": None, "key": None}, "half": None, "lora": params["lora"]},
    ]
    for tree in grads:
        new = state.apply_gradients(tree)
        np.testing.assert_array_equal(new.params["lora"]["b"], 0.0)
    with pytest.raises(ValueError, match="'lora/b' is missing"):
        state.apply_gradients({**grads[2], "lora": {"a": params["lora"]["a"]}})
    with pytest.raises(ValueError, match="not trained must be there, with None or anything"):
        state.apply_gradients({"lora": params["lora"]})
    with pytest.raises(ValueError, match="grads: 'lora/b' is None, wanted an array"):
        state.apply_gradients({**grads[2], "lora": {"a": params["lora"]["a"], "b": None}})


def test_gradients_of_a_frozen_base_are_not_computed(backend):
    params = {"base": jnp.ones((64, 64)), "head": {"kernel": jnp.ones((64, 1))}}
    state = jr.TrainState.create(params, jr.sgd(0.1, backend=backend), trainable="head/*")

    def loss(p, x):
        return jnp.sum(x @ p["base"] @ p["head"]["kernel"])

    def step(state, x):
        return state.apply_gradients(jax.grad(loss)(state.compute_params, x))

    text = jax.jit(step).lower(state, jnp.ones((8, 64))).compile().as_text()
    assert "f32[64,64]" in text
    # x @ base and its use by the head's gradient; nothing of shape (64, 64) is made.
    made = [line for line in text.splitlines() if "= f32[64,64]" in line]
    moved = (" parameter(", " copy(", " get-tuple-element(")
    assert all(any(op in line for op in moved) for line in made), made


def test_replace_params_replaces_leaves_that_are_not_trained_or_keeps_them(backend):
    params = lora()
    state = jr.TrainState.create(params, jr.sgd(0.1, backend=backend), trainable="lora/*")
    new = state.replace(params={**params, "half": jnp.ones(3, jnp.bfloat16)})
    np.testing.assert_array_equal(new.params["half"], jnp.ones(3))
    kept = new.replace(params=new.trainable_params)
    np.testing.assert_array_equal(kept.params["half"], jnp.ones(3))
    with pytest.raises(ValueError, match=r"params: 'half' has shape \(2,\).*wanted \(3,\)"):
        state.replace(params={**params, "half": jnp.ones(2, jnp.bfloat16)})


def test_frozen_leaves_read_from_a_state_survive_its_donation(backend):
    params = {"base": jnp.full(3, 2.0), "head": jnp.ones(2)}
    state = jr.TrainState.create(params, jr.sgd(0.1, backend=backend), trainable="head")
    read = [state.params, state.compute_params, state.merge(state.trainable_params)]
    jax.jit(lambda s: s.apply_gradients(s.compute_params), donate_argnums=0)(state)
    for tree in read:
        np.testing.assert_array_equal(tree["base"], 2.0)
