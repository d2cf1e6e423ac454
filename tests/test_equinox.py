"""Models of Equinox: TrainState by partition and combine, and optax's contract."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrenaissance as jr

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
MODEL = eqx.nn.MLP(3, 1, 4, 1, activation=jax.nn.tanh, key=jax.random.key(0))
PARAMS, REST = eqx.partition(MODEL, eqx.is_inexact_array)

adamw = functools.partial(jr.adamw, 0.1, weight_decay=0.1, mask=True)


@eqx.filter_value_and_grad
def loss_fn(model, x):
    return jnp.mean((jax.vmap(model)(x) - 1) ** 2)


@eqx.filter_jit
def optax_step(model, opt_state, optim, x):
    _, grads = loss_fn(model, x)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = optim.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state


def by_optax(optim):
    model, opt_state = MODEL, optim.init(eqx.filter(MODEL, eqx.is_inexact_array))
    for _ in range(3):
        model, opt_state = optax_step(model, opt_state, optim, X)
    return eqx.filter(model, eqx.is_inexact_array)


def assert_close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def followed():
    """The parameters after Equinox's usual loop with optax."""
    return by_optax(optax.adamw(0.1, weight_decay=0.1))


def test_optax_contract(followed):
    assert_close(by_optax(adamw()), followed)


def test_partition_and_combine(backend, followed):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x):
        model = eqx.combine(state.compute_params, REST)
        loss, grads = loss_fn(model, x)
        return state.apply_gradients(grads), loss

    state = jr.TrainState.create(PARAMS, adamw(backend=backend))
    for _ in range(3):
        state, loss = step(state, X)
    assert_close(state.params, followed)
    assert step._cache_size() == 1
    model = eqx.combine(state.params, REST)
    assert model(X[0]).shape == (1,)
    # The loss is that of the parameters before the last update.
    assert float(loss) > float(loss_fn(model, X)[0])


def test_a_state_goes_through_filter_jit():
    traced = []

    @eqx.filter_jit(donate="all-except-first")
    def step(x, state, rest):
        traced.append(None)
        loss, grads = loss_fn(eqx.combine(state.compute_params, rest), x)
        return state.apply_gradients(grads), loss

    for rate in (0.0, 0.1):  # Another number is not another program.
        state = jr.TrainState.create(PARAMS, jr.sgd(rate))
        state, _ = step(X, state, REST)
        assert int(state.step) == 1
    assert len(traced) == 1


def test_a_model_with_its_functions_is_told_to_filter():
    filtered = r"eqx\.filter\(model, eqx\.is_inexact_array\)"
    with pytest.raises(ValueError, match=f"'activation' is a .*, not an array.*{filtered}"):
        jr.TrainState.create(MODEL, jr.adam(0.1))
    with pytest.raises(ValueError, match=f"'activation' is a .*{filtered}"):
        jr.adam(0.1).init(MODEL)
    with pytest.raises(ValueError, match=r"'activation' is a .*eqx\.filter"):
        jr.TrainState.create(MODEL, jr.adam(0.1), trainable="*/weight")


def test_biases_are_told_from_weights_by_name():
    conv = eqx.nn.Conv2d(2, 4, 3, key=jax.random.key(0))
    model = {"conv": conv, "norm": eqx.nn.LayerNorm(4), "mlp": PARAMS}
    state = jr.TrainState.create(
        eqx.filter(model, eqx.is_inexact_array),
        jr.adamw(0.1, weight_decay=0.1, mask="weights"),
    )
    undecayed = {leaf.path for leaf in state.plan.leaves if leaf.region in jr.BIAS_LIKE}
    assert undecayed == {
        "conv/bias",
        "norm/bias",
        "norm/weight",
        "mlp/layers/0/bias",
        "mlp/layers/1/bias",
    }


def test_frozen_layers_by_a_tree_of_bools():
    trainable = jax.tree.map(lambda _: False, PARAMS)
    trainable = eqx.tree_at(lambda m: m.layers[-1].weight, trainable, True)
    state = jr.TrainState.create(PARAMS, jr.sgd(0.5), trainable=trainable)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    new = state.apply_gradients(grads).params
    np.testing.assert_array_equal(new.layers[0].weight, PARAMS.layers[0].weight)
    np.testing.assert_allclose(new.layers[1].weight, PARAMS.layers[1].weight - 0.5, rtol=1e-6)


def test_batch_statistics_in_extra():
    class Normed(eqx.Module):
        layer: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.layer = eqx.nn.Linear(3, 2, key=key)
            self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")

        def __call__(self, x, state):
            return self.norm(self.layer(x), state)

    model, stats = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    state = jr.TrainState.create(params, jr.sgd(0.1), extra=stats)

    def forward(model, x, stats):
        call = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return call(x, stats)

    @jax.jit
    def step(state, x):
        def loss(params):
            out, stats = forward(eqx.combine(params, rest), x, state.extra)
            return jnp.mean(out**2), stats

        grads, stats = jax.grad(loss, has_aux=True)(state.compute_params)
        return state.apply_gradients(grads, extra=stats)

    _, wanted = eqx.filter_jit(forward)(model, X, stats)
    assert_close(step(state, X).extra, wanted)
    assert not np.allclose(*(jax.tree.leaves(tree)[-1] for tree in (stats, wanted)))
