"""Gradients that each device adds up by itself, and their sum over all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxrenaissance as jr

PARAMS = {"w": np.ones((3, 2), np.float32), "b": np.zeros(5, np.float32)}
DEVICES = 4


def make_state(**options):
    return jr.TrainState.create(PARAMS, jr.sgd(1.0, backend="xla", **options))


def local_step(state, xs):
    """An update with the mean over two micro-batches a device, whose gradients are all x."""
    sums = state.zero_gradients()
    for x in xs:
        grads = jax.tree.map(lambda leaf, x=x: jnp.full_like(leaf, x), PARAMS)
        sums = state.accumulate(sums, grads)
    sums = sums.psum("data")
    return state.apply_gradients(sums), sums.count


def sharded_step(check_vma):
    if len(jax.devices("cpu")) < DEVICES:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh(
        (DEVICES,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu")[:DEVICES]
    )
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
    return jax.jit(jax.shard_map(local_step, mesh=mesh, check_vma=check_vma, **specs))


def replicas(state):
    return [np.asarray(shard.data) for shard in state.weights[0].addressable_shards]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}])
def test_the_update_is_with_the_mean_over_all_micro_batches_of_all_devices(options, check_vma):
    step = sharded_step(check_vma)
    state, count = step(make_state(**options), jnp.arange(1.0, 2 * DEVICES + 1))
    mean = np.arange(1.0, 2 * DEVICES + 1).mean()
    factor = 1 / (mean * np.sqrt(11)) if options else 1.0
    assert (int(count), int(state.step)) == (2 * DEVICES, 1)
    np.testing.assert_allclose(state.params["w"], 1 - factor * mean, rtol=1e-6)
    np.testing.assert_allclose(state.params["b"], -factor * mean, rtol=1e-6)
    for other in replicas(state)[1:]:
        np.testing.assert_array_equal(other, replicas(state)[0])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}])
def test_a_nan_on_one_device_skips_the_update_on_all(options, check_vma):
    step = sharded_step(check_vma)
    before = make_state(**options)
    state, _ = step(before, jnp.ones(2 * DEVICES).at[5].set(jnp.nan))
    assert (int(state.step), int(state.skipped), bool(state.has_nan)) == (0, 1, True)
    for own in replicas(state):
        np.testing.assert_array_equal(own, before.weights[0])
    state, _ = step(state, jnp.ones(2 * DEVICES))
    assert (int(state.step), int(state.consecutive_skips)) == (1, 0)
    np.testing.assert_allclose(state.params["b"], -1 / (np.sqrt(11) if options else 1), rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_trust_ratios_are_those_of_the_mean(check_vma):
    optimizer = jr.lars(1.0, trust_coefficient=0.5, trust_ratio_mask=True, backend="xla")
    state = jr.TrainState.create(PARAMS, optimizer)
    state, _ = sharded_step(check_vma)(state, jnp.arange(1.0, 2 * DEVICES + 1))
    np.testing.assert_allclose(state.trust_ratios()["w"], 0.5 / 4.5, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], np.full((3, 2), 0.5), rtol=1e-6)


def test_members_of_a_mapped_axis_share_one_sum():
    step = jax.vmap(local_step, axis_name="data", in_axes=(None, 0))
    states, counts = step(make_state(), jnp.asarray([[1.0, 3.0], [5.0, 7.0]]))
    np.testing.assert_array_equal(counts, [4, 4])
    np.testing.assert_array_equal(jax.vmap(lambda s: s.params["b"])(states), np.full((2, 5), -4.0))


def test_a_sum_that_overflows_over_devices_is_seen_where_norms_are_taken():
    step = jax.vmap(local_step, axis_name="data", in_axes=(None, 0))
    states, _ = step(make_state(max_norm=1.0), jnp.full((2, 2), 1.5e38))
    np.testing.assert_array_equal(states.skipped, [1, 1])
    np.testing.assert_array_equal(states.step, [0, 0])


def test_sums_lie_where_the_state_lies():
    device = jax.devices()[-1]
    state = jax.device_put(make_state(), device)
    sums = state.zero_gradients()
    assert {d for x in jax.tree.leaves(sums) for d in x.devices()} == {device}
    assert state.accumulate(sums, jax.device_put(PARAMS, device)).ints.devices() == {device}


def test_counters_or_sums_of_another_kind_are_refused():
    state = make_state()
    sums = state.zero_gradients()
    spoiled = {
        "ints: got float32": dataclasses.replace(sums, ints=sums.ints.astype(np.float32)),
        r"arenas: got float32\[\]": dataclasses.replace(sums, arenas=(jnp.zeros(()),)),
    }
    for message, other in spoiled.items():
        with pytest.raises(ValueError, match=f"grads: {message}.*psum"):
            state.apply_gradients(other)
        with pytest.raises(ValueError, match=f"sums: {message}.*psum"):
            state.accumulate(other, PARAMS)


def test_without_a_micro_batch_extra_stays_too():
    optimizer = jr.sgd(1.0, backend="xla")
    state = jr.TrainState.create(PARAMS, optimizer, extra=jnp.zeros(()))
    new = state.apply_gradients(state.zero_gradients(), extra=jnp.ones(()))
    assert (int(new.step), float(new.extra)) == (0, 0.0)
