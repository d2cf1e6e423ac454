"""An optimizer over many steps, beside optax's and beside float64."""

import jax
import numpy as np
import optax
from oracle import Oracle
from states import make_step, random_like

import jaxrenaissance as jr

STEPS = 100


def tree(rng: np.random.Generator) -> dict:
    """Weights, biases and norm scales, one of them without elements."""
    shapes = {
        "conv": {"kernel": (3, 3, 2, 4), "bias": (4,)},
        "dense": {"kernel": (7, 33), "bias": (33,)},
        "empty": (0, 3),
        "norm": {"scale": (33,), "bias": (33,)},
    }
    is_shape = {"is_leaf": lambda x: isinstance(x, tuple)}
    return jax.tree.map(lambda x: rng.normal(size=x).astype(np.float32), shapes, **is_shape)


def assert_close(got: object, wanted: object) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=4e-6)


def assert_follows_optax(optimizer: jr.Optimizer, theirs: optax.GradientTransformation):
    """In place, and under optax's own contract, from the same gradients."""
    rng = np.random.default_rng(0)
    params = tree(rng)
    state, step = jr.TrainState.create(params, optimizer), make_step()

    def updated(transformation):
        def update(params, state, grads):
            updates, state = transformation.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.jit(update), params, transformation.init(params)

    (other, wanted, their_state), (ours, got, our_state) = map(updated, (theirs, optimizer))
    for i in range(STEPS):
        grads = random_like(params, rng)
        state = step(state, grads)
        wanted, their_state = other(wanted, their_state, grads)
        if i < 10:
            got, our_state = ours(got, our_state, grads)
            assert_close(got, wanted)
    assert_close(state.params, wanted)


def assert_follows_float64(optimizer: jr.Optimizer, kind: str, **numbers: object):
    """With decay and trust ratios of the weights alone."""
    rng = np.random.default_rng(1)
    params = tree(rng)
    state, step = jr.TrainState.create(params, optimizer), make_step()
    weights = [leaf.region in jr.WEIGHTS for leaf in state.plan.leaves]
    assert 0 < sum(weights) < len(weights)
    oracle = Oracle(kind, jax.tree.leaves(params), decayed=weights, trusted=weights, **numbers)
    for i in range(STEPS):
        grads = random_like(params, rng)
        state = step(state, grads)
        oracle.step(jax.tree.leaves(grads))
        if state.spec.trust and i % 10 == 0:
            assert_close(list(state.trust_ratios().values()), oracle.ratios)
    assert_close(jax.tree.leaves(state.params), oracle.weights)
    assert step._cache_size() == 1
