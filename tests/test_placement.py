"""Over which devices a state lies: what `create` and `shard_map` are told of it, and refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import make_mesh

import jaxrenaissance as jr

PARAMS = {"w": np.ones((8, 4), np.float32), "b": np.ones(3, np.float32)}


def create(mesh=None, params=PARAMS, **options):
    return jr.TrainState.create(params, jr.sgd(1.0, backend="xla"), mesh=mesh, **options)


def placed(mesh, spec):
    """The parameters on the mesh, of which one leaf lies by the spec."""
    specs = {"w": spec, "b": P()}
    return {path: jax.device_put(x, NamedSharding(mesh, specs[path])) for path, x in PARAMS.items()}


def sharded(mesh):
    return placed(mesh, P("data"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding": "zero1"}, "sharding: 'zero1' needs a mesh, and mesh is None"),
        ({"sharding": "leaves"}, "sharding: 'leaves' needs a mesh, and mesh is None"),
        ({"sharding": "zero3"}, "sharding: expected one of replicated, zero1, leaves; got 'zero3'"),
        ({"reduce_dtype": "bfloat16"}, "reduce_dtype: it is for gradients of several devices"),
    ],
)
def test_without_a_mesh_there_is_nothing_to_cut(options, message):
    with pytest.raises(ValueError, match=message):
        create(**options)
    with pytest.raises(ValueError, match=message):
        jr.TrainState.init(lambda: PARAMS, jr.sgd(1.0), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding": "fsdp"}, "sharding: expected one of replicated, zero1, leaves; got 'fsdp'"),
        ({"data_axis": "batch"}, "data_axis: expected axes of the mesh, 'data'; got 'batch'"),
        ({"data_axis": ("data", "x")}, r"data_axis: expected axes .*got \('data', 'x'\)"),
        ({"data_axis": ()}, r"data_axis: expected axes of the mesh, 'data'; got \(\)"),
        ({"reduce_dtype": "int8"}, "reduce_dtype: expected float32, bfloat16, float16 or None"),
        ({"reduce_dtype": "float64"}, "reduce_dtype: expected float32.* got 'float64'"),
        ({"reduce_dtype": "half a float"}, "reduce_dtype: expected .* got 'half a float'"),
        (
            {"reduce_dtype": "bfloat16", "sharding": "leaves"},
            'reduce_dtype: with sharding="leaves" the gradients are yours to reduce',
        ),
    ],
)
def test_arguments_that_are_none_of_what_they_can_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        create(make_mesh("xla", (2,)), **options)


def test_a_mesh_of_another_type_is_refused():
    for mesh in (4, ("data",), make_mesh("xla", (2,)).abstract_mesh):
        message = rf"mesh: expected a jax\.sharding\.Mesh, got a {type(mesh).__name__}"
        with pytest.raises(TypeError, match=message):
            create(mesh)


def test_stacked_axes_may_not_be_sharded():
    mesh = make_mesh("xla", (2,))
    own = {"params": sharded(mesh), "sharding": "leaves", "stacked": {"w": 1}}
    with pytest.raises(ValueError, match="stacked: the leaf 'w' is sharded over its stacked axes"):
        create(mesh, **own)


def test_a_leaf_on_another_mesh_is_refused():
    mesh, other = make_mesh("xla", (2,)), make_mesh("xla", (4,))
    message = r"mesh: the leaf 'w' is sharded over .*, not over the state's"
    with pytest.raises(ValueError, match=message):
        create(mesh, params=sharded(other), sharding="leaves")
    # A copy on all of its devices may be one on all of others.
    state = create(mesh, params=placed(other, P()), sharding="leaves")
    assert state.params["w"].sharding.is_equivalent_to(NamedSharding(mesh, P()), 2)


def test_a_traced_leaf_says_how_it_lies_on_explicit_axes_alone():
    def make(params):
        return create(mesh, params=params, sharding="leaves")

    mesh = make_mesh("xla", (2,))
    with pytest.raises(ValueError, match=r"sharding: the leaf 'b' is traced, and with \"leaves\""):
        jax.jit(make)(sharded(mesh))
    mesh = make_mesh("xla", (2,), kind=AxisType.Explicit)
    state = jax.jit(make)(sharded(mesh))
    assert state.params["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    assert state.static == make(sharded(mesh)).static


def test_sharded_leaves_are_refused_without_a_mesh_and_the_advice_works():
    mesh = make_mesh("xla", (2,))
    message = r"the leaf 'w' is sharded over several devices.*mesh=mesh, sharding=.leaves.\)"
    with pytest.raises(ValueError, match=f"params: {message}"):
        create(params=sharded(mesh))
    with pytest.raises(ValueError, match=f"tree: {message}"):
        jr.Packed(sharded(mesh))
    state = create()
    with pytest.raises(ValueError, match=f"params: {message}"):
        state.replace(params=sharded(mesh))
    state = create(mesh, params=sharded(mesh), sharding="leaves")
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"])


def in_shard_map(state, mesh, axes):
    specs = jax.tree.map(lambda x: P(), state)
    where = {"mesh": mesh, "in_specs": (specs,), "out_specs": specs, "check_vma": False}
    local = jax.shard_map(lambda s: s.apply_gradients(PARAMS), axis_names=axes, **where)
    return jax.jit(local)(jax.tree.map(np.asarray, state))


def test_a_shard_map_over_other_devices_or_some_axes_is_refused():
    state = create(make_mesh("xla", (2,)))
    message = r"mesh: the state lies over the axes \{'data': 2\}, and .* over \{'data': 4\}"
    with pytest.raises(ValueError, match=message):
        in_shard_map(state, make_mesh("xla", (4,)), {"data"})
    mesh = make_mesh("xla", (2, 2), ("a", "b"))
    state = create(mesh, data_axis=("a", "b"))
    message = r"lies over the axes \{'a': 2, 'b': 2\}, and this jax.shard_map is over \{'a': 2\}"
    with pytest.raises(ValueError, match=message):
        in_shard_map(state, mesh, {"a"})


def test_gradients_of_leaves_that_are_not_reduced_are_refused():
    mesh = make_mesh("xla", (2,))
    state = create(mesh, params=sharded(mesh), sharding="leaves")
    specs = state.partition_specs
    step = jax.shard_map(
        lambda s: s.apply_gradients(s.compute_params), mesh=mesh, in_specs=(specs,), out_specs=specs
    )
    message = r"grads: 'b' is sharded as .*, and its gradient varies over 'data': .*yours to reduce"
    with pytest.raises(ValueError, match=message):
        jax.jit(step)(state)


def test_partition_specs_are_how_the_arrays_lie():
    mesh = make_mesh("xla", (2,))
    extra = {"n": jnp.zeros(3)}
    for form in ("replicated", "zero1", "leaves"):
        state = create(mesh, sharding=form, extra=extra, params=sharded(mesh))
        specs = jax.tree.leaves(state.partition_specs, is_leaf=lambda x: isinstance(x, P))
        for x, spec in zip(jax.tree.leaves(state), specs, strict=True):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
        assert jax.tree.structure(state.partition_specs) == jax.tree.structure(state)
    assert create().partition_specs.weights == (P(),)


def test_plans_of_other_placements_differ_and_equal_ones_are_one_key():
    mesh = make_mesh("xla", (2,))
    states = [create(mesh), create(mesh, sharding="zero1"), create(mesh, reduce_dtype="bfloat16")]
    assert len({state.static for state in (create(), *states)}) == 4
    assert create(mesh, sharding="zero1").static == states[1].static
    assert hash(create(mesh, sharding="zero1").plan) == hash(states[1].plan)
