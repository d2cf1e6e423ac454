"""Inside optax's combinations: the same as optax's own optimizer in the same place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_pairs import PAIRS, assert_close, follow, model
from states import random_like

import jaxrenaissance as jr

LABELS = {"dense": {"kernel": "some", "bias": "some"}, "scale": "others"}
MASK = {"dense": {"kernel": True, "bias": True}, "scale": False}
SCHEDULE = optax.linear_schedule(0.1, 0.02, 5)

# Name → function of a factory (learning rate → optimizer) to what stands around it.
COMBINATIONS = {
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(1.0), make(0.1)),
    "chain, something after": lambda make: optax.chain(
        make(0.1), optax.scale_by_schedule(SCHEDULE)
    ),
    "named_chain": lambda make: optax.named_chain(("clip", optax.clip(0.5)), ("adamw", make(0.1))),
    "partition": lambda make: optax.partition(
        {"some": make(0.1), "others": optax.set_to_zero()}, LABELS
    ),
    "multi_transform": lambda make: optax.multi_transform(
        {"some": make(0.1), "others": make(0.02), "nobody": make(1.0)}, lambda params: LABELS
    ),
    "masked": lambda make: optax.masked(make(0.1), MASK),
    "MultiSteps": lambda make: optax.MultiSteps(make(0.1), 2),
    "MultiSteps in a chain": lambda make: optax.chain(
        optax.MultiSteps(make(0.1), 3).gradient_transformation()
    ),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(0.1), 3),
    "with_extra_args_support": lambda make: optax.with_extra_args_support(make(0.1)),
    "conditionally_transform": lambda make: optax.conditionally_transform(
        make(0.1), lambda step, **extra: step < 3
    ),
    "flatten": lambda make: optax.flatten(make(0.1)),
    "selective": lambda make: optax.selective_transform(
        make(0.1), freeze_mask=jax.tree.map(lambda x: not x, MASK)
    ),
    "a schedule": lambda make: make(SCHEDULE),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination_does_what_it_does_with_optax(name):
    rng = np.random.default_rng(0)
    params = model(rng)
    gradients = [random_like(params, rng) for _ in range(6)]
    ours, theirs = (COMBINATIONS[name](make) for make in PAIRS["adamw"])
    got, state = follow(ours, params, gradients)
    wanted, their_state = follow(theirs, params, gradients)
    assert_close(got, wanted)

    counts = optax.tree.get_all_with_path(their_state, "count")
    if counts:
        own = [int(count) for _, count in optax.tree.get_all_with_path(state, "count")]
        # A schedule of optax's is a transformation that counts, too.
        assert set(own) == {int(count) for _, count in counts}
    if name != "flatten":  # Which finds no array in the empty tree, with optax's either.
        same = optax.tree_map_params(ours, lambda x: x, state)
        jax.tree.map(np.testing.assert_array_equal, same, state)


@pytest.mark.parametrize("chained", [False, True])
def test_count_is_found_in_the_state(chained):
    tx = optax.chain(optax.clip(1.0), jr.adam(0.1)) if chained else jr.adam(0.1)
    params = model(np.random.default_rng(0))
    _, state = follow(tx, params, [params] * 3)
    assert int(optax.tree.get(state, "count")) == 3
    state = optax.tree.set(state, count=jnp.asarray(7, jnp.int32))
    assert int(optax.tree.get(state, "count")) == 7


def test_tree_map_params_takes_arenas_for_something_else_than_parameters():
    params = model(np.random.default_rng(0))
    tx = optax.chain(optax.trace(0.9), jr.adamw(0.1, mask=True))
    specs = jax.tree.map(lambda x: f"of {x.ndim} axes", params)
    trace, own = optax.tree_map_params(
        tx, lambda _, spec: spec, tx.init(params), specs, transform_non_params=lambda x: x.shape
    )
    assert trace.trace == specs
    (size,) = tx.init(params)[1].mu[0].shape
    assert (own.count, own.mu, own.nu) == ((), ((size,),), ((size,),))


@pytest.mark.parametrize("factory", [jr.sgd, jr.adam, jr.lion])
def test_an_empty_tree_has_a_state_like_others_and_counts(factory):
    tx = factory(0.1)
    empty, full = tx.init({}), tx.init({"w": jnp.ones(3)})
    assert jax.tree.structure(empty) == jax.tree.structure(full)
    updates, state = jax.jit(tx.update)({}, empty, {})
    assert updates == {}
    assert int(state.count) == 1
    assert jax.tree.structure(state) == jax.tree.structure(empty)


def test_lookahead_moves_fast_and_slow_parameters_as_with_optax():
    rng = np.random.default_rng(1)
    params = optax.LookaheadParams.init_synced(model(rng))
    gradients = [random_like(params.fast, rng) for _ in range(5)]
    ours, theirs = (optax.lookahead(make(0.1), 2, 0.5) for make in PAIRS["adamw"])
    got, _ = follow(ours, params, gradients)
    wanted, _ = follow(theirs, params, gradients)
    assert_close(got, wanted)


def test_apply_if_finite_skips_and_counts_as_with_optax():
    rng = np.random.default_rng(2)
    params = model(rng)
    gradients = [random_like(params, rng) for _ in range(4)]
    gradients[1]["scale"] = gradients[1]["scale"].at[3].set(jnp.inf)
    ours, theirs = (optax.apply_if_finite(make(0.1), 5) for make in PAIRS["adamw"])
    got, state = follow(ours, params, gradients)
    wanted, _ = follow(theirs, params, gradients)
    assert_close(got, wanted)
    assert (int(state.total_notfinite), int(state.inner_state.count)) == (1, 3)


def test_updates_of_masked_leaves_pass_through(backend):
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2), jnp.bfloat16)}
    tx = optax.masked(jr.adam(0.1, backend=backend), {"a": True, "b": False})
    updates, _ = tx.update(params, tx.init(params))
    np.testing.assert_allclose(updates["a"], -0.1, rtol=1e-5)
    assert updates["b"].dtype == jnp.bfloat16
    assert (updates["b"] == 1).all()


def test_extra_arguments_are_for_others():
    params = model(np.random.default_rng(0))
    tx = optax.chain(jr.adam(0.1), optax.contrib.reduce_on_plateau(patience=1))
    theirs = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1))
    got, _ = follow(tx, params, [params] * 3, value=jnp.asarray(1.0))
    wanted, _ = follow(theirs, params, [params] * 3, value=jnp.asarray(1.0))
    assert_close(got, wanted)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "lamb"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_multi_steps_of_mixed_precision_have_stable_types(name, dtypes):
    params, grads = (model(np.random.default_rng(0), dtype) for dtype in dtypes)

    def run(tx):
        def body(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), updates

        return jax.lax.scan(body, (params, tx.init(params)), length=4)

    ours, theirs = (
        jax.eval_shape(lambda make=make: run(optax.MultiSteps(make(0.1), 2)))
        for make in PAIRS[name]
    )
    assert ours[0][0] == theirs[0][0]
    assert ours[1] == theirs[1]
