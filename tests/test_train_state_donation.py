"""Donation and compiling: buffers are used again, and nothing compiles twice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from states import assert_buffers_equal, batch, count_compilations, loss_fn, mlp, train_step

import jaxrenaissance as jr


def test_without_donation_the_state_stays(backend):
    params = {"w": jnp.arange(32.0)}
    state = jr.TrainState.create(params, jr.adam(0.1, backend=backend), extra={"a": jnp.ones(3)})
    first = jax.tree.map(np.array, state)
    jax.jit(lambda s: s.apply_gradients(params))(state)
    assert_buffers_equal(state, first)


@pytest.mark.parametrize("disable_jit", [False, True])
def test_arrays_of_the_user_survive_donation(disable_jit, backend):
    # One leaf fills its arena exactly, so that the arena could be the leaf's own buffer.
    params = {"w": jnp.arange(32.0), "base": jnp.arange(8, dtype=jnp.int8)}
    extra = {"a": jnp.ones(3)}
    lr = jnp.float32(0.5)
    step = jax.jit(lambda s: s.apply_gradients(s.compute_params), donate_argnums=0)
    with jax.disable_jit(disable_jit):
        optimizer = jr.adam(lr, backend=backend)
        state = jr.TrainState.create(params, optimizer, extra=extra, trainable="w")
        read = {"params": state.params["w"], "compute": state.compute_params["w"]}
        read |= {"metric": state.metrics["learning_rate"]}
    read_values = jax.tree.map(np.array, read)
    new = step(state)
    assert state.weights[0].is_deleted()
    with jax.disable_jit(disable_jit):
        new = new.replace(params=params, extra=extra).replace_hyperparams(learning_rate=lr)
    step(new)
    assert_buffers_equal(read, read_values)
    np.testing.assert_array_equal(params["w"], np.arange(32.0))
    np.testing.assert_array_equal(params["base"], np.arange(8))
    np.testing.assert_array_equal(extra["a"], 1.0)
    assert float(lr) == 0.5


def test_buffers_of_a_donated_state_are_used_again(backend):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-3, mask="weights", backend=backend))
    step = jax.jit(train_step, donate_argnums=0)
    state, _ = step(state, batch())
    before = [x.unsafe_buffer_pointer() for x in (*state.weights, *state.moments[0])]
    state, _ = step(state, batch())
    after = [x.unsafe_buffer_pointer() for x in (*state.weights, *state.moments[0])]
    assert sorted(before) == sorted(after)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_norm": 1.0, "ema_decay": 0.9, "loss_scale": jr.DynamicLossScale()},
        {"accumulate": jr.Accumulate(2), "max_norm": 1.0, "ema_decay": 0.9},
        {"metrics": ["leaves", "param_norm", "update_norm"]},
        {"factory": jr.lars, "metrics": "update_norm"},
        {"factory": jr.lars, "accumulate": jr.Accumulate(2), "optax_form": True},
        {"factory": jr.lamb, "metrics": "update_norm"},
        {"factory": jr.lion},
    ],
)
def test_a_donated_step_of_a_nonlinear_model_copies_no_arena(options, backend):
    if backend == "xla":
        pytest.skip("plain jax.numpy slices and joins arenas")
    params = {f"layer{i}": mlp(i, width=17) for i in range(3)}
    schedule = optax.cosine_decay_schedule(1e-3, 10)
    factory, options = options.get("factory", jr.adamw), {**options}
    options.pop("factory", None)
    optimizer = factory(schedule, backend=backend, **options)
    state = jr.TrainState.create(params, optimizer, compute_dtype="bfloat16")

    def step(state, x):
        def loss(params):
            return sum(loss_fn(layer, x) for layer in params.values())

        return state.apply_gradients(jax.grad(loss)(state.compute_params))

    compiled = jax.jit(step, donate_argnums=0).lower(state, batch()).compile().as_text()
    size = state.plan.arenas[0].size
    assert f"f32[{size}]" in compiled
    copies = [line for line in compiled.splitlines() if " copy(" in line and f"[{size}]" in line]
    assert copies == []


def test_the_second_call_and_an_equal_optimizer_compile_nothing(backend):
    def run(lr):
        schedule = optax.cosine_decay_schedule(0.1, 100)
        optimizer = jr.adamw(lr, weight_decay=schedule, mask="weights", backend=backend)
        state = jr.TrainState.create(params, optimizer)
        for _ in range(2):
            state, _ = step(state, x)
        return state

    params, x, step = mlp(), batch(), jax.jit(train_step, donate_argnums=0)
    jax.block_until_ready(run(0.1))
    with count_compilations() as compiled:
        jax.block_until_ready([run(0.1), run(0.2)])
    assert compiled == []
