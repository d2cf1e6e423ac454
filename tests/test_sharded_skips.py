"""A gradient that is not finite on one device, or in a piece of one, skips the step on all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import native_backends
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    FORMS,
    HOW,
    SPECS,
    STACKED,
    assert_replicas_agree,
    assert_same_training,
    batch,
    loss_fn,
    make,
    make_mesh,
    on_backends,
    on_mesh,
    stepper,
    tree,
)
from states import assert_trees_equal

import jaxrenaissance as jr

SCALED = {"loss_scale": jr.DynamicLossScale(initial=8.0), "ema_decay": 0.9}
OPTIMIZERS = {
    "looked at alone": functools.partial(jr.adamw, 0.1, eps=1e-3, **SCALED),
    "with norms": functools.partial(jr.lamb, 0.1, eps=1e-3, mask=True, max_norm=0.5, **SCALED),
}


def series(state):
    return state.weights, state.moments, state.ema, state.extra


def assert_skipped(new, old, skips=1):
    """On all devices, and with nothing else changed."""
    assert (int(new.step), int(new.consecutive_skips), bool(new.has_nan)) == (0, skips, True)
    assert_trees_equal(series(new), series(old))
    assert_replicas_agree(new)
    if new.spec.loss_scale:
        assert float(new.loss_scale) == 8 / 2**skips


def assert_blamed(state, path):
    with pytest.raises(FloatingPointError, match=f"the gradient of '{path}' had a NaN"):
        jr.check(state, max_consecutive=0)


def poisoned_step(state, waves, check_vma=True):
    """A step in `jax.shard_map` where each device adds a number of its own to one gradient."""
    mesh, specs = state.plan.placement.mesh, state.partition_specs

    def local_step(state, xs, number):
        scaled = jax.grad(lambda p: state.scale_loss(loss_fn(p, waves, xs)))
        grads = scaled(state.compute_params)
        grads["odd"] = grads["odd"].at[-1, -1].add(number[0])
        return state.apply_gradients(grads)

    where = {"mesh": mesh, "in_specs": (specs, P("data"), P("data")), "out_specs": specs}
    return jax.jit(jax.shard_map(local_step, check_vma=check_vma, **where))


@on_backends(
    ("form", "kind"),
    [(form, kind) for form in FORMS[:2] for kind in OPTIMIZERS],
    on_xla=[("zero1", "with norms")],
)
def test_a_nan_of_one_device_skips_the_step_on_all_and_the_next_is_the_first(form, kind, backend):
    optimizer, waves = OPTIMIZERS[kind](backend=backend), tree(1)
    old = make(optimizer, make_mesh(backend), form)
    step = poisoned_step(old, waves, check_vma=form == "zero1")
    for number, device in ((np.nan, 5), (np.inf, 0), (-np.inf, 7)):
        state = step(old, batch(0), np.where(np.arange(8) == device, number, 0).astype(np.float32))
        assert_skipped(state, old)
        assert_blamed(state, "odd")
    state = step(state, batch(0), np.zeros(8, np.float32))
    one, bad = make(optimizer), tree(3)
    bad["odd"][0, 0] = np.nan
    one = stepper(one, waves, "jit")(one.apply_gradients(bad), batch(0))
    assert int(state.step) == 1
    assert_same_training(state, one)


@pytest.mark.parametrize("how", HOW[:2])
@pytest.mark.parametrize("form", FORMS)
@native_backends
def test_a_nan_in_the_batch_skips_the_step(form, how, backend):
    optimizer = OPTIMIZERS["looked at alone"](backend=backend)
    old = make(optimizer, make_mesh(backend), form)
    step = stepper(old, tree(1), how)
    xs = batch(0)
    xs[-1] = np.nan
    state = step(step(old, xs), xs)
    assert_skipped(state, old, skips=2)
    assert int(step(state, batch(0)).step) == 1


@on_backends(
    ("form", "kind"),
    [(form, kind) for form in FORMS[1:] for kind in OPTIMIZERS],
    on_xla=[("zero1", "with norms")],
)
def test_a_nan_in_the_last_element_of_any_leaf_is_seen_and_blamed_on_it(form, kind, backend):
    """Of a leaf whose last piece is short, or empty; that is copied, or of an other device."""
    mesh = make_mesh(backend)
    old = make(OPTIMIZERS[kind](backend=backend), mesh, form, stacked=STACKED)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads))
    for leaf in old.plan.leaves:
        if leaf.size:
            grads = tree(3)
            keys = leaf.path.split("/")
            own = functools.reduce(dict.get, keys, grads)
            own[(-1,) * own.ndim] = np.nan
            grads = on_mesh(grads, mesh, SPECS if form == "leaves" else {})
            state = step(old, grads)
            assert_skipped(state, old)
            assert_blamed(state, leaf.path)
            assert not state.spec.trust or all((x == 1).all() for x in state.ratios)


@pytest.mark.parametrize("form", FORMS[:2])
@native_backends
def test_a_cycle_of_micro_batches_is_skipped_as_a_whole(form, backend):
    optimizer = jr.adamw(
        0.1, eps=1e-3, accumulate=jr.Accumulate(2), max_norm=0.5, ema_decay=0.9, backend=backend
    )
    waves = tree(1)
    old = make(optimizer, make_mesh(backend), form)
    step = poisoned_step(old, waves)
    none, bad = np.zeros(8, np.float32), np.zeros(8, np.float32)
    bad[6] = np.nan
    state = step(step(old, batch(0), bad), batch(1), none)
    assert (int(state.step), int(state.skipped), int(state.calls)) == (0, 1, 2)
    assert_trees_equal(series(state), series(old))
    assert_blamed(state, "odd")
    state = step(step(state, batch(2), none), batch(3), none)
    one = make(optimizer)
    alone = stepper(one, waves, "jit")
    one = alone(alone(one, batch(2)), batch(3))
    assert (int(state.step), int(state.consecutive_skips)) == (1, 0)
    for got, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=4e-6)
    assert_replicas_agree(state)


@pytest.mark.parametrize("form", FORMS[:2])
@native_backends
def test_micro_batches_of_a_scan_are_skipped_where_one_of_one_device_is_bad(form, backend):
    optimizer, waves = OPTIMIZERS["with norms"](backend=backend), tree(1)
    old = make(optimizer, make_mesh(backend), form)
    mesh, specs = old.plan.placement.mesh, old.partition_specs

    def local_step(state, xs):
        def micro_step(sums, x):
            return state.accumulate(sums, jax.grad(loss_fn)(state.compute_params, waves, x)), None

        sums, _ = jax.lax.scan(micro_step, state.zero_gradients(), xs)
        return state.apply_gradients(sums)

    where = {"mesh": mesh, "in_specs": (specs, P(None, "data")), "out_specs": specs}
    step = jax.jit(jax.shard_map(local_step, **where))
    bad = jnp.stack([batch(0), batch(1), batch(2)])
    state = step(old, bad.at[1, 20].set(jnp.nan))
    assert_skipped(state, old)
    assert int(step(state, jax.device_put(bad, NamedSharding(mesh, P(None, "data")))).step) == 1


@pytest.mark.parametrize("how", HOW)
@native_backends
def test_micro_batches_of_leaves_are_skipped_where_the_part_of_one_device_is_bad(how, backend):
    old = make(OPTIMIZERS["looked at alone"](backend=backend), make_mesh(backend), "leaves")
    grads = tree(3)
    grads["large"]["kernel"][-1, -1] = np.nan
    grads = on_mesh(grads, old.plan.placement.mesh)

    def step(state, grads):
        sums = state.accumulate(state.zero_gradients(), tree_of_zeros(grads))
        return state.apply_gradients(state.accumulate(sums, grads))

    def tree_of_zeros(grads):
        return jax.tree.map(lambda x: 0 * jnp.nan_to_num(x), grads)

    if how != "jit":
        specs = old.partition_specs, jax.tree.map(lambda x: x.sharding.spec, grads)
        where = {"mesh": old.plan.placement.mesh, "in_specs": specs, "out_specs": specs[0]}
        step = jax.shard_map(step, check_vma=how == "shard_map", **where)
    state = jax.jit(step)(old, grads)
    assert_skipped(state, old)
    assert_blamed(state, "large/kernel")


@pytest.mark.parametrize("form", FORMS[1:])
@native_backends
def test_sums_tell_on_all_devices_of_what_one_has_found(form, backend):
    state = make(OPTIMIZERS["looked at alone"](backend=backend), make_mesh(backend), form)
    grads = tree(3)
    grads["large"]["kernel"][-1, -1] = np.nan
    grads = on_mesh(grads, state.plan.placement.mesh, SPECS if form == "leaves" else {})
    sums = jax.jit(lambda s, g: s.accumulate(s.zero_gradients(), g))(state, grads)
    assert bool(sums.has_nan)
    assert int(sums.count) == 1
    assert_replicas_agree(sums)
