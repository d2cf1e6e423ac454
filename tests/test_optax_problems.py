"""The small problems that optax's optimizers have to solve, for ours: both ways, in one program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrenaissance as jr

_LARS = {"weight_decay_mask": True, "trust_ratio_mask": True, "optax_form": True}
OPTIMIZERS = {
    "sgd": lambda: jr.sgd(1e-3),
    "momentum": lambda: jr.sgd(1e-3, 0.9),
    "nesterov": lambda: jr.sgd(1e-3, 0.9, True),
    "adam": lambda: jr.adam(1e-1),
    "adamw": lambda: jr.adamw(1e-1, mask=True),
    "lars": lambda: jr.lars(1.0, **_LARS),
    "lamb": lambda: jr.lamb(1e-3, mask=True, trust_ratio_mask=True),
    "lion": lambda: jr.lion(optax.exponential_decay(1e-2, 1000, 0.5), weight_decay=1e-4, mask=True),
}


def parabola(x):
    return jnp.sum((x - jnp.asarray([1.0, -1.0, 1.0], x.dtype)) ** 2)


def rosenbrock(x):
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


# Name → (function, where to start, where its minimum is).
TARGETS = {
    "parabola": (parabola, [-1.0, 10.0, 1.0], [1.0, -1.0, 1.0]),
    "rosenbrock": (rosenbrock, [0.0, 0.0], [1.0, 1.0]),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_finds_the_minimum(name, target, dtype):
    function, start, minimum = TARGETS[target]
    optimizer = OPTIMIZERS[name]()
    steps = 20_000 if (name, target) == ("sgd", "rosenbrock") else 10_000

    def step(_, carry):
        params, state, train_state = carry
        updates, state = optimizer.update(jax.grad(function)(params), state, params)
        train_state = train_state.apply_gradients(jax.grad(function)(train_state.params))
        return optax.apply_updates(params, updates), state, train_state

    @jax.jit
    def run(params):
        carry = params, optimizer.init(params), jr.TrainState.create(params, optimizer)
        params, state, train_state = jax.lax.fori_loop(0, steps, step, carry)
        return params, state.count, train_state.params

    with jax.enable_x64(dtype == "float64"):
        by_updates, count, in_place = run(jnp.asarray(start, dtype))
    assert by_updates.dtype == in_place.dtype == dtype
    assert count == steps
    # As near as optax's own tests want them.
    np.testing.assert_allclose(by_updates, minimum, rtol=3e-2, atol=3e-2)
    np.testing.assert_allclose(in_place, minimum, rtol=3e-2, atol=3e-2)
