"""With masks of True the results are optax's, for every optimizer: in place and as updates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from optax_pairs import PAIRS, assert_close, follow, model
from states import make_step, random_like

import jaxrenaissance as jr

# LARS, LAMB and Lion follow optax in files of their own. XLA takes its time to compile, and its
# updates follow float64 elsewhere.
FOLLOWED = [name for name in PAIRS if not name.startswith(("lars", "lamb", "lion"))]
CASES = [
    *(("xla", name) for name in ("nesterov_l2", "adamw")),
    *(pytest.param("cpu", name, marks=pytest.mark.native) for name in FOLLOWED),
    *(pytest.param("cuda", name, marks=[pytest.mark.native, pytest.mark.gpu]) for name in FOLLOWED),
]


@pytest.mark.parametrize(("backend", "name"), CASES, indirect=["backend"])
def test_mask_true_is_optax_over_fifty_steps(name, backend):
    rng = np.random.default_rng(1)
    params = model(rng)
    gradients = [random_like(params, rng) for _ in range(50)]
    rate = 1e-2
    optimizer, theirs = PAIRS[name].ours(rate, backend=backend), PAIRS[name].theirs(rate)

    wanted, _ = follow(theirs, params, gradients)
    state, step = jr.TrainState.create(params, optimizer), make_step()
    for grads in gradients:
        state = step(state, grads)
    assert_close(state.params, wanted)
    got, contract = follow(optimizer, params, gradients)
    assert_close(got, wanted)
    assert int(contract.count) == int(state.step) == 50


@pytest.mark.parametrize("name", PAIRS)
def test_updates_are_those_of_optax(name):
    rng = np.random.default_rng(2)
    params = model(rng)
    ours, theirs = PAIRS[name].ours(0.1), PAIRS[name].theirs(0.1)
    state, their_state = jax.jit(ours.init)(params), theirs.init(params)
    for _ in range(3):
        grads = random_like(params, rng)
        updates, state = ours.update(grads, state, params)
        wanted, their_state = theirs.update(grads, their_state, params)
        # Where an update is the difference of two weights, it has their last bit.
        assert_close(updates, wanted, rtol=1e-5, atol=5e-7)


@pytest.mark.parametrize("name", ["momentum", "adam", "lion"])
def test_without_decay_they_need_no_params(name):
    rng = np.random.default_rng(3)
    params = model(rng)
    if name == "lion":
        ours, theirs = jr.lion(0.1, weight_decay=0.0), optax.lion(0.1, weight_decay=0.0)
    else:
        ours, theirs = PAIRS[name].ours(0.1), PAIRS[name].theirs(0.1)
    grads = random_like(params, rng)
    updates, _ = ours.update(grads, ours.init(params))
    # optax's Lion looks at the parameters anyway, to multiply them with zero.
    wanted, _ = theirs.update(grads, theirs.init(params), params)
    assert_close(updates, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: jr.adamw(0.1, mask=True), "weight decay needs"),
        (lambda: jr.lars(0.1, trust_ratio_mask=True), "trust ratios need"),
        (lambda: jr.lamb(0.1, trust_ratio_mask=True), "trust ratios need"),
    ],
)
def test_what_looks_at_the_weights_needs_params(factory, message):
    tx, params = factory(), {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match=f"^params: {message} them"):
        tx.update(params, tx.init(params))


def test_a_skipped_step_has_zero_updates_and_the_state_as_it_was(backend):
    tx = jr.adamw(0.1, weight_decay=0.1, mask=True, backend=backend)
    params = {"w": jnp.ones(3), "x": jnp.ones((2, 2))}
    _, before = tx.update(params, tx.init(params), params)
    updates, after = tx.update({**params, "w": jnp.asarray([1, np.nan, 1])}, before, params)
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), updates)
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("mask", [None, "weights"])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_without_a_mask_it_is_optax_with_one_that_leaves_biases_and_scales_alone(name, mask):
    rng = np.random.default_rng(4)
    params = model(rng)
    gradients = [random_like(params, rng) for _ in range(3)]
    kernels = {"dense": {"kernel": True, "bias": False}, "scale": False}
    got, _ = follow(getattr(jr, name)(0.1, weight_decay=0.3, mask=mask), params, gradients)
    wanted, _ = follow(getattr(optax, name)(0.1, weight_decay=0.3, mask=kernels), params, gradients)
    assert_close(got, wanted)


class Pair(NamedTuple):
    first: Any
    second: Any


TREES = {
    "one leaf": lambda x: x,
    "one scalar": lambda x: x[0, 0],
    "a list": lambda x: [x, x[0], [x[:0], x[1:]]],
    "a tuple with None": lambda x: (None, x, (), x[1]),
    "a NamedTuple": lambda x: Pair(x, Pair(x[0], None)),
    "a FrozenDict": lambda x: FrozenDict({"a": {"kernel": x, "bias": x[0]}, "b": {}}),
    "repeated names": lambda x: {"a": {"w": x}, "b": {"w": x[0]}, "w": x[1]},
}


@pytest.mark.parametrize("name", TREES)
def test_trees_of_all_kinds_are_updated_as_with_optax(name):
    rng = np.random.default_rng(5)
    params = TREES[name](jnp.asarray(rng.normal(size=(4, 5)), jnp.float32))
    gradients = [random_like(params, rng) for _ in range(2)]
    ours, theirs = (follow(make(0.1), params, gradients)[0] for make in PAIRS["adamw"])
    assert_close(ours, theirs)
