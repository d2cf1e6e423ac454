"""TrainState: what it gives back, how it is made, and what it refuses."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from states import assert_buffers_equal, assert_trees_equal, mlp, ones_like

import jaxrenaissance as jr
from jaxrenaissance import scalars


def test_params_come_back_and_moments_start_at_zero(backend):
    params = mlp()
    state = jr.TrainState.create(params, jr.adamw(1e-3, mask="weights", backend=backend))
    assert_trees_equal(state.params, params)
    assert_trees_equal(state.compute_params, params)
    assert_trees_equal(state.trainable_params, params)
    assert [len(m) for m in state.moments] == [2]
    assert all((m == 0).all() for m in jax.tree.leaves(state.moments))
    # weights, two moments, floats and ints, whatever the number of leaves.
    assert len(jax.tree.leaves(state)) == 5
    assert len(jax.tree.leaves(jr.TrainState.create(params, jr.sgd(0.1, backend=backend)))) == 3
    assert [int(n) for n in (state.step, state.calls, state.skipped)] == [0, 0, 0]
    assert state.spec.kind == "adamw"
    assert state.plan.num_parameters == 36


class Block(NamedTuple):
    kernel: object
    bias: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Head:
    w: object
    b: object


def test_trees_of_every_container(backend):
    tied = jnp.ones((2, 2))
    params = {
        "blocks": [Block(jnp.ones((2, 2)), jnp.ones(2)), Block(jnp.full((2, 2), 2.0), None)],
        "head": Head(tied, jnp.asarray(3.0)),
        "tail": (tied, {"bias": jnp.ones(())}),
    }
    state = jr.TrainState.create(params, jr.sgd(1.0, backend=backend))
    assert_trees_equal(state.params, params)
    paths = [leaf.path for leaf in state.plan.leaves]
    assert paths[:3] == ["blocks/0/kernel", "blocks/0/bias", "blocks/1/kernel"]
    state = state.apply_gradients(params)
    assert_trees_equal(state.params, jax.tree.map(jnp.zeros_like, params))


def test_frozen_dict_and_nnx_state_trees(backend):
    flax = pytest.importorskip("flax")
    from flax import nnx

    frozen = flax.core.freeze({"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}})
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for params in (frozen, nnx.state(model, nnx.Param)):
        state = jr.TrainState.create(params, jr.sgd(1.0, backend=backend))
        assert_trees_equal(state.params, params)
        new = state.apply_gradients(ones_like(params)).params
        assert_trees_equal(new, jax.tree.map(lambda x: x - 1, params))
        regions = {leaf.path.split("/")[-1]: leaf.region for leaf in state.plan.leaves}
        assert len(set(regions.values())) == len(regions) or len(regions) == 1


@pytest.mark.parametrize("params", [{}, {"a": None}, jnp.ones(()), {"a": jnp.zeros((0, 3))}])
def test_trees_with_no_leaf_one_leaf_and_none_but_empty_ones(params, backend):
    state = jr.TrainState.create(params, jr.adamw(0.1, mask="weights", backend=backend))
    state = jax.jit(lambda s, g: s.apply_gradients(g))(state, ones_like(params))
    assert int(state.step) == 1
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    if isinstance(params, jax.Array):
        np.testing.assert_allclose(state.params, 0.9, rtol=1e-6)


def test_repr_fits_one_screen_also_of_what_is_traced_or_donated():
    params = {f"layer{i}": {"kernel": jnp.ones((2, 2))} for i in range(300)}
    schedule = optax.cosine_decay_schedule(1e-3, 10)
    stats = jr.Packed({"mean": jnp.ones(3)}, backend="xla")
    state = jr.TrainState.create(
        params, jr.adamw(schedule, mask="weights", backend="xla"), extra=stats
    )
    seen = [repr(state), repr(jax.eval_shape(lambda: state))]
    jax.jit(lambda s: seen.append(repr(s)))(state)
    many = jax.vmap(lambda _: state)(jnp.arange(3))
    seen.append(repr(many))
    jax.jit(lambda s: s, donate_argnums=0)(state)
    seen.append(repr(state))
    for text in seen:
        assert len(text.splitlines()) < 12
        assert max(map(len, text.splitlines())) < 120
    assert "adamw, backend xla, step 0, skipped 0" in seen[0]
    assert "300 leaves, 1,200 parameters, computed in float32" in seen[0]
    assert "traced" in seen[1]
    assert "traced" in seen[2]
    assert "3 members" in seen[3]


def test_init_makes_the_same_state_as_create(backend):
    optimizer = jr.adamw(1e-3, mask="weights", backend=backend)

    def make():
        keys = jax.random.split(jax.random.key(0))
        kernel = jax.random.normal(keys[0], (3, 4))
        return {"kernel": kernel, "bias": jax.random.normal(keys[1], (4,))}

    created = jr.TrainState.create(make(), optimizer, compute_dtype="bfloat16")
    made = jr.TrainState.init(make, optimizer, compute_dtype="bfloat16")
    assert jax.tree.structure(created) == jax.tree.structure(made)
    assert_buffers_equal(created, made)
    with_extra = jr.TrainState.init(lambda: (make(), {"n": jnp.ones(2)}), optimizer, has_extra=True)
    np.testing.assert_array_equal(with_extra.extra["n"], 1.0)
    with pytest.raises(ValueError, match="has_extra: fn must return a pair"):
        jr.TrainState.init(make, optimizer, has_extra=True)


def test_states_with_every_series_are_made_alike_and_fit_one_screen(backend):
    optimizer = jr.adam(
        1e-3,
        ema_decay=0.9,
        accumulate=jr.Accumulate(4),
        metrics="leaves",
        groups=[jr.Group("*/bias", scale=2.0)],
        loss_scale=jr.DynamicLossScale(growth_interval=7),
        backend=backend,
    )
    extra = {"n": jnp.ones(2)}
    created = jr.TrainState.create(mlp(), optimizer, extra=extra, ema_extra=True)
    made = jr.TrainState.init(lambda: (mlp(), extra), optimizer, has_extra=True, ema_extra=True)
    shapes = jax.eval_shape(
        lambda p: jr.TrainState.create(p, optimizer, extra=extra, ema_extra=True), mlp()
    )
    assert jax.tree.structure(created) == jax.tree.structure(made) == jax.tree.structure(shapes)
    assert_buffers_equal(created, made)
    for state in (created, shapes):
        text = repr(state)
        assert "weights and 2 moments, an average, an accumulator" in text
        assert len(text.splitlines()) < 12
    assert created.ema[0] is not created.weights[0]
    assert_buffers_equal(created.ema, created.weights)
    assert all((x == 0).all() for x in (*created.accumulator, *created.norms))


def test_init_has_no_second_copy_of_the_weights():
    optimizer = jr.adamw(1e-3, mask="weights", backend="xla")
    before = {id(x) for x in jax.live_arrays()}
    state = jr.TrainState.init(lambda: {"kernel": jnp.ones((100, 100))}, optimizer)
    made = [x for x in jax.live_arrays() if id(x) not in before and x.size >= 10_000]
    assert len(made) == 3
    assert len(jax.tree.leaves(state)) == 5


def test_eval_shape_of_create_takes_shapes():
    shapes = jax.eval_shape(mlp)
    optimizer = jr.adamw(1e-3, mask="weights", backend="xla")
    state = jax.eval_shape(lambda p: jr.TrainState.create(p, optimizer), shapes)
    assert state.weights[0].shape == (state.plan.arenas[0].size,)
    assert jax.tree.structure(state) == jax.tree.structure(jr.TrainState.create(mlp(), optimizer))


def test_a_state_of_several_members_says_so(backend):
    optimizer = jr.sgd(0.1, backend=backend)
    state = jax.vmap(lambda w: jr.TrainState.create({"w": w}, optimizer))(jnp.ones((3, 2)))
    for call in (
        lambda: state.apply_gradients({"w": jnp.ones(2)}),
        lambda: state.replace(params={"w": jnp.ones(2)}),
    ):
        with pytest.raises(ValueError, match=r"holds \(3,\) members, made by jax\.vmap"):
            call()


def test_last_bad_counters_start_out_empty():
    state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(0.1, backend="xla"))
    assert state.ints[scalars.LAST_BAD_LEAF] == -1
    assert state.ints[scalars.FIRST_BAD] == scalars.NO_LEAF


def test_leaves_an_arena_cannot_hold_are_refused_by_path():
    for leaf, dtype in [
        (jnp.ones(2, jnp.int32), "int32"),
        (jnp.ones(2, bool), "bool"),
        (jnp.ones(2, jnp.complex64), "complex64"),
        (jax.random.key(0), "key"),
    ]:
        with pytest.raises(ValueError, match=f"'m/n' has dtype {dtype}.*trainable="):
            jr.TrainState.create({"m": {"n": leaf, "w": jnp.ones(2)}}, jr.sgd(0.1))
    params = {"w": jnp.ones(2), "activation": jax.nn.relu}
    with pytest.raises(ValueError, match="'activation'"):
        jr.TrainState.create(params, jr.sgd(0.1))
    with pytest.raises(ValueError, match=r"params: the leaf 'activation' is a .*eqx.filter"):
        jr.TrainState.create(params, jr.sgd(0.1), trainable="w")


def test_sharded_arrays_are_refused_with_advice_and_replicated_ones_train():
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    if mesh.size < 2:
        pytest.skip("JAX has one device here")
    optimizer = jr.sgd(0.5, backend="xla")
    params = {"w": jnp.ones((mesh.size, 2)), "b": jnp.ones(2)}
    sharded = {**params, "w": jax.device_put(params["w"], NamedSharding(mesh, PartitionSpec("x")))}
    with pytest.raises(ValueError, match=r"params: the leaf 'w' is sharded.*PartitionSpec\(\)"):
        jr.TrainState.create(sharded, optimizer)
    state = jr.TrainState.create(params, optimizer)
    with pytest.raises(ValueError, match="params: the leaf 'w' is sharded"):
        state.replace(params=sharded)
    replicated = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    state = jr.TrainState.create(replicated, optimizer).apply_gradients(replicated)
    np.testing.assert_array_equal(state.params["w"], 0.5)
