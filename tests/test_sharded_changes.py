"""States over devices that are saved, restored and changed: the same as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arenas import native_backends
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    FORMS,
    HOW,
    STACKED,
    assert_lies_as_its_form_says,
    assert_replicas_agree,
    assert_same_training,
    averaged,
    batch,
    loss_fn,
    make,
    make_mesh,
    on_backends,
    on_mesh,
    stepper,
    trained,
    tree,
)
from states import assert_buffers_equal, assert_trees_equal

import jaxrenaissance as jr

PLACES = [(None, 1), *((form, devices) for form in FORMS for devices in (1, 2, 8))]
STATS = {"mean": (3,), "var": (2, 5)}


def optimizer(backend, **options):
    own = {"max_norm": 0.5, "ema_decay": 0.9, "ema_debias": True, "eps": 1e-3}
    own |= {"loss_scale": jr.StaticLossScale(2.0), "metrics": ["leaves", "update_norm"]}
    return jr.adamw(0.1, mask=True, backend=backend, **own, **options)


def create(backend, form=None, devices=8, **options):
    mesh = None if form is None else make_mesh(backend, (devices,))
    extra = jr.Packed(tree(2, STATS), backend=backend)
    own = {"stacked": STACKED, "extra": extra, "ema_extra": True}
    return make(optimizer(backend, **options), mesh, form or "replicated", **own)


@functools.cache
def template(backend, form=None, devices=1):
    return create(backend, form, devices, accumulate=jr.Accumulate(2))


@functools.cache
def saved(backend):
    """In the middle of a cycle of micro-batches."""
    return trained(template(backend), tree(1), steps=3).to_leaves(host=True)


@functools.cache
def once_trained(backend, form=None):
    return trained(create(backend, form), tree(1), steps=1)


@pytest.mark.parametrize(("form", "devices"), PLACES)
@native_backends
def test_a_checkpoint_of_any_form_and_device_count_restores_under_any_other(form, devices, backend):
    source = jr.TrainState.from_leaves(saved(backend), template(backend, form, devices))
    if form is not None:
        assert_lies_as_its_form_says(source)
        assert_replicas_agree(source)
    on_host, on_devices = source.to_leaves(host=True), source.to_leaves()
    assert_trees_equal(on_host, saved(backend))
    for place in PLACES:
        leaves = on_host if form is None and place[0] is None else on_devices
        if place[0] is None:  # Leaves that lie on a mesh are not for one device.
            leaves = on_host
        again = jr.TrainState.from_leaves(leaves, template(backend, *place))
        assert_trees_equal(again.to_leaves(host=True), saved(backend))


@on_backends(["form"], [[form] for form in FORMS], on_xla=[["zero1"]])
def test_what_was_restored_goes_on(form, backend):
    like = template(backend, form, 8)
    state = jr.TrainState.from_leaves(saved(backend), jax.eval_shape(lambda: like))
    one = jr.TrainState.from_leaves(saved(backend), template(backend))
    new, wanted = (stepper(s, tree(1), "jit")(s, batch(3)) for s in (state, one))
    assert_lies_as_its_form_says(new)
    assert int(new.step) == 2
    assert_same_training(new, wanted)


def changes(backend):
    other = tree(5)
    return {
        "map_params": lambda s: s.map_params(jnp.tanh, "large/*"),
        "reset_moments": lambda s: s.reset_moments(["large/*", "stack"]),
        "replace": lambda s: s.replace(params=other),
        "with_ema": lambda s: s.with_ema(),
        "lerp to a tree": lambda s: jr.lerp(s, other, 0.25),
        "lerp to a Packed": lambda s: jr.lerp(s, jr.Packed(other, backend=backend), 0.25),
        "lerp to one device's": lambda s: jr.lerp(s, create(backend).replace(params=other), 0.25),
        "lerp to its own": lambda s: jr.lerp(s, s.map_params(jnp.tanh), 0.25),
        "numbers": lambda s: s.replace_hyperparams(loss_scale=4.0, b1=0.5),
        "replan": lambda s: s.replan(other | {"more": np.ones(40, np.float32)}),
        "from_leaves": lambda s: jr.TrainState.from_leaves(s.to_leaves(), s),
    }


@pytest.mark.parametrize("change", changes("xla"))
@pytest.mark.parametrize("form", FORMS)
@native_backends
def test_a_change_is_that_of_one_device(form, change, backend):
    new, wanted = (changes(backend)[change](once_trained(backend, own)) for own in (form, None))
    assert_same_training(new, wanted)
    assert_lies_as_its_form_says(new)
    assert_replicas_agree((new, new.params, new.ema_params))
    assert_trees_equal(jax.tree.map(np.asarray, new.ema_params), new.with_ema().params)


INSIDE_JIT = ("map_params", "reset_moments", "with_ema", "lerp to a tree", "lerp to its own")


def changed(state, backend):
    for name in INSIDE_JIT:
        state = changes(backend)[name](state)
    return state


@on_backends(["form"], [[form] for form in FORMS], on_xla=[["zero1"]])
def test_changes_in_jit_are_those_outside(form, backend):
    state = once_trained(backend, form)
    new = jax.jit(functools.partial(changed, backend=backend))(state)
    assert_lies_as_its_form_says(new)
    assert_same_training(new, changed(once_trained(backend), backend))


@pytest.mark.parametrize(
    ("form", "check_vma"), [("replicated", True), ("zero1", True), ("zero1", False)]
)
@native_backends
def test_changes_in_shard_map_are_those_outside(form, check_vma, backend):
    state = once_trained(backend, form)
    specs = state.partition_specs
    where = {"mesh": state.plan.placement.mesh, "in_specs": (specs,), "out_specs": specs}
    local = jax.shard_map(functools.partial(changed, backend=backend), check_vma=check_vma, **where)
    new = jax.jit(local)(state)
    assert_lies_as_its_form_says(new)
    assert_replicas_agree(new)
    assert_same_training(new, changed(once_trained(backend), backend))


@pytest.mark.parametrize("form", FORMS[1:])
@native_backends
def test_optax_goes_on_where_a_state_stands_and_back(form, backend):
    tx = optax.adamw(0.1, eps=1e-3)
    own = jr.adamw(0.1, eps=1e-3, weight_decay=1e-4, mask=True, backend=backend)
    state = trained(make(own, make_mesh(backend), form), tree(1), steps=2)
    params, opt_state = jr.to_optax(state, tx)
    grads = on_mesh(tree(3), make_mesh(backend), {})
    grads = jax.tree.map(lambda g, p: jax.device_put(g, p.sharding), grads, params)
    updates, after = jax.jit(tx.update)(grads, opt_state, params)
    theirs = optax.apply_updates(params, updates)
    over = {"mesh": make_mesh(backend), "sharding": form}
    again = jr.from_optax(theirs, after, own, **over)
    assert_lies_as_its_form_says(again)
    assert int(again.step) == 3
    wanted = state.apply_gradients(grads)
    for got, of_state in zip(
        (again.weights, again.moments), (wanted.weights, wanted.moments), strict=True
    ):
        assert_buffers_equal(got, of_state, rtol=2e-5, atol=4e-6)
    moved = jr.from_optax(*jr.to_optax(once := make(own), tx), own, **over)
    assert_trees_equal(jax.tree.map(np.asarray, moved.params), once.params)


def micro_steps(state, waves, xs, mean=lambda grads: grads):
    def micro_step(sums, x):
        grads = mean(jax.grad(loss_fn)(state.compute_params, waves, x))
        return state.accumulate(sums, grads), None

    sums, _ = jax.lax.scan(micro_step, state.zero_gradients(), xs)
    return state.apply_gradients(sums)


@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("replicated", "shard_map"),
        *(("zero1", how) for how in HOW),
        *(("leaves", how) for how in HOW[:2]),
    ],
)
@native_backends
def test_gradients_of_a_scan_add_up_to_those_of_one_device(form, how, backend):
    state, waves = once_trained(backend, form).replace_hyperparams(loss_scale=1.0), tree(1)
    wanted = once_trained(backend).replace_hyperparams(loss_scale=1.0)
    mesh, specs = state.plan.placement.mesh, state.partition_specs
    own, rows = (None, P()) if form == "leaves" else ({}, P(None, "data"))
    placed = on_mesh(waves, mesh) if own is None else on_mesh(waves, mesh, own)
    step = micro_steps
    if how != "jit":
        of_waves = jax.tree.map(lambda x: x.sharding.spec, placed)
        if form == "leaves":
            step = functools.partial(step, mean=lambda grads: averaged(grads, of_waves, mesh))
        where = {"mesh": mesh, "in_specs": (specs, of_waves, rows), "out_specs": specs}
        step = jax.shard_map(step, check_vma=how == "shard_map", **where)
    xs = np.stack([batch(0), batch(1), batch(2)])
    new = jax.jit(step)(state, placed, jax.device_put(xs, NamedSharding(mesh, rows)))
    assert_same_training(new, jax.jit(micro_steps)(wanted, waves, xs))
    assert_lies_as_its_form_says(new)
    assert_replicas_agree(new)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_made_under_jit_is_the_one_that_create_makes(form, backend):
    mesh, params = make_mesh(backend), tree(0)
    own = optimizer(backend)
    state = jr.TrainState.init(lambda: params, own, mesh=mesh, sharding=form)
    assert_lies_as_its_form_says(state)
    assert_trees_equal(jax.tree.map(np.asarray, state.params), params)


def test_repr_tells_the_form_and_the_devices():
    mesh = make_mesh("xla", (4, 2), ("data", "model"))
    own = jr.adamw(0.1, backend="xla")
    over_data = make(own, mesh, "replicated")
    assert "replicated over 8 devices, axis 'data'" in repr(over_data)
    leaves = repr(make(own, mesh, "leaves", specs={}))
    assert "leaves over 8 devices, axis 'data' and 'model'" in leaves
