"""Updates have the dtypes that optax gives; arithmetic and moments are float32 or float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_pairs import PAIRS, assert_close, model
from states import random_like

import jaxrenaissance as jr

DTYPES = ("bfloat16", "float16", "float32", "float64")
# Of every kind that treats dtypes in a way of its own; a gradient wider than the arena is an error.
NAMES = ("sgd", "sgd_l2", "momentum", "adam", "adamw", "lars", "lamb", "lion")


@pytest.mark.parametrize("name", NAMES)
def test_updates_have_the_dtypes_that_optax_gives(name):
    ours, theirs = (make(0.1) for make in PAIRS[name])
    with jax.enable_x64(True):
        for wide, narrow in itertools.product(DTYPES, DTYPES):
            if narrow == "float64" and wide != "float64":
                continue
            params = {"kernel": jnp.ones((2, 3), wide), "bias": jnp.ones(3, wide)}
            grads = jax.tree.map(lambda x, narrow=narrow: x.astype(narrow), params)

            def dtypes(tx, params=params, grads=grads):
                def run(params, grads):
                    return tx.update(grads, tx.init(params), params)[0]

                return jax.tree.map(lambda x: x.dtype, jax.eval_shape(run, params, grads))

            assert dtypes(ours) == dtypes(theirs), (wide, narrow)


def test_mixed_dtypes_in_one_tree_each_have_their_own(backend):
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3), "c": jnp.ones(3, jnp.float16)}
    grads = {"a": jnp.ones(3), "b": jnp.ones(3, jnp.float16), "c": jnp.ones(3, jnp.float16)}
    tx = jr.adam(0.1, backend=backend)
    updates, state = tx.update(grads, tx.init(params), params)
    wanted = {"a": jnp.float32, "b": jnp.float32, "c": jnp.float16}
    assert jax.tree.map(lambda x: x.dtype, updates) == wanted
    assert {x.dtype for x in (*state.mu, *state.nu)} == {jnp.dtype("float32")}
    jax.tree.map(lambda x: np.testing.assert_allclose(x.astype("float32"), -0.1, 1e-2), updates)


def test_without_params_the_gradients_dtypes_stand_for_theirs():
    grads = {"w": jnp.ones(3, jnp.bfloat16)}
    tx = jr.adam(0.1)
    updates, _ = tx.update(grads, tx.init({"w": jnp.ones(3)}))
    assert updates["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_float64_model_stays_float64(name, backend):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = model(rng, jnp.float64)
        ours, theirs = PAIRS[name].ours(0.1, backend=backend), PAIRS[name].theirs(0.1)
        state, their_state = ours.init(params), theirs.init(params)
        assert state.mu[0].dtype == jnp.float64
        for _ in range(2):
            grads = random_like(params, rng)
            updates, state = ours.update(grads, state, params)
            wanted, their_state = theirs.update(grads, their_state, params)
            assert_close(updates, wanted, rtol=1e-12, atol=1e-14)


def test_float32_and_float64_leaves_have_an_arena_each():
    with jax.enable_x64(True):
        params = {"a": jnp.ones(3, jnp.float64), "b": jnp.ones(3, jnp.float32)}
        tx = jr.adam(0.1)
        state = tx.init(params)
        updates, after = tx.update(params, state, params)
        assert [x.dtype for x in state.mu] == [x.dtype for x in after.mu] == ["float32", "float64"]
        assert {path: x.dtype for path, x in updates.items()} == {"a": "float64", "b": "float32"}


def test_bfloat16_models_are_updated_as_float32_ones_and_rounded_once():
    rng = np.random.default_rng(1)
    params = model(rng, jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    ours, theirs = (make(0.01) for make in PAIRS["adamw"])
    state, their_state = ours.init(params), theirs.init(wide)
    for _ in range(3):
        grads = random_like(params, rng)
        updates, state = ours.update(grads, state, params)
        wide_grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        wanted, their_state = theirs.update(wide_grads, their_state, wide)
        assert_close(
            updates, jax.tree.map(lambda x: x.astype(jnp.bfloat16), wanted), rtol=2**-7, atol=1e-7
        )


@pytest.mark.parametrize(
    "context", [lambda: jax.numpy_dtype_promotion("strict"), jax.disable_jit], ids=["strict", "jit"]
)
def test_strict_promotion_and_disabled_jit_change_nothing(context):
    rng = np.random.default_rng(2)
    params = model(rng)
    grads = random_like(params, rng)
    tx = jr.adamw(optax.linear_schedule(0.1, 0.2, 10), weight_decay=0.1, mask=True)
    wanted = tx.update(grads, tx.init(params), params)
    with context():
        assert_close(tx.update(grads, tx.init(params), params), wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"w": jnp.ones(3, jnp.int32)}, "'w' has dtype int32, wanted float32 or bfloat16 or"),
        ({"w": jnp.ones(4)}, r"'w' has shape \(4,\), wanted \(3,\)"),
        ({}, "'w' is missing"),
        ({"w": None}, "'w' is missing"),
        ({"w": jnp.ones(3), "x": jnp.ones(3)}, "'x' is not a leaf"),
    ],
)
def test_gradients_that_do_not_fit_are_named(grads, message):
    params = {"w": jnp.ones(3)}
    tx = jr.adam(0.1)
    state = tx.init(params)
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=f"^updates: .*{message}"):
            update(grads, state, params)


def test_gradients_wider_than_the_arena_are_named():
    with jax.enable_x64(True):
        params = {"w": jnp.ones(3, jnp.float32)}
        tx = jr.adam(0.1)
        with pytest.raises(ValueError, match=r"^updates: 'w' has dtype float64, wanted float32"):
            tx.update({"w": jnp.ones(3, jnp.float64)}, tx.init(params), params)


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        (jnp.ones(3, jnp.int32), "has dtype int32"),
        (jnp.tanh, "is a"),
        (1.0, "is a float"),
        (jax.random.key(0), "has dtype key"),
    ],
)
def test_leaves_that_no_arena_holds_are_named_with_advice(leaf, what):
    params = {"layer": {"w": jnp.ones(3), "other": leaf}}
    message = f"^params: the leaf 'layer/other' {what}.*optax.masked or .*eqx.filter"
    with pytest.raises(ValueError, match=message):
        jr.adam(0.1).init(params)
    tx = optax.masked(jr.adam(0.1), {"layer": {"w": True, "other": False}})
    assert len(jax.tree.leaves(tx.init(params))) == 3
