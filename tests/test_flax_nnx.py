"""NNXState: the fast form of an NNX model, against nnx.Optimizer with optax on a copy of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from states import count_compilations

import jaxrenaissance as jr
import jaxrenaissance.flax

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)


class Special(nnx.Param):
    """A subclass of Variable."""


class Model(nnx.Module):
    """What a real model has: statistics, random streams, counts, a list and a tied layer."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.tied = self.layers[0]
        self.scale = Special(jnp.ones(4), note="kept")
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        x = self.dropout(self.norm(self.first(x)))
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return self.tied(x) * self.scale[...]


class Plain(nnx.Module):
    """A model with parameters alone."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


def train_step(state, x):
    model = state.model()
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    return state.apply_gradients(grads), loss


def flat(model):
    """Path → value of every variable."""
    values = {path: x.get_value() for path, x in nnx.to_flat_state(nnx.state(model))}
    is_key = {p: jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for p, x in values.items()}
    return {p: jax.random.key_data(x) if is_key[p] else x for p, x in values.items()}


def assert_models_close(got, wanted, **tolerance):
    got, wanted = flat(got), flat(wanted)
    assert got.keys() == wanted.keys()
    for path, value in wanted.items():
        assert got[path].dtype == value.dtype
        np.testing.assert_allclose(got[path], value, err_msg=str(path), **tolerance)


@pytest.fixture(scope="module")
def model():
    return Model(nnx.Rngs(0))


def test_trains_as_nnx_with_optax(model, backend):
    optimizer = jr.adamw(0.1, weight_decay=0.1, mask=True, backend=backend)
    state = jr.flax.NNXState.create(model, optimizer, wrt=nnx.Param)
    reference = nnx.clone(model)
    theirs = nnx.Optimizer(reference, optax.adamw(0.1, weight_decay=0.1), wrt=nnx.Param)

    @nnx.jit
    def their_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss

    step = jax.jit(train_step, donate_argnums=0)
    for i in range(3):
        with count_compilations() as compiled:
            state, loss = step(state, X)
        assert i == 0 or not compiled
        np.testing.assert_allclose(loss, their_step(reference, theirs, X), rtol=1e-4)
    assert_models_close(state.model(), reference, rtol=1e-3, atol=1e-4)
    assert int(state.step) == int(state.model().calls[...]) == 3


def test_is_a_few_buffers(model):
    state = jr.flax.NNXState.create(model, jr.adamw(0.1, mask=True, backend="cpu"))
    # Weights, two moments, two of scalars; statistics; key and count of the dropout, calls.
    assert len(jax.tree.leaves(state)) == 5 + 1 + 3
