"""LARS: by hand, against float64, and against optax."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from followed import assert_follows_float64, assert_follows_optax
from states import make_step

import jaxrenaissance as jr

ALL = {"weight_decay_mask": True, "trust_ratio_mask": True}
WEIGHTS = {"weight_decay_mask": "weights", "trust_ratio_mask": "weights"}


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"weight_decay": 0.1, "trust_coefficient": 0.02, "eps": 0.1},
        {"weight_decay": 0.1, "nesterov": True, "momentum": 0.5},
    ],
    ids=["plain", "decay", "nesterov"],
)
def test_in_its_form_it_is_optax(numbers, backend):
    ours = jr.lars(0.5, optax_form=True, backend=backend, **ALL, **numbers)
    assert_follows_optax(ours, optax.lars(0.5, **numbers))


def test_with_masks_it_is_optax_with_masks(backend):
    # Leaves without a ratio have the learning rate in their momentum, too.
    def weights(params):
        return {
            "conv": {"kernel": True, "bias": False},
            "dense": {"kernel": True, "bias": False},
            "empty": True,
            "norm": {"scale": False, "bias": False},
        }

    ours = jr.lars(0.1, 0.05, optax_form=True, backend=backend, **WEIGHTS)
    theirs = optax.lars(0.1, 0.05, weight_decay_mask=weights, trust_ratio_mask=weights)
    assert_follows_optax(ours, theirs)


@pytest.mark.parametrize("optax_form", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_hundred_steps_are_those_of_float64(nesterov, optax_form, backend):
    numbers = {"learning_rate": 0.5, "weight_decay": 0.1, "trust_coefficient": 0.05, "eps": 0.2}
    form = {"optax_form": optax_form}
    ours = jr.lars(nesterov=nesterov, max_ratio=0.04, backend=backend, **numbers, **WEIGHTS, **form)
    kind = "lars_nesterov" if nesterov else "lars"
    assert_follows_float64(ours, kind, max_ratio=0.04, **numbers, **form)


def test_two_steps_by_hand(backend):
    params = {"kernel": jnp.asarray([[3.0, 4.0]]), "bias": jnp.asarray([1.0])}
    grads = {"kernel": jnp.asarray([[0.6, 0.8]]), "bias": jnp.asarray([0.5])}
    optimizer = jr.lars(
        0.5, 0.2, trust_coefficient=0.2, momentum=0.5, eps=3.0, backend=backend, **WEIGHTS
    )
    state, step = jr.TrainState.create(params, optimizer), make_step()
    # ‖w‖ = 5, ‖g‖ = 1: r = 0.2 * 5 / (1 + 0.2 * 5 + 3) = 0.2, and g + 0.2 w = 2 (0.6, 0.8).
    state = step(state, grads)
    np.testing.assert_allclose(state.trust_ratios()["kernel"], 0.2, rtol=1e-6)
    # The momentum is 0.5 * 0.2 * 2 (0.6, 0.8), of norm 0.2; the bias's is the gradient.
    np.testing.assert_allclose(state.params["kernel"], [[2.88, 3.84]], rtol=1e-6)
    np.testing.assert_allclose(state.params["bias"], [0.75], rtol=1e-6)
    # With another learning rate the momentum is what it was. ‖w‖ = 4.8:
    # r = 0.2 * 4.8 / (1 + 0.96 + 3), and g + 0.2 w = 1.96 (0.6, 0.8).
    state = step(state.replace_hyperparams(learning_rate=0.1), grads)
    ratio = 0.96 / 4.96
    np.testing.assert_allclose(state.trust_ratios()["kernel"], ratio, rtol=1e-6)
    moved = 0.5 * 0.2 + 0.1 * ratio * 1.96
    kernel = (4.8 - moved) * np.asarray([[0.6, 0.8]])
    np.testing.assert_allclose(state.params["kernel"], kernel, rtol=1e-6)
    np.testing.assert_allclose(state.params["bias"], [0.75 - 0.1 * 0.75], rtol=1e-6)


def test_its_numbers_follow_schedules_groups_and_replacement(backend):
    params = {"a": {"kernel": jnp.full((2, 2), 2.0)}, "b": {"kernel": jnp.full((2, 2), 2.0)}}
    grads = {"a": {"kernel": jnp.ones((2, 2))}, "b": {"kernel": jnp.ones((2, 2))}}
    optimizer = jr.lars(
        0.1,
        trust_coefficient=lambda count: 0.1 * (1 + count),
        groups=[jr.Group("b/*", name="b", trust_coefficient=0.4)],
        backend=backend,
        **WEIGHTS,
    )
    state, step = jr.TrainState.create(params, optimizer), make_step()
    for wanted in {"a": 0.2, "b": 0.8}, {"a": 0.4, "b": 0.8}:
        # Of weights that have moved a little, along the gradients.
        norms = {k: float(x["kernel"][0, 0]) / 2 for k, x in state.params.items()}
        state = step(state, grads)
        for key, ratio in wanted.items():
            got = state.trust_ratios()[f"{key}/kernel"]
            np.testing.assert_allclose(got, ratio * norms[key], rtol=1e-5)
    state = state.replace_hyperparams(max_ratio=0.05)
    assert {round(float(x), 6) for x in step(state, grads).trust_ratios().values()} == {0.05}
    state = state.replace_hyperparams(min_norm=100.0)
    assert all(x == 1 for x in step(state, grads).trust_ratios().values())
    assert step._cache_size() == 1
