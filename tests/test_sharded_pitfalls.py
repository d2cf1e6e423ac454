"""What is easily done wrong with a state on a mesh, and what then happens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import make_mesh, on_mesh

import jaxrenaissance as jr

PARAMS = {"cut": np.arange(16, dtype=np.float32).reshape(8, 2), "whole": np.ones(3, np.float32)}
SPECS = {"cut": P("data")}
CHECKS = pytest.mark.parametrize("check_vma", [True, False])


def create(form, mesh, specs=SPECS, **options):
    params = on_mesh(PARAMS, mesh, specs) if form == "leaves" else PARAMS
    optimizer = jr.sgd(1.0, backend="xla")
    return jr.TrainState.create(params, optimizer, mesh=mesh, sharding=form, **options)


def over(mesh, fn, state, xs, check_vma, **options):
    specs = state.partition_specs
    where = {"in_specs": (specs, P("data")), "out_specs": options.get("out_specs", specs)}
    return jax.jit(jax.shard_map(fn, mesh=mesh, check_vma=check_vma, **where))(state, xs)


def loss_fn(params, xs):
    return sum(jnp.sum(x) for x in jax.tree.leaves(params)) * jnp.mean(xs)


@CHECKS
@pytest.mark.parametrize("form", ["replicated", "zero1"])
@pytest.mark.parametrize("read", ["params", "compute_params", "trainable_params"])
def test_gradients_for_any_of_the_parameters_are_each_devices_own(form, read, check_vma):
    mesh = make_mesh("xla", (4,))

    def step(state, xs):
        return state.apply_gradients(jax.grad(loss_fn)(getattr(state, read), xs))

    state = over(mesh, step, create(form, mesh), jnp.arange(8.0), check_vma)
    np.testing.assert_allclose(state.params["whole"], 1 - 3.5, rtol=1e-6)


@pytest.mark.parametrize("form", ["replicated", "zero1"])
def test_a_mean_of_losses_in_the_gradient_makes_it_smaller_where_jax_checks(form):
    mesh = make_mesh("xla", (4,))

    def step(state, xs):
        def mean_loss(params):
            return jax.lax.pmean(loss_fn(params, xs), "data")

        return state.apply_gradients(jax.grad(mean_loss)(state.compute_params))

    state = over(mesh, step, create(form, mesh), jnp.arange(8.0), True)
    np.testing.assert_allclose(state.params["whole"], 1 - 3.5 / 4, rtol=1e-6)


@CHECKS
@pytest.mark.parametrize("form", ["replicated", "zero1"])
def test_extra_goes_with_sums_of_which_some_devices_have_none(form, check_vma):
    mesh = make_mesh("xla", (4,))
    grads = jax.tree.map(np.ones_like, PARAMS)

    def step(state, xs):
        sums = state.zero_gradients()
        some = jax.lax.axis_index("data") > 0
        sums = jax.lax.cond(some, lambda s: state.accumulate(s, grads), lambda s: s, sums)
        return state.apply_gradients(sums, extra=jnp.ones(()))

    state = create(form, mesh, extra=jnp.zeros(()))
    new = over(mesh, step, state, jnp.arange(4.0), check_vma)
    for shard in new.extra.addressable_shards:
        np.testing.assert_array_equal(shard.data, 1.0)
    np.testing.assert_allclose(new.params["whole"], 0.0, atol=1e-6)


def test_with_leaves_gradients_that_are_not_reduced_are_refused():
    mesh = make_mesh("xla", (4,))

    def step(state, xs):
        return state.apply_gradients(jax.grad(loss_fn)(state.compute_params, xs))

    def step_by_sums(state, xs):
        grads = jax.grad(loss_fn)(state.compute_params, xs)
        return state.apply_gradients(state.accumulate(state.zero_gradients(), grads))

    for run in (step, step_by_sums):
        with pytest.raises(ValueError, match=r"grads: 'whole' is sharded as .*'data'.*pmean"):
            over(mesh, run, create("leaves", mesh), jnp.arange(4.0), True)


@CHECKS
def test_with_leaves_sums_of_reduced_gradients_are_taken(check_vma):
    mesh = make_mesh("xla", (4,))

    def step(state, xs):
        grads = jax.grad(loss_fn)(state.compute_params, xs)
        whole = jax.lax.pmean(grads["whole"], "data")
        sums = state.accumulate(state.zero_gradients(), {**grads, "whole": whole})
        return state.apply_gradients(sums)

    state = over(mesh, step, create("leaves", mesh), jnp.arange(8.0), check_vma)
    np.testing.assert_allclose(state.params["whole"], 1 - 3.5, rtol=1e-6)


def test_parts_of_a_cut_leaf_are_not_added_up():
    mesh = make_mesh("xla", (4,))

    def step(state, xs):
        return state.apply_gradients(state.zero_gradients().psum("data"))

    with pytest.raises(ValueError, match="axis_name: along 'data' leaves are cut"):
        over(mesh, step, create("leaves", mesh), jnp.arange(4.0), False)


def test_a_shard_map_over_another_axis_is_refused():
    mesh = make_mesh("xla", (2, 2), ("data", "model"))
    state = create("zero1", mesh)
    run = jax.shard_map(
        lambda state: state.apply_gradients(jax.tree.map(jnp.ones_like, PARAMS)),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        axis_names={"model"},
        check_vma=False,
    )
    with pytest.raises(ValueError, match=r"mesh: the state lies over .*'data'.*'model'"):
        jax.jit(run)(state)


def test_specs_of_members_leave_out_their_axes():
    mesh = make_mesh("xla", (4,))
    states = jax.vmap(lambda _: create("zero1", mesh))(jnp.arange(3))
    assert states.partition_specs.weights == (P(None, "data"),)
    assert states.partition_specs.ints == P()


def test_frozen_leaves_may_stay_where_others_are_replaced():
    mesh = make_mesh("xla", (4,))
    state = create("zero1", mesh, trainable="cut")
    other = jax.device_put(PARAMS["cut"] + 1, jax.devices("cpu")[-1])
    new = state.replace(params={"cut": other, "whole": None})
    np.testing.assert_array_equal(new.params["cut"], PARAMS["cut"] + 1)
    np.testing.assert_array_equal(new.params["whole"], PARAMS["whole"])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_leaves_may_be_sharded_anew(kind):
    mesh = make_mesh("xla", (4,), kind=kind)
    state = create("leaves", mesh)
    with jax.set_mesh(mesh):
        new = state.replan(on_mesh(PARAMS, mesh, {}))
        assert new.params["cut"].sharding.is_equivalent_to(NamedSharding(mesh, P()), 2)
        np.testing.assert_array_equal(new.params["cut"], PARAMS["cut"])
