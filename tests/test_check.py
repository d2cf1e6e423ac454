"""check: what it raises on the host, and what it refuses."""

import jax
import jax.numpy as jnp
import pytest

import jaxrenaissance as jr


def test_check_names_the_call_and_the_first_bad_leaf(backend):
    params = {"z": {"kernel": jnp.ones((2, 2))}, "a": {"kernel": jnp.ones((2, 2))}}
    params["bias"] = jnp.ones(2)
    state = jr.TrainState.create(params, jr.sgd(0.1, backend=backend))
    state = state.apply_gradients(params)
    bad = {**params, "z": {"kernel": jnp.full((2, 2), jnp.nan)}}
    for _ in range(2):
        state = state.apply_gradients(bad)
    jr.check(state)
    jr.check(state, max_consecutive=2)
    with pytest.raises(FloatingPointError, match=r"last 2 calls.*In call 2 .*'z/kernel'"):
        jr.check(state, max_consecutive=1)
    state = state.apply_gradients(params)
    jr.check(state, max_consecutive=0)
    with pytest.raises(TypeError, match="check: the state is traced"):
        jax.jit(jr.check)(state)


def test_check_refuses_what_it_cannot_check():
    state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(0.1, skip_nonfinite=False))
    with pytest.raises(ValueError, match=r"check: .* skip_nonfinite=False, so no call looks for"):
        jr.check(state)
    with pytest.raises(TypeError, match="check: expected a TrainState, got a dict"):
        jr.check({"w": 1})


def test_check_looks_at_both_arenas_and_at_every_member(backend):
    with jax.enable_x64(True):
        params = {"a64": jnp.ones(3, jnp.float64), "b32": jnp.ones(2, jnp.float32)}
        state = jr.TrainState.create(params, jr.sgd(0.1, backend=backend))
        bad = {**params, "a64": params["a64"].at[2].set(jnp.nan)}
        with pytest.raises(FloatingPointError, match="'a64'"):
            jr.check(state.apply_gradients(bad), max_consecutive=0)
        bad = {**bad, "b32": params["b32"].at[0].set(jnp.inf)}
        with pytest.raises(FloatingPointError, match="'b32'"):
            jr.check(state.apply_gradients(bad), max_consecutive=0)

    def member(g):
        state = jr.TrainState.create({"a": jnp.ones(2)}, jr.sgd(0.1, backend=backend))
        return state.apply_gradients({"a": g})

    states = jax.vmap(member)(jnp.asarray([[1, 1], [jnp.nan, 1], [1, 1]]))
    with pytest.raises(FloatingPointError, match=r"member 1: the last 1 calls.*'a'"):
        jr.check(states, max_consecutive=0)


def test_check_counts_cycles_and_tells_the_loss_scale(backend):
    optimizer = jr.sgd(
        0.1,
        accumulate=jr.Accumulate(2),
        loss_scale=jr.DynamicLossScale(initial=8),
        backend=backend,
    )
    params = {"a": jnp.ones(2)}
    state = jr.TrainState.create(params, optimizer)
    for value in (jnp.nan, 1.0, 1.0, jnp.inf):
        state = state.apply_gradients({"a": jnp.full(2, value)})
    pattern = r"the last 2 cycles of accumulation .* call 3 .*'a'.* The loss scale is 2$"
    with pytest.raises(FloatingPointError, match=pattern):
        jr.check(state, max_consecutive=1)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    with pytest.raises(FloatingPointError, match=r"member 0: .* The loss scale is 2$"):
        jr.check(states, max_consecutive=1)
