"""Lion: by hand, against float64, and against optax."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from followed import assert_follows_float64, assert_follows_optax
from states import make_step

import jaxrenaissance as jr


@pytest.mark.parametrize(
    "numbers", [{}, {"weight_decay": 0.1, "b1": 0.8, "b2": 0.9}], ids=["plain", "all numbers"]
)
def test_with_mask_true_it_is_optax(numbers, backend):
    ours = jr.lion(0.01, mask=True, backend=backend, **numbers)
    assert_follows_optax(ours, optax.lion(0.01, **numbers))


def test_a_hundred_steps_are_those_of_float64(backend):
    numbers = {"learning_rate": 0.01, "weight_decay": 0.1, "b1": 0.8, "b2": 0.95}
    ours = jr.lion(mask="weights", backend=backend, **numbers)
    assert_follows_float64(ours, "lion", **numbers)


def test_two_steps_by_hand(backend):
    params = {"w": jnp.asarray([1.0, 1.0, 1.0])}
    optimizer = jr.lion(0.125, b1=0.5, b2=0.75, weight_decay=0.0, backend=backend)
    state, step = jr.TrainState.create(params, optimizer), make_step()
    # A gradient that has always been zero moves nothing.
    state = step(state, {"w": jnp.asarray([4.0, -0.001, 0.0])})
    np.testing.assert_array_equal(state.params["w"], [0.875, 1.125, 1.0])
    # m = (1, -0.00025, 0): c = (0.5 - 1, …) turns against the momentum.
    state = step(state, {"w": jnp.asarray([-2.0, 0.0, 0.0])})
    np.testing.assert_array_equal(state.params["w"], [1.0, 1.25, 1.0])
    np.testing.assert_allclose(state.moments[0][0][:2], [0.75 - 0.5, -0.0001875], rtol=1e-6)
