"""Schedules and `optax.inject_hyperparams` around the factories, and what compiles again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_pairs import assert_close, follow, model
from states import count_compilations, random_like

import jaxrenaissance as jr

SCHEDULES = {
    "constant": optax.constant_schedule(0.05),
    "cosine with warmup": optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6, 0.01),
    "exponential": optax.exponential_decay(0.1, 2, 0.5, staircase=True),
    "linear": optax.linear_schedule(0.1, 0.0, 4),
    "one cycle": optax.cosine_onecycle_schedule(6, 0.1),
    "piecewise": optax.piecewise_constant_schedule(0.1, {2: 0.5, 4: 0.1}),
    "joined": optax.join_schedules([optax.constant_schedule(0.1), lambda count: 0.01], [3]),
    "own": lambda count: 0.1 / (1 + count),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_count_as_with_optax(name):
    rng = np.random.default_rng(0)
    params = model(rng)
    gradients = [random_like(params, rng) for _ in range(6)]
    ours, _ = follow(jr.sgd(SCHEDULES[name], 0.9), params, gradients)
    theirs, _ = follow(optax.sgd(SCHEDULES[name], 0.9), params, gradients)
    assert_close(ours, theirs)


def test_a_schedule_sees_zero_first_and_goes_on_from_the_count():
    params = {"w": jnp.zeros(1)}
    tx = jr.sgd(lambda count: 0.5**count)
    state, seen = tx.init(params), []
    for _ in range(3):
        updates, state = tx.update({"w": jnp.ones(1)}, state, params)
        seen.append(-float(updates["w"][0]))
    updates, _ = tx.update({"w": jnp.ones(1)}, state._replace(count=jnp.asarray(10)), params)
    assert [*seen, -float(updates["w"][0])] == [1.0, 0.5, 0.25, 0.5**10]


INJECTED = {
    "a number": {"learning_rate": 0.1},
    "a schedule": {"learning_rate": optax.linear_schedule(0.1, 0.01, 5)},
    "all": {
        "learning_rate": optax.exponential_decay(0.1, 3, 0.5),
        "weight_decay": lambda count: 0.1 * count,
        "b1": lambda count: 0.9 - 0.1 * count,
        "b2": 0.95,
        "eps": 1e-3,
    },
}


@pytest.mark.parametrize("name", INJECTED)
@pytest.mark.parametrize("chained", [False, True])
def test_inject_hyperparams_does_what_it_does_with_optax(name, chained):
    rng = np.random.default_rng(1)
    params = model(rng)
    gradients = [random_like(params, rng) for _ in range(5)]
    results = []
    for factory in jr.adamw, optax.adamw:
        # mask=True is optax's default; a function here, since optax.adamw takes no bool.
        every = lambda params: jax.tree.map(lambda x: True, params)  # noqa: E731
        make = optax.inject_hyperparams(factory, static_args="mask")
        tx = make(**{"mask": every, **INJECTED[name]})
        tx = optax.chain(optax.clip(1.0), tx) if chained else tx
        results.append(follow(tx, params, gradients))
    (got, state), (wanted, their_state) = results
    assert_close(got, wanted)
    hyperparams = [optax.tree.get(s, "hyperparams") for s in (state, their_state)]
    assert hyperparams[0].keys() == hyperparams[1].keys()
    assert_close(*hyperparams, rtol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_what_optax_does_not_inject_needs_no_params(name):
    # A weight_decay that is traced would need them.
    params = model(np.random.default_rng(2))
    ours, theirs = (optax.inject_hyperparams(getattr(lib, name))(0.1) for lib in (jr, optax))
    state = ours.init(params)
    assert state.hyperparams.keys() == theirs.init(params).hyperparams.keys()
    updates, _ = jax.jit(ours.update)(params, state)
    wanted, _ = theirs.update(params, theirs.init(params))
    assert_close(updates, wanted)


def test_other_injected_numbers_compile_nothing():
    params = {"w": jnp.ones((2, 3))}
    tx = optax.inject_hyperparams(jr.adamw)(learning_rate=0.1, mask=True)
    update, state = jax.jit(tx.update), tx.init(params)
    first, state = update(params, state, params)
    numbers = {name: 0.5 * x for name, x in state.hyperparams.items()}
    state = state._replace(hyperparams=numbers)
    with count_compilations() as compiled:
        second, _ = update(params, state, params)
    assert not compiled
    wanted = jr.adamw(0.05, 0.45, 0.4995, 5e-9, weight_decay=5e-5, mask=True)
    updates, _ = wanted.update(params, state.inner_state, params)
    assert_close(second, updates, rtol=1e-5)
    assert abs(first["w"] - second["w"]).min() > 0.01


def test_a_traced_number_and_optimizers_that_differ_in_numbers_share_a_program():
    params = {"w": jnp.ones((2, 3))}

    @jax.jit
    def update(rate, state, grads):
        return jr.sgd(rate).update(grads, state, params)[0]

    state = jr.sgd(0.1).init(params)
    np.testing.assert_allclose(update(0.1, state, params)["w"], -0.1, rtol=1e-6)
    with count_compilations() as compiled:
        np.testing.assert_allclose(update(0.25, state, params)["w"], -0.25)
        # Outside jit the numbers are operands.
        jr.sgd(0.1).update(params, state)
        before = len(compiled)
        updates, _ = jr.sgd(0.25).update(params, state)
    assert len(compiled) == before
    np.testing.assert_allclose(updates["w"], -0.25)
    assert update._cache_size() == 1


def test_an_equal_optimizer_made_again_compiles_nothing():
    params = {"w": jnp.ones((2, 3))}

    @jax.jit
    def update(tx, grads, state, params):
        return tx.update(grads, state, params)

    def make():
        return jr.adamw(optax.cosine_decay_schedule(0.1, 100), weight_decay=0.1, mask=True)

    _, state = update(make(), params, make().init(params), params)
    update(make(), params, state, params)
    assert update._cache_size() == 1


def test_inject_hyperparams_in_bfloat16_is_an_error_with_advice():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    with pytest.raises(
        ValueError, match=r"b1: a bfloat16 was rounded.*hyperparam_dtype=jnp.float32"
    ):
        optax.inject_hyperparams(jr.adamw)(1e-3).init(params)
    tx = optax.inject_hyperparams(jr.adamw, hyperparam_dtype=jnp.float32)(1e-3)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["w"].dtype == jnp.bfloat16
    # A number that is given as float32 stays so, and what has no β is fine as it is.
    tx = optax.inject_hyperparams(jr.sgd)(1e-3)
    assert tx.update(params, tx.init(params), params)[0]["w"].dtype == jnp.bfloat16
