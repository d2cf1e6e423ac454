"""Runs of optax and their like here, for the tests that switch from one to the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrenaissance as jr

RATE = optax.linear_schedule(0.1, 0.02, 6)
BOTH = {"weight_decay_mask": True, "trust_ratio_mask": True}
LARS = {"weight_decay": 0.1, "trust_coefficient": 0.1}
KERNELS = {"layer": {"kernel": True, "bias": False}, "head": True}
LABELS = {"layer": "slow", "head": "fast"}

# name → (optax's, ours): the same updates, as far as float32 shows.
PAIRS = {
    "sgd": (optax.sgd(0.1), jr.sgd(0.1)),
    "momentum": (optax.sgd(0.1, momentum=0.9), jr.sgd(0.1, momentum=0.9)),
    "nesterov": (
        optax.sgd(RATE, momentum=0.9, nesterov=True),
        jr.sgd(RATE, momentum=0.9, nesterov=True),
    ),
    "adam": (optax.adam(0.1), jr.adam(0.1)),
    "adamw": (optax.adamw(RATE, weight_decay=0.1), jr.adamw(RATE, weight_decay=0.1, mask=True)),
    "lamb": (
        optax.lamb(0.1, weight_decay=0.1),
        jr.lamb(0.1, weight_decay=0.1, mask=True, trust_ratio_mask=True),
    ),
    "lion": (optax.lion(0.01), jr.lion(0.01, mask=True)),
    "lars": (optax.lars(0.1, **LARS), jr.lars(0.1, **LARS, **BOTH, optax_form=True)),
    "lars nesterov": (
        optax.lars(0.1, **LARS, nesterov=True),
        jr.lars(0.1, **LARS, **BOTH, optax_form=True, nesterov=True),
    ),
    "chain": (
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(),
            optax.add_decayed_weights(0.1, mask=KERNELS),
            optax.scale_by_learning_rate(RATE),
        ),
        jr.adamw(RATE, weight_decay=0.1, mask="weights", max_norm=1.0),
    ),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.adamw)(0.1, b2=0.99, weight_decay=0.1),
        # Its own learning rate is not the one that was injected.
        jr.adamw(0.7, b2=0.99, weight_decay=0.1, mask=True),
    ),
    "inject_hyperparams of a schedule": (
        optax.inject_hyperparams(optax.adam)(RATE),
        jr.adam(RATE),
    ),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(0.1), 5), jr.adam(0.1)),
    "MultiSteps": (
        optax.MultiSteps(optax.adam(RATE), 3),
        jr.adam(RATE, accumulate=jr.Accumulate(3)),
    ),
    "partition": (
        optax.partition({"slow": optax.adam(0.05), "fast": optax.adam(0.1)}, LABELS),
        jr.adam(0.05, groups=[jr.Group("head", learning_rate=0.1)]),
    ),
    "all at once": (
        optax.MultiSteps(
            optax.apply_if_finite(
                optax.chain(
                    optax.masked(optax.scale_by_adam(), {"layer": True, "head": False}),
                    optax.masked(optax.scale_by_adam(), {"layer": False, "head": True}),
                    optax.scale_by_learning_rate(RATE),
                ),
                5,
            ),
            2,
        ).gradient_transformation(),
        jr.adam(RATE, accumulate=jr.Accumulate(2)),
    ),
    "ours as optax's": (
        optax.chain(optax.identity(), jr.adamw(RATE, weight_decay=0.1, mask=True)),
        jr.adamw(RATE, weight_decay=0.1, mask=True),
    ),
    "our LARS as optax's": (
        jr.lars(0.1, **LARS, trust_ratio_mask="weights", weight_decay_mask="weights"),
        jr.lars(0.1, **LARS, trust_ratio_mask="weights", weight_decay_mask="weights"),
    ),
}
STEPS = 8


def tree(seed=0):
    rng = np.random.default_rng(seed)

    def leaf(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {"layer": {"kernel": leaf(4, 3), "bias": leaf(3)}, "head": leaf(3, 2)}


BAD = jax.tree.map(lambda x: x * jnp.nan, tree())
GRADIENTS = [tree(seed) for seed in range(1, 1 + STEPS)]


@functools.cache
def optax_step(tx):
    @jax.jit
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def optax_run(tx, params, opt_state, gradients):
    """Parameters and state of optax's loop after these gradients."""
    for grads in gradients:
        params, opt_state = optax_step(tx)(params, opt_state, grads)
    return params, opt_state


def our_run(state, gradients):
    for grads in gradients:
        state = state.apply_gradients(grads)
    return state


def assert_close(got, wanted):
    """As close as optax's own bias corrections in float32 allow."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert jnp.shape(a) == jnp.shape(b)
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
