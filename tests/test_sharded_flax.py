"""The states for Flax over several devices give what they give on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import native_backends
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import FORMS, assert_lies_as_its_form_says, assert_replicas_agree, make_mesh
from states import assert_buffers_equal, assert_trees_equal

import jaxrenaissance as jr
import jaxrenaissance.flax

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


class Net(nn.Module):
    axis: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name=self.axis)(x)
        return nn.Dense(1)(nn.tanh(x))


def linen_step(state, x):
    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        y, changes = state.apply_fn(variables, x, mutable="batch_stats")
        return jnp.mean((y - 1) ** 2), changes["batch_stats"]

    grads, stats = jax.grad(loss, has_aux=True)(state.compute_params)
    return state.apply_gradients(grads=grads, batch_stats=stats)


def linen_state(backend, axis=None, **over):
    variables = jax.jit(Net().init)(jax.random.key(0), X)
    optimizer = jr.lamb(0.1, max_norm=1.0, eps=1e-3, backend=backend)
    return jr.flax.TrainState.create(apply_fn=Net(axis).apply, tx=optimizer, **variables, **over)


def trained(step, state, x):
    for _ in range(3):
        state = step(state, x)
    return state


def assert_same(state, wanted):
    for got, other in zip(
        (state.params, state.batch_stats, state.metrics, state.trust_ratios()),
        (wanted.params, wanted.batch_stats, wanted.metrics, wanted.trust_ratios()),
        strict=True,
    ):
        assert_buffers_equal(got, other, rtol=2e-5, atol=4e-6)
    assert_lies_as_its_form_says(state.core)
    assert_replicas_agree(state.core)


@pytest.mark.parametrize("how", ["jit", "shard_map"])
@pytest.mark.parametrize("form", FORMS)
@native_backends
def test_a_linen_model_with_batch_statistics(form, how, backend):
    if form == "leaves" and how == "shard_map":
        pytest.skip("there the user reduces gradients")
    mesh = make_mesh(backend)
    inside = how == "shard_map"
    state = linen_state(backend, "data" if inside else None, mesh=mesh, sharding=form)
    step = linen_step
    if inside:
        specs = state.partition_specs
        where = {"mesh": mesh, "in_specs": (specs, P("data")), "out_specs": specs}
        step = jax.shard_map(step, **where)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    state = trained(jax.jit(step, donate_argnums=0), state, x)
    assert_same(state, trained(jax.jit(linen_step), linen_state(backend), X))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.norm(self.first(x))))


def nnx_step(state, x):
    model = state.model()
    grads = nnx.grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    return state.apply_gradients(grads)


@pytest.mark.parametrize("form", FORMS)
@native_backends
def test_an_nnx_model_with_batch_statistics(form, backend):
    mesh, optimizer = make_mesh(backend), jr.adamw(0.1, eps=1e-3, max_norm=1.0, backend=backend)
    one = jr.flax.NNXState.create(Model(nnx.Rngs(0)), optimizer)
    over = {"mesh": mesh, "sharding": form}
    state = jr.flax.NNXState.create(Model(nnx.Rngs(0)), optimizer, **over)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    state = trained(jax.jit(nnx_step, donate_argnums=0), state, x)
    one = trained(jax.jit(nnx_step), one, X)
    for part in (lambda s: s.params, lambda s: s.core.extra["floats"].tree, lambda s: s.metrics):
        assert_buffers_equal(part(state), part(one), rtol=2e-5, atol=4e-6)
    assert_lies_as_its_form_says(state.core)
    assert_replicas_agree(state.core)
    again = state.restore(state.to_leaves(host=True))
    assert_trees_equal(again.to_leaves(host=True), state.to_leaves(host=True))
    np.testing.assert_allclose(again.model()(X), one.model()(X), rtol=1e-4, atol=1e-5)
