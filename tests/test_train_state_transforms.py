"""A train step under JAX's transformations: the same results as a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from states import assert_buffers_equal, batch, loss_fn, mlp, tolerance, train_step

import jaxrenaissance as jr


def reference_run(backend, steps=3):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-2, mask="weights", backend=backend))
    step = jax.jit(train_step)
    for i in range(steps):
        state, _ = step(state, batch(i))
    return state


def test_under_scan(backend):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-2, mask="weights", backend=backend))
    xs = jnp.stack([batch(i) for i in range(3)])
    state, losses = jax.jit(lambda s: jax.lax.scan(train_step, s, xs))(state)
    assert losses.shape == (3,)
    assert_buffers_equal(state, reference_run(backend), **tolerance(backend))


def test_under_cond(backend):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-2, mask="weights", backend=backend))

    @jax.jit
    def maybe(state, x, go):
        return jax.lax.cond(go, lambda s: train_step(s, x)[0], lambda s: s, state)

    for i in range(3):
        state = maybe(state, batch(i), True)
        state = maybe(state, batch(i), False)
    assert maybe._cache_size() == 1
    assert_buffers_equal(state, reference_run(backend), **tolerance(backend))


def test_under_checkpoint(backend):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-2, mask="weights", backend=backend))

    @jax.jit
    @jax.checkpoint
    def step(state, x):
        grads = jax.grad(jax.checkpoint(loss_fn))(state.compute_params, x)
        return state.apply_gradients(grads)

    for i in range(3):
        state = step(state, batch(i))
    assert_buffers_equal(state, reference_run(backend), **tolerance(backend))


def test_without_jit(backend):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-2, mask="weights", backend=backend))
    for i in range(3):
        state, _ = train_step(state, batch(i))
    assert_buffers_equal(state, reference_run(backend), **tolerance(backend))


def test_under_strict_promotion(backend):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
    with jax.numpy_dtype_promotion("strict"):
        optimizer = jr.adamw(schedule, weight_decay=0.1, mask="weights", backend=backend)
        state = jr.TrainState.create(mlp(), optimizer, extra={"n": jnp.ones(2)})
        state, _ = jax.jit(train_step)(state, batch())
        state = state.replace_hyperparams(b1=0.5, b2=jnp.float32(0.9))
        state = state.replace(params=mlp(1))
        assert set(state.metrics) >= {"learning_rate", "b1"}
        tx = jr.sgd(schedule, momentum=0.9, weight_decay=0.1, mask=True, backend=backend)
        tx.update(mlp(), tx.init(mlp()), mlp())


def everything(backend):
    """What remains of a state after all that can be done to one."""
    optimizer = jr.adamw(
        optax.linear_schedule(1e-2, 0.0, 10),
        mask="weights",
        max_norm=1.0,
        max_value=optax.constant_schedule(0.5),
        ema_decay=0.9,
        ema_debias=True,
        loss_scale=jr.DynamicLossScale(initial=8.0, growth_interval=1),
        groups=[jr.Group("out/*", scale=optax.constant_schedule(2.0), b1=0.8)],
        metrics=["leaves", "param_norm", "update_norm"],
        backend=backend,
    )
    extra = {"half": jnp.ones(2, jnp.bfloat16), "n": jnp.zeros((), jnp.int32)}
    state = jr.TrainState.create(mlp(), optimizer, extra=extra, ema_extra=True)

    def gradients(state, x):
        return jax.grad(lambda p: state.scale_loss(loss_fn(p, x)))(state.compute_params)

    state = state.apply_gradients(gradients(state, batch()), extra=extra)
    sums = state.zero_gradients()
    for i in range(2):
        sums = state.accumulate(sums, gradients(state, batch(i)))
    state = state.apply_gradients(sums)
    state = jr.lerp(state.map_params(jnp.tanh, "in/*").reset_moments("norm/*"), mlp(), 0.25)
    state = state.replan({**state.params, "more": jnp.ones(2)}).with_ema()
    return state.params, state.extra, state.metrics, state.ints


def test_everything_with_jit_without_it_and_under_strict_promotion(backend):
    with jax.numpy_dtype_promotion("strict"):
        wanted = jax.jit(lambda: everything(backend))()
    assert_buffers_equal(everything(backend), wanted, rtol=1e-5, atol=1e-6)
    with jax.disable_jit():
        assert_buffers_equal(everything(backend), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_vmap_over_seeds_is_a_loop_and_a_nan_skips_its_member_alone(kind, backend):
    optimizer = (
        jr.sgd(0.1, 0.9, backend=backend)
        if kind == "sgd"
        else jr.adamw(1e-2, weight_decay=0.1, mask="weights", backend=backend)
    )
    trees = [mlp(seed) for seed in range(3)]
    grads = [[mlp(10 * i + seed) for seed in range(3)] for i in range(3)]
    grads[1][2]["norm"]["scale"] = grads[1][2]["norm"]["scale"].at[4].set(jnp.nan)

    def stack(items):
        return jax.tree.map(lambda *xs: jnp.stack(xs), *items)

    states = jax.vmap(lambda p: jr.TrainState.create(p, optimizer))(stack(trees))
    step = jax.jit(jax.vmap(lambda s, g: s.apply_gradients(g)), donate_argnums=0)
    one_step = jax.jit(lambda s, g: s.apply_gradients(g))
    single = [jr.TrainState.create(p, optimizer) for p in trees]
    for g in grads:
        states = step(states, stack(g))
        single = [one_step(s, own) for s, own in zip(single, g, strict=True)]
    assert step._cache_size() == 1
    exact = {} if backend != "xla" else {"rtol": 1e-6, "atol": 1e-7}
    assert_buffers_equal(states, stack(single), **exact)
    np.testing.assert_array_equal(states.step, [3, 3, 2])
    np.testing.assert_array_equal(states.metrics["skipped"], [0, 0, 1])
    many = jax.vmap(lambda s: s.params)(states)
    np.testing.assert_allclose(many["in"]["bias"][1], single[1].params["in"]["bias"], rtol=1e-6)
    with pytest.raises(ValueError, match=r"several members.*jax\.vmap"):
        _ = states.params


def test_vmap_over_numbers_nested_is_a_loop(backend):
    params = mlp()

    def run(lr, weight_decay):
        optimizer = jr.adamw(lr, weight_decay=weight_decay, mask="weights", backend=backend)
        state = jr.TrainState.create(params, optimizer)
        for i in range(2):
            state, _ = train_step(state, batch(i))
        return state

    rates, decays = jnp.asarray([1e-3, 1e-2]), jnp.asarray([0.0, 0.1, 0.5])
    nested = jax.vmap(jax.vmap(run, (None, 0)), (0, None))
    states = jax.jit(nested)(rates, decays)
    assert states.weights[0].shape == (2, 3, states.plan.arenas[0].size)
    for i in range(2):
        for j in range(3):
            member = jax.tree.map(lambda x, i=i, j=j: x[i, j], states)
            alone = jax.jit(run)(float(rates[i]), float(decays[j]))
            # Adam's first steps turn the last digits of a small gradient into a change of 1e-6.
            assert_buffers_equal(member.params, alone.params, rtol=1e-5, atol=2e-5)
    # What jit gave back trains on, and so does what vmap alone gives.
    step = jax.vmap(jax.vmap(train_step, (0, None)), (0, None))
    again, _ = jax.jit(step)(states, batch())
    assert (again.step == 3).all()
    created = jax.vmap(lambda lr: jr.TrainState.create(params, jr.adamw(lr, mask="weights")))(rates)
    np.testing.assert_allclose(created.metrics["learning_rate"], rates)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "accumulate": jr.Accumulate(2),
            "max_norm": 0.1,
            "ema_decay": 0.9,
            "metrics": ["leaves", "param_norm", "update_norm"],
        },
    ],
)
def test_shard_map_with_a_replicated_state_is_the_step_over_the_whole_batch(
    options, check_vma, backend
):
    devices = jax.devices("cpu") if backend == "cpu" else jax.devices()
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4 * mesh.size, 3)), jnp.float32)
    optimizer = jr.adamw(1e-2, weight_decay=0.1, mask="weights", backend=backend, **options)
    state = jr.TrainState.create(mlp(), optimizer)

    def local_step(state, x):
        params = state.compute_params
        if check_vma:
            params = jax.lax.pcast(params, "data", to="varying")
        grads = jax.lax.pmean(jax.grad(loss_fn)(params, x), "data")
        return state.apply_gradients(grads)

    replicated, sharded = PartitionSpec(), PartitionSpec("data")
    step = jax.jit(
        jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(replicated, sharded),
            out_specs=replicated,
            check_vma=check_vma,
        )
    )
    wanted = state
    for _ in range(2):
        state, (wanted, _) = step(state, x), jax.jit(train_step)(wanted, x)
    assert_buffers_equal(state.params, wanted.params, rtol=1e-5, atol=1e-6)


def test_states_made_inside_shard_map_train_on_in_a_scan(backend):
    # PureJaxRL's shape on several devices: seeds over devices, each a whole training run.
    devices = jax.devices("cpu") if backend == "cpu" else jax.devices()
    mesh = jax.make_mesh((len(devices),), ("seeds",), (AxisType.Auto,), devices=devices)
    optimizer = jr.adamw(1e-2, mask="weights", backend=backend)

    def train(scale):
        params = jax.tree.map(lambda x: x * scale, mlp())
        state = jr.TrainState.create(params, optimizer)
        xs = jnp.stack([batch(i) for i in range(3)])
        return jax.lax.scan(train_step, state, xs)[0].params

    spec = PartitionSpec("seeds")
    scales = jnp.linspace(0.5, 1.0, 2 * mesh.size)
    many = jax.jit(jax.shard_map(jax.vmap(train), mesh=mesh, in_specs=spec, out_specs=spec))(scales)
    wanted = jax.jit(train)(scales[-1])
    assert_buffers_equal(jax.tree.map(lambda x: x[-1], many), wanted, rtol=1e-5, atol=1e-6)
