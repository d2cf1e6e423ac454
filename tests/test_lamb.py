"""LAMB: by hand, against float64, and against optax."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from followed import assert_follows_float64, assert_follows_optax
from states import make_step

import jaxrenaissance as jr


@pytest.mark.parametrize(
    "numbers",
    [{}, {"weight_decay": 0.1, "b1": 0.8, "b2": 0.95, "eps": 0.1, "eps_root": 0.01}],
    ids=["plain", "all numbers"],
)
def test_with_masks_true_it_is_optax(numbers, backend):
    ours = jr.lamb(0.01, mask=True, trust_ratio_mask=True, backend=backend, **numbers)
    assert_follows_optax(ours, optax.lamb(0.01, **numbers))


@pytest.mark.parametrize("max_ratio", [None, 1.5])
def test_a_hundred_steps_are_those_of_float64(max_ratio, backend):
    numbers = {"learning_rate": 0.02, "weight_decay": 0.1, "b1": 0.8, "b2": 0.95, "eps": 1e-3}
    masks = {"mask": "weights", "trust_ratio_mask": "weights"}
    ours = jr.lamb(max_ratio=max_ratio, backend=backend, **numbers, **masks)
    bound = {} if max_ratio is None else {"max_ratio": max_ratio}
    assert_follows_float64(ours, "lamb", **bound, **numbers)


def test_a_step_by_hand(backend):
    params = {"kernel": jnp.asarray([[3.0, 4.0]]), "bias": jnp.asarray([3.0, 4.0])}
    grads = {"kernel": jnp.asarray([[0.1, -7.0]]), "bias": jnp.asarray([0.1, -7.0])}
    optimizer = jr.lamb(
        0.1, eps=0.0, weight_decay=0.5, mask=True, trust_ratio_mask="weights", backend=backend
    )
    state = make_step()(jr.TrainState.create(params, optimizer), grads)
    # Adam's first step is the gradient's sign: u = (1, -1) + 0.5 w = (2.5, 1).
    ratio = 5 / np.sqrt(7.25)
    np.testing.assert_allclose(state.trust_ratios()["kernel"], ratio, rtol=1e-6)
    kernel = [[3 - 0.1 * ratio * 2.5, 4 - 0.1 * ratio]]
    np.testing.assert_allclose(state.params["kernel"], kernel, rtol=1e-6)
    np.testing.assert_allclose(state.params["bias"], [2.75, 3.9], rtol=1e-6)
