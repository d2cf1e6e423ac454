"""States over meshes of several axes, and of axes that are explicit."""

import functools

import jax
import pytest
from arenas import native_backends
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    FORMS,
    STACKED,
    assert_lies_as_its_form_says,
    assert_replicas_agree,
    assert_same_training,
    batch,
    loss_fn,
    make,
    make_mesh,
    on_backends,
    train_step,
    trained,
    tree,
)

import jaxrenaissance as jr

OVER_BOTH = {
    "kernel": P(None, ("data", "model")),
    "large/kernel": P("model", "data"),
    "stack": P(None, "model"),
}
HOW = ("jit", "shard_map")


def optimizer(backend):
    return jr.lamb(
        0.1,
        eps=1e-3,
        mask=True,
        max_norm=0.5,
        ema_decay=0.9,
        metrics=["leaves", "param_norm", "update_norm"],
        backend=backend,
    )


@functools.cache
def on_one_device(backend):
    return trained(make(optimizer(backend), stacked=STACKED), tree(1))


def check(state, backend):
    assert_same_training(state, on_one_device(backend))
    assert_lies_as_its_form_says(state)
    assert_replicas_agree((state, state.params, state.metrics))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS)
@native_backends
def test_axes_may_be_explicit(form, how, backend):
    mesh = make_mesh(backend, kind=AxisType.Explicit)
    state = make(optimizer(backend), mesh, form, stacked=STACKED)
    check(trained(state, tree(1), how), backend)


@pytest.mark.parametrize("form", FORMS)
@native_backends
def test_the_mesh_may_be_set(form, backend):
    mesh = make_mesh(backend, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        state = make(optimizer(backend), mesh, form, stacked=STACKED)
        state = trained(state, tree(1), steps=4)
        assert_same_training(state, on_one_device(backend))


@pytest.mark.parametrize("how", HOW)
@native_backends
def test_zero1_cuts_over_the_data_axis_alone(how, backend):
    mesh = make_mesh(backend, (4, 2), ("data", "model"))
    state = make(optimizer(backend), mesh, "zero1", stacked=STACKED)
    assert state.weights[0].sharding.spec == P("data")
    check(trained(state, tree(1), how), backend)


@on_backends(["how"], [[how] for how in HOW], on_xla=[["shard_map"]])
def test_leaves_lie_over_all_axes(how, backend):
    mesh = make_mesh(backend, (4, 2), ("data", "model"))
    state = make(optimizer(backend), mesh, "leaves", specs=OVER_BOTH, stacked=STACKED)
    params = state.params
    for path, spec in (("kernel", OVER_BOTH["kernel"]), ("bias", P())):
        assert params[path].sharding.is_equivalent_to(NamedSharding(mesh, spec), params[path].ndim)
    check(trained(state, tree(1), how, specs=OVER_BOTH), backend)


@pytest.mark.parametrize(
    ("form", "how"), [("replicated", "shard_map"), *(("zero1", h) for h in HOW)]
)
@pytest.mark.parametrize("data_axis", [("a", "b"), ("b", "a")])
@native_backends
def test_data_may_be_cut_over_several_axes_in_any_order(data_axis, form, how, backend):
    mesh = make_mesh(backend, (2, 4), ("a", "b"))
    state = make(optimizer(backend), mesh, form, stacked=STACKED, data_axis=data_axis)
    check(trained(state, tree(1), how, data_axis=data_axis), backend)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", ["replicated", "zero1"])
@native_backends
def test_gradients_that_the_user_has_averaged_give_the_same(form, check_vma, backend):
    mesh, waves = make_mesh(backend), tree(1)
    state = make(optimizer(backend), mesh, form, stacked=STACKED)

    def local_step(state, xs):
        grads = jax.grad(loss_fn)(state.compute_params, waves, xs)
        return state.apply_gradients(jax.lax.pmean(grads, "data"))

    specs = state.partition_specs
    where = {"mesh": mesh, "in_specs": (specs, P("data")), "out_specs": specs}
    step = jax.jit(jax.shard_map(local_step, check_vma=check_vma, **where))
    for i in range(4):
        state = step(state, batch(i))
    check(state, backend)


@native_backends
def test_a_shard_map_over_the_data_axis_may_leave_the_others_to_xla(backend):
    mesh, waves = make_mesh(backend, (4, 2), ("data", "model")), tree(1)
    state = make(optimizer(backend), mesh, "zero1", stacked=STACKED)
    specs = state.partition_specs
    where = {"mesh": mesh, "in_specs": (specs, P(), P("data")), "out_specs": specs}
    step = jax.jit(jax.shard_map(train_step, axis_names={"data"}, **where))
    for i in range(4):
        state = step(state, waves, batch(i))
    check(state, backend)
