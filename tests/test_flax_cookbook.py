"""The recipes of Flax's optimization cookbook, each in our words and against optax's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrenaissance as jr
import jaxrenaissance.flax

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(32, 2)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(32, 4)), jnp.float32)
STEPS = 4

adam = functools.partial(jr.adam, 0.05)


def make_model(seed=0):
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(2, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs))


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


@nnx.jit
def their_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return loss


@jax.jit(donate_argnums=0)
def step(state, x, y):
    model = state.model()
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    return state.apply_gradients(grads), loss


def params(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def assert_close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def theirs(tx, steps=STEPS, ghost=None):
    """The parameters that the cookbook's loop ends with."""
    model = make_model()
    optimizer = nnx.Optimizer(ghost or model, tx, wrt=nnx.Param)
    for _ in range(steps):
        their_step(model, optimizer, X, Y)
    return params(model)


def ours(tx, steps=STEPS):
    """The state that the same loop ends with here."""
    state = jr.flax.NNXState.create(make_model(), tx, wrt=nnx.Param)
    for _ in range(steps):
        state, _ = step(state, X, Y)
    return state


@pytest.fixture(scope="module")
def plain():
    """Parameters after the plain loop with optax.adam."""
    return theirs(optax.adam(0.05))


def test_the_plain_loop(plain):
    assert_close(ours(adam()).params, plain)


def test_an_exponential_moving_average():
    model, decay = make_model(), 0.9
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)
    average = params(model)
    for _ in range(STEPS):
        their_step(model, optimizer, X, Y)
        average = jax.tree.map(
            lambda old, new: decay * old + (1 - decay) * new, average, params(model)
        )
    state = ours(adam(ema_decay=decay))
    assert_close(state.ema_params, average)
    assert_close(params(state.with_ema().model()), average)


def test_low_rank_adaptation():
    def adapted():
        rngs = nnx.Rngs(1)
        base = make_model()
        # Both factors are away from zero, so that both are trained from the first step.
        layers = [
            nnx.LoRA(x.in_features, 2, x.out_features, base_module=x, rngs=rngs)
            for x in base.layers
        ]
        for layer in layers:
            layer.lora_b[...] = jnp.full_like(layer.lora_b[...], 0.1)
        return nnx.Sequential(*layers)

    model, wrt = adapted(), nnx.LoRAParam
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=wrt)

    @nnx.jit
    def their_lora_step(model, optimizer, x, y):
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, x, y)
        optimizer.update(model, grads)

    @jax.jit
    def lora_step(state, x, y):
        model = state.model()
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, x, y)
        return state.apply_gradients(grads)

    state = jr.flax.NNXState.create(adapted(), adam(), wrt=wrt)
    assert len(state.core.frozen) == 4  # Kernels and biases: no moments, in no arena.
    for _ in range(2):
        their_lora_step(model, optimizer, X, Y)
        state = lora_step(state, X, Y)
    assert_close(params(state.model()), params(model))


def test_a_learning_rate_for_each_kind_of_parameter():
    kinds = nnx.map_state(lambda path, _: path[-1], nnx.state(make_model(), nnx.Param))
    fast, slow = optax.adam(0.05), optax.adam(0.005)
    wanted = theirs(optax.partition({"bias": fast, "kernel": slow}, kinds))
    both = {"bias": adam(), "kernel": jr.adam(0.005)}
    assert_close(theirs(optax.partition(both, kinds)), wanted)
    # One launch instead of an optimizer for each.
    assert_close(ours(adam(groups=[jr.Group("*/kernel", scale=0.1)])).params, wanted)


def test_gradient_accumulation():
    wanted = theirs(optax.MultiSteps(optax.adam(0.05), every_k_schedule=2))
    assert_close(theirs(optax.MultiSteps(adam(), every_k_schedule=2)), wanted)
    state = ours(adam(accumulate=jr.Accumulate(2)))
    assert_close(state.params, wanted)
    assert int(state.step) == STEPS // 2


def test_gradient_clipping_and_a_schedule():
    schedule = optax.cosine_decay_schedule(0.5, STEPS)
    wanted = theirs(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(schedule)))
    assert_close(ours(jr.sgd(schedule, max_norm=0.1)).params, wanted)


def test_arguments_of_a_line_search_pass_through():
    def searched(optimizer):
        search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
        model, tx = make_model(), optax.chain(optimizer, search)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        graphdef = nnx.graphdef(model)

        @nnx.jit
        def search_step(model, optimizer, x, y):
            loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)

            def value_fn(state):
                return loss_fn(nnx.merge(graphdef, state), x, y)

            optimizer.update(model, grads, value=loss, grad=grads, value_fn=value_fn)

        search_step(model, optimizer, X, Y)
        return params(model)

    assert_close(searched(jr.sgd(3.0)), searched(optax.sgd(3.0)))


def test_an_optimizer_made_from_shapes_alone(plain):
    ghost = nnx.eval_shape(make_model)
    assert_close(theirs(adam(), ghost=ghost), plain)
    state = jax.eval_shape(lambda: jr.flax.NNXState.create(make_model(), adam()))
    assert jax.tree.structure(state) == jax.tree.structure(ours(adam(), steps=0))


def test_a_replicated_state_and_a_batch_over_devices(plain):
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    over_batch = NamedSharding(mesh, PartitionSpec("data"))
    state = jax.device_put(jr.flax.NNXState.create(make_model(), adam()), replicated)
    x, y = jax.device_put((X, Y), over_batch)
    for _ in range(STEPS):
        state, _ = step(state, x, y)
    assert_close(state.params, plain)
    assert state.core.weights[0].sharding.is_equivalent_to(replicated, 1)
