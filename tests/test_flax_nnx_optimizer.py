"""Optimizers as NNX has them: jaxrenaissance.flax.Optimizer, and nnx.Optimizer around ours."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from states import count_compilations

import jaxrenaissance as jr
import jaxrenaissance.flax
from jaxrenaissance.transform import build_plan

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)


class Model(nnx.Module):
    """A layer that is used twice, a norm with statistics, and a mode."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.again = self.first
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.last = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.norm(self.again(self.first(x)))))


def loss_fn(model, x):
    return jnp.mean((model(x) - 1) ** 2)


@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


def params(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def assert_close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def ones(model):
    return jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))


@pytest.fixture(scope="module")
def followed():
    """Parameters after 3 steps of nnx.Optimizer with optax."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.1, weight_decay=0.1), wrt=nnx.Param)
    for _ in range(3):
        train_step(model, optimizer, X)
    return params(model)


@pytest.mark.parametrize("make", [jr.flax.Optimizer, nnx.Optimizer])
def test_trains_as_with_optax(make, followed):
    model = Model(nnx.Rngs(0))
    tx = jr.adamw(0.1, weight_decay=0.1, mask=True)
    optimizer = make(model, tx, wrt=nnx.Param)
    for i in range(3):
        with count_compilations() as compiled:
            train_step(model, optimizer, X)
        assert i == 0 or not compiled
    assert_close(params(model), followed)
    assert int(optimizer.step[...]) == 3


def test_weights_changed_from_outside_count():
    model = Model(nnx.Rngs(0))
    optimizer = jr.flax.Optimizer(model, jr.sgd(0.5))
    model.last.bias[...] = jnp.full(1, 7.0)
    optimizer.update(model, ones(model))
    assert model.last.bias[...].tolist() == [6.5]


def test_what_only_works_in_place_works_here():
    model = Model(nnx.Rngs(0))
    tx = jr.sgd(
        0.5,
        ema_decay=0.75,
        loss_scale=jr.StaticLossScale(4.0),
        accumulate=jr.Accumulate(2),
        metrics=("grad_norm",),
    )
    optimizer = jr.flax.Optimizer(model, tx)
    assert float(optimizer.scale_loss(jnp.float32(2))) == 8
    for value in (4.0, 12.0):  # With the loss scale; their mean is 2.
        grads = jax.tree.map(lambda x, value=value: jnp.full_like(x, value), ones(model))
        optimizer.update(model, grads)
    assert model.norm.scale[...].tolist() == [0.0] * 3
    assert int(optimizer.step) == 1
    size = sum(x.size for x in jax.tree.leaves(params(model)))
    np.testing.assert_allclose(optimizer.metrics["grad_norm"], 2 * size**0.5, rtol=1e-6)
    assert optimizer.ema_model(model).norm.scale[...].tolist() == [0.75] * 3
    jr.check(optimizer.core(model))


def test_a_bad_gradient_changes_nothing():
    model = Model(nnx.Rngs(0))
    optimizer = jr.flax.Optimizer(model, jr.adam(0.1))
    before, grads = params(model), ones(model)
    grads["last"]["bias"].set_value(jnp.asarray([jnp.nan]))
    optimizer.update(model, grads)
    for a, b in zip(jax.tree.leaves(params(model)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (int(optimizer.step), int(optimizer.core(model).skipped)) == (0, 1)


def test_a_checkpoint_restores_in_place():
    models = [Model(nnx.Rngs(seed)) for seed in (0, 1)]
    optimizers = [jr.flax.Optimizer(model, jr.adam(0.1, ema_decay=0.5)) for model in models]
    optimizers[0].update(models[0], ones(models[0]))
    leaves = optimizers[0].core(models[0]).to_leaves(host=True)
    optimizers[1].restore(models[1], leaves)
    assert int(optimizers[1].step) == 1
    assert_close(params(models[1]), params(models[0]))
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.update(model, jax.tree.map(lambda x: -3 * x, ones(model)))
    assert_close(params(models[1]), params(models[0]))
    averages = [params(o.ema_model(m)) for m, o in zip(models, optimizers, strict=True)]
    assert_close(averages[1], averages[0])


def test_variables_that_hold_trees():
    class Pair(nnx.Module):
        def __init__(self):
            self.pair = nnx.Param({"a": jnp.ones(3), "b": {"c": jnp.ones(2)}})

    model = Pair()
    optimizer = jr.flax.Optimizer(model, jr.sgd(0.5))
    optimizer.update(model, ones(model))
    optimizer.update(model, nnx.to_pure_dict(ones(model)))
    assert model.pair.get_value()["b"]["c"].tolist() == [0.0, 0.0]


def test_another_number_compiles_nothing():
    model = Model(nnx.Rngs(0))
    optimizer = jr.flax.Optimizer(model, jr.sgd(0.5))
    train_step(model, optimizer, X)
    optimizer.replace_hyperparams(learning_rate=0.0)
    before = params(model)
    with count_compilations() as compiled:
        train_step(model, optimizer, X)
    assert not compiled
    assert_close(params(model), before)


def test_what_does_not_match_is_named():
    model = Model(nnx.Rngs(0))
    with pytest.raises(TypeError, match="got an optax transformation"):
        jr.flax.Optimizer(model, optax.adam(0.1))
    with pytest.raises(ValueError, match=r"wrt: .*LoRAParam.* selects no variable"):
        jr.flax.Optimizer(model, jr.sgd(0.5), wrt=nnx.LoRAParam)
    optimizer = jr.flax.Optimizer(model, jr.sgd(0.5))
    with pytest.raises(ValueError, match="'norm/bias' is missing"):
        optimizer.update(model, {"norm": {"scale": jnp.ones(3)}})


def test_names_of_variables_and_of_their_arrays_choose_the_same():
    group = jr.Group("*/bias", weight_decay=0.0)
    tx = jr.adamw(0.1, weight_decay=0.1, groups=[group])
    state = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    plans = [build_plan(tree, tx.selection) for tree in (state, nnx.as_pure(state))]
    ours = [[(x.path, x.region, x.group) for x in plan.leaves] for plan in plans]
    assert ours[0] == ours[1]
    assert [path for path, *_ in ours[0]] == [
        "again/kernel",  # The first of its two names in order.
        "last/bias",
        "last/kernel",
        "norm/bias",
        "norm/scale",
    ]
