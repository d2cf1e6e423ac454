"""A call that is right for optax's function is right for ours, or an error: nothing is ignored."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_pairs import assert_close, model
from states import random_like

import jaxrenaissance as jr

FACTORIES = ("sgd", "adam", "adamw", "lars", "lamb", "lion")

# What is different on purpose: (factory, parameter) → (optax's default, ours).
DIFFERENT = {
    # None: biases and norm scales have no decay and no trust ratio. True is optax's default.
    ("lars", "weight_decay_mask"): (True, None),
    ("lars", "trust_ratio_mask"): (True, None),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_signature_starts_with_that_of_optax(name):
    ours = list(inspect.signature(getattr(jr, name)).parameters.values())
    theirs = list(inspect.signature(getattr(optax, name)).parameters.values())
    by_name = {p.name: p for p in ours}
    for place, parameter in enumerate(theirs):
        own = by_name[parameter.name]
        assert own.kind == parameter.kind
        defaults = DIFFERENT.get((name, own.name), (parameter.default, parameter.default))
        assert (parameter.default, own.default) == defaults
        if own.kind is not inspect.Parameter.KEYWORD_ONLY:
            assert ours[place].name == parameter.name
    # What optax has not, cannot be given by position.
    own = [p for p in ours if p.name not in {p.name for p in theirs}]
    assert own
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in own)
    assert all(p.default is not inspect.Parameter.empty for p in own)


def kernels(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


# All arguments that optax takes by position. A mask is given, since None differs.
POSITIONAL = {
    "sgd": [(0.1,), (0.1, 0.8), (0.1, 0.8, True), (0.1, 0.8, False, None), (0.1, 0.8, True, "f4")],
    "adam": [(0.1, 0.8, 0.9, 1e-3, 1e-4), (0.1, 0.8, 0.9, 1e-3, 1e-4, np.float32)],
    "adamw": [(0.1, 0.8, 0.9, 1e-3, 1e-4, None, 0.2, True), (0.1, *[0.5] * 4, None, 0.2, kernels)],
    "lars": [(0.1, 0.2, True, 0.02, 0.1, True, 0.8, True), (0.1, 0.2, kernels, 0.02, 0.1, kernels)],
    "lamb": [(0.1, 0.8, 0.9, 1e-3, 1e-4, 0.2, True), (0.1, *[0.5] * 4, 0.2, kernels)],
    "lion": [(0.1, 0.8, 0.9, None, 0.2, True), (0.1, 0.8, 0.9, "float32", 0.2, kernels)],
}
OURS = {"lars": {"optax_form": True}, "lamb": {"trust_ratio_mask": True}}


@pytest.mark.parametrize("name", FACTORIES)
def test_positional_arguments_mean_what_they_mean_in_optax(name):
    rng = np.random.default_rng(0)
    params = model(rng)
    gradients = [random_like(params, rng) for _ in range(2)]
    for arguments in POSITIONAL[name]:
        results = []
        for tx in (
            getattr(jr, name)(*arguments, **OURS.get(name, {})),
            getattr(optax, name)(*arguments),
        ):
            got, state = params, tx.init(params)
            for grads in gradients:
                updates, state = tx.update(grads, state, got)
                got = optax.apply_updates(got, updates)
            results.append(got)
        assert_close(*results)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jr.sgd(0.1, 0.9, False, jnp.bfloat16), "accumulator_dtype: got"),
        (lambda: jr.sgd(0.1, None, True), "nesterov: needs a momentum"),  # optax ignores it.
        (lambda: jr.adam(0.1, mu_dtype=jnp.bfloat16), "mu_dtype: got"),
        (lambda: jr.adam(0.1, nesterov=True), "nesterov: Adam with Nesterov momentum is not"),
        (lambda: jr.adamw(0.1, mu_dtype="float16"), "mu_dtype: got"),
        (lambda: jr.adamw(0.1, nesterov=True), "nesterov: Adam with Nesterov momentum is not"),
        (lambda: jr.lion(0.1, 0.9, 0.99, jnp.float16), "mu_dtype: got"),
        (lambda: jr.sgd(-0.1), "learning_rate: expected a number"),  # optax goes uphill.
    ],
)
def test_what_is_not_supported_raises(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    "options",
    [
        {"ema_decay": 0.9},
        {"loss_scale": jr.StaticLossScale(2.0)},
        {"accumulate": jr.Accumulate(2)},
        {"metrics": "grad_norm"},
    ],
)
def test_what_only_works_in_place_is_an_error_under_optax(options):
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match=rf"^{next(iter(options))}: works in place alone"):
        jr.sgd(0.1, **options).init(params)
    with pytest.raises(ValueError, match=rf"^{next(iter(options))}: works in place alone"):
        jr.sgd(0.1, **options).update(params, jr.sgd(0.1).init(params))
