"""zero_gradients and accumulate: sums of micro-batches, in a scan inside of one step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from states import assert_buffers_equal, batch, loss_fn, mlp, ones_like, tolerance

import jaxrenaissance as jr


def optimizer(backend, **options):
    return jr.adamw(1e-2, eps=1e-3, mask="weights", backend=backend, **options)


def micro_steps(state, xs):
    """One update from a scan over micro-batches."""

    def micro_step(sums, x):
        return state.accumulate(sums, jax.grad(loss_fn)(state.compute_params, x)), None

    sums, _ = jax.lax.scan(micro_step, state.zero_gradients(), xs)
    return state.apply_gradients(sums)


def looped(state, xs):
    sums = state.zero_gradients()
    for x in xs:
        sums = state.accumulate(sums, jax.grad(loss_fn)(state.compute_params, x))
    return state.apply_gradients(sums)


def mean_step(state, xs):
    """The same update, from the mean of the gradients."""
    grads = [jax.grad(loss_fn)(state.compute_params, x) for x in xs]
    return state.apply_gradients(jax.tree.map(lambda *g: sum(g) / len(g), *grads))


XS = jnp.stack([batch(i) for i in range(4)])
OPTIONS = [{}, {"max_norm": 1e-2, "ema_decay": 0.9, "metrics": "leaves"}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("step", [looped, jax.jit(looped), jax.jit(micro_steps)])
def test_the_update_is_with_the_mean(step, options, backend):
    state = wanted = jr.TrainState.create(mlp(), optimizer(backend, **options))
    for _ in range(2):
        state, wanted = step(state, XS), mean_step(wanted, XS)
    parts = [(s.weights, s.moments, s.ema, s.norms, s.metrics) for s in (state, wanted)]
    assert_buffers_equal(*parts, rtol=1e-4, atol=1e-6)
    assert [int(n) for n in (state.step, state.calls)] == [2, 2]


def test_members_are_a_loop_and_a_nan_skips_its_member_alone(backend):
    own = optimizer(backend)
    xs = jnp.stack([XS, XS + 1, XS.at[2, 0, 0].set(jnp.nan)])
    scaled = jax.vmap(lambda x: jax.tree.map(lambda leaf: leaf * x, mlp()))(jnp.arange(1.0, 4.0))
    states = jax.vmap(lambda params: jr.TrainState.create(params, own))(scaled)
    alone = [jax.tree.map(lambda x, i=i: x[i], states) for i in range(3)]
    many = jax.jit(jax.vmap(micro_steps))(states, xs)
    for i in range(3):
        one = jax.jit(micro_steps)(alone[i], xs[i])
        assert_buffers_equal(jax.tree.map(lambda x, i=i: x[i], many), one, **tolerance(backend))
    np.testing.assert_array_equal(many.step, [1, 1, 0])
    np.testing.assert_array_equal(many.skipped, [0, 0, 1])


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_bad_micro_batch_skips_the_update_and_does_not_poison_the_next(bad, backend):
    state = jr.TrainState.create(mlp(), optimizer(backend), extra=jnp.zeros(()))
    sums = state.zero_gradients()
    for i in range(4):
        grads = ones_like(mlp())
        if i == bad:
            grads["out"]["kernel"] = grads["out"]["kernel"].at[4, 0].set(jnp.inf)
        sums = state.accumulate(sums, grads)
        assert int(sums.count) == i + 1
        assert bool(sums.has_nan) == (i >= bad)
    new = state.apply_gradients(sums, extra=jnp.ones(()))
    assert_buffers_equal((new.weights, new.moments), (state.weights, state.moments))
    assert [int(n) for n in (new.step, new.skipped)] == [0, 1]
    assert bool(new.has_nan)
    assert float(new.extra) == 0
    with pytest.raises(FloatingPointError, match="'out/kernel'"):
        jr.check(new, max_consecutive=0)
    assert_buffers_equal(looped(new, XS).params, looped(state, XS).params, rtol=1e-6, atol=1e-7)


def test_a_sum_that_overflows_is_bad(backend):
    params = {"w": jnp.ones(2)}
    state = jr.TrainState.create(params, jr.sgd(0.1, backend=backend))
    sums = state.zero_gradients()
    for _ in range(2):
        sums = state.accumulate(sums, {"w": jnp.asarray([1.0, 3e38])})
    assert bool(sums.has_nan)
    assert int(state.apply_gradients(sums).skipped) == 1


def test_no_micro_batch_updates_nothing(backend):
    state = jr.TrainState.create(mlp(), optimizer(backend))
    new = state.apply_gradients(state.zero_gradients())
    assert_buffers_equal((new.weights, new.moments), (state.weights, state.moments))
    assert [int(n) for n in (new.step, new.calls, new.skipped)] == [0, 1, 0]
    assert_buffers_equal(looped(new, XS).params, looped(state, XS).params, rtol=1e-6, atol=1e-7)


def test_the_loss_scale_is_taken_out_once(backend):
    scaled = optimizer(backend, loss_scale=jr.StaticLossScale(1024.0))
    state = jr.TrainState.create(mlp(), scaled)

    def step(state, xs):
        sums = state.zero_gradients()
        for x in xs:
            grads = jax.grad(lambda p, x: state.scale_loss(loss_fn(p, x)))(state.compute_params, x)
            sums = state.accumulate(sums, grads)
        return state.apply_gradients(sums)

    wanted = looped(jr.TrainState.create(mlp(), optimizer(backend)), XS)
    assert_buffers_equal(step(state, XS).params, wanted.params, rtol=1e-5, atol=1e-6)


def test_sums_are_in_full_precision_and_of_both_arenas(backend):
    with jax.enable_x64(True):
        params = {"a": jnp.zeros(2, jnp.float64), "b": jnp.zeros(2, jnp.float32)}
        state = jr.TrainState.create(params, jr.sgd(1.0, backend=backend))
        sums = state.zero_gradients()
        for value in (256.0, 1.0):
            grads = {"a": jnp.full(2, value / 3), "b": jnp.full(2, value, jnp.bfloat16)}
            sums = state.accumulate(sums, grads)
        assert [arena.dtype for arena in sums.arenas] == [jnp.float32, jnp.float64]
        assert "float32[32], float64[16]" in repr(sums)
        new = state.apply_gradients(sums)
        np.testing.assert_allclose(new.params["a"], -257 / 6, rtol=1e-15)
        np.testing.assert_array_equal(new.params["b"], -128.5)


def test_inside_shard_map(backend):
    devices = jax.devices("cpu") if backend == "cpu" else jax.devices()
    mesh = jax.make_mesh((len(devices),), ("seeds",), (AxisType.Auto,), devices=devices)
    own = optimizer(backend, max_norm=1.0, ema_decay=0.9, metrics="leaves")

    def train(scale):
        params = jax.tree.map(lambda x: x * scale, mlp())
        state = jr.TrainState.create(params, own, extra=jnp.ones(3), ema_extra=True)
        state = jax.lax.scan(lambda s, _: (micro_steps(s, XS), None), state, length=2)[0]
        state = jr.lerp(state.reset_moments("norm/*"), mlp(), 0.5).map_params(jnp.tanh)
        larger = state.replan({**state.params, "more": jnp.ones(2)})
        return state.with_ema().params, larger.apply_gradients(larger.params).params

    spec = PartitionSpec("seeds")
    scales = jnp.linspace(0.5, 1.0, 2 * mesh.size)
    where = {"mesh": mesh, "in_specs": spec, "out_specs": spec}
    wanted = jax.jit(train)(scales[-1])
    for check_vma in (True, False):
        many = jax.jit(jax.shard_map(jax.vmap(train), check_vma=check_vma, **where))(scales)
        assert_buffers_equal(jax.tree.map(lambda x: x[-1], many), wanted, rtol=1e-5, atol=1e-6)


def test_what_does_not_belong_together_is_refused():
    state = jr.TrainState.create(mlp(), optimizer("xla"))
    other = jr.TrainState.create(mlp(width=6), optimizer("xla"))
    cycles = jr.TrainState.create(mlp(), optimizer("xla", accumulate=jr.Accumulate(2)))
    sums = state.zero_gradients()
    with pytest.raises(TypeError, match="sums: expected what zero_gradients gives, got a dict"):
        state.accumulate(mlp(), mlp())
    with pytest.raises(ValueError, match="sums: the Gradients are those of another plan"):
        other.accumulate(sums, mlp(width=6))
    with pytest.raises(ValueError, match="grads: the Gradients are those of another plan"):
        other.apply_gradients(sums)
    with pytest.raises(ValueError, match=r"grads: 'in/bias' has shape \(6,\), wanted \(5,\)"):
        state.accumulate(sums, mlp(width=6))
    with pytest.raises(ValueError, match="zero_gradients: the optimizer was made with accumulate="):
        cycles.zero_gradients()
    with pytest.raises(ValueError, match=r"grads: .* accumulate=.* Use one of the two"):
        cycles.apply_gradients(sums)
