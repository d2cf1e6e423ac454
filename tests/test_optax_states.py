"""States of the contract: made of shapes, stored, copied to devices, donated, and checked."""

import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax_pairs import PAIRS, follow, model
from states import assert_trees_equal, count_compilations, random_like

import jaxrenaissance as jr
from jaxrenaissance.transform import State

# One for each number of moments, and those with trust ratios.
NAMES = ("sgd", "momentum", "adamw", "lars", "lamb", "lion")


@pytest.mark.parametrize("name", NAMES)
def test_init_takes_arrays_shapes_and_tracers(name):
    tx = PAIRS[name].ours(0.1)
    params = model(np.random.default_rng(0))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = tx.init(params)
    assert_trees_equal(tx.init(shapes), state)
    assert_trees_equal(jax.jit(tx.init)(params), state)
    abstract = jax.eval_shape(tx.init, shapes)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(state)
    ]
    # 63 elements of the kernel and two times 9, each on a boundary of 32.
    moments = {"sgd": 0, "adamw": 2, "lamb": 2}.get(name, 1)
    assert [x.shape for x in jax.tree.leaves(state)] == [(), *[(128,)] * moments]


@pytest.mark.parametrize("name", NAMES)
def test_update_keeps_the_states_types_and_compiles_once(name):
    tx = PAIRS[name].ours(0.1)
    params = model(np.random.default_rng(0))
    state = tx.init(params)
    update = jax.jit(lambda grads, state: tx.update(grads, state, params))
    updates, after = update(params, state)
    with count_compilations() as compiled:
        _, last = update(updates, after)
    assert not compiled
    types = [jax.tree.map(jax.typeof, s) for s in (state, after, last)]
    assert types[0] == types[1] == types[2]
    # Both can be branches of a condition, as optax's own wrappers need them.
    jax.eval_shape(lambda yes: jax.lax.cond(yes, lambda: state, lambda: after), True)


def stored_by_pickle(state):
    return pickle.loads(pickle.dumps(state))


def stored_by_flax(state):
    data = flax.serialization.to_bytes(state)
    return flax.serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), data)


def stored_as_leaves(state):
    leaves, treedef = jax.tree.flatten(state)
    return treedef.unflatten([jnp.asarray(np.asarray(x)) for x in leaves])


@pytest.mark.parametrize("store", [stored_by_pickle, stored_by_flax, stored_as_leaves])
def test_a_stored_state_goes_on_where_it_was(store):
    rng = np.random.default_rng(1)
    params = model(rng)
    tx = optax.chain(optax.clip(1.0), PAIRS["adamw"].ours(optax.linear_schedule(0.1, 0.01, 5)))
    params, state = follow(tx, params, [random_like(params, rng)] * 2)
    restored = store(state)
    assert isinstance(restored[1], State)
    grads = random_like(params, rng)
    update = jax.jit(tx.update)
    assert_trees_equal(update(grads, restored, params), update(grads, state, params))


def test_optimizers_can_be_pickled():
    tx = PAIRS["adamw"].ours(0.1)
    again = pickle.loads(pickle.dumps(tx))
    assert again == tx
    params = {"w": jnp.ones(3)}
    assert_trees_equal(
        again.update(params, again.init(params), params), tx.update(params, tx.init(params), params)
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_replicated_state_stays_replicated_and_the_second_call_compiles_nothing(name, kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,), devices=jax.devices("cpu")[:8])
    replicated = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(model(np.random.default_rng(0)), replicated)
    tx = PAIRS[name].ours(0.1)
    state = tx.init(params)
    update = jax.jit(tx.update)
    _, after = update(params, state, params)
    for x in jax.tree.leaves((state, after)):
        assert x.sharding.is_equivalent_to(replicated, x.ndim)
    with count_compilations() as compiled:
        update(params, after, params)
    assert not compiled
    with jax.set_mesh(mesh):
        types = [jax.tree.map(jax.typeof, s) for s in (tx.init(params), jax.jit(tx.init)(params))]
        _, after = update(params, tx.init(params), params)
        assert types[0] == types[1] == jax.tree.map(jax.typeof, after)


def test_a_state_is_where_its_parameters_are():
    device = jax.devices("cpu")[3]
    params = jax.device_put({"w": jnp.ones((2, 3))}, device)
    tx = jr.adam(0.1)
    updates, after = tx.update(params, tx.init(params))
    for x in jax.tree.leaves((tx.init(params), after, updates)):
        assert x.devices() == {device}


def test_sharded_parameters_are_refused_rather_than_gathered():
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices("cpu")[:8])
    params = {"w": jnp.ones((8, 3))}
    cut = jax.device_put(params, NamedSharding(mesh, PartitionSpec("x")))
    tx = jr.adamw(0.1, mask=True)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"^params: the leaf 'w' is sharded over several devices"):
        tx.init(cut)
    with pytest.raises(ValueError, match=r"^params: the leaf 'w' is sharded over several devices"):
        tx.update(params, state, cut)
    with pytest.raises(ValueError, match=r"^updates: the leaf 'w' is sharded over several devices"):
        tx.update(cut, state, params)


def test_what_is_not_donated_stays_as_it_was_and_what_is_donated_is_reused(backend):
    rng = np.random.default_rng(2)
    params = model(rng)
    tx = PAIRS["adamw"].ours(0.1, backend=backend)
    update = jax.jit(tx.update)
    _, state = update(random_like(params, rng), tx.init(params), params)
    grads = random_like(params, rng)
    before = jax.tree.map(np.array, (grads, state, params))
    wanted = update(grads, state, params)
    assert_trees_equal(jax.tree.map(np.array, (grads, state, params)), before)
    assert_trees_equal(tx.update(grads, state, params)[1].count, wanted[1].count)

    addresses = {x.unsafe_buffer_pointer() for x in (*state.mu, *state.nu)}
    got = jax.jit(tx.update, donate_argnums=1)(grads, state, params)
    assert all(x.is_deleted() for x in (*state.mu, *state.nu))
    assert {x.unsafe_buffer_pointer() for x in (*got[1].mu, *got[1].nu)} == addresses
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_members_under_vmap_are_those_of_a_loop(backend):
    rng = np.random.default_rng(3)
    members = [model(rng) for _ in range(3)]
    tx = PAIRS["adamw"].ours(0.1, backend=backend)
    together = jax.tree.map(lambda *x: jnp.stack(x), *members)

    @jax.jit
    @jax.vmap
    def first(params):
        return tx.update(params, tx.init(params), params)

    got = first(together)
    for i, params in enumerate(members):
        wanted = jax.jit(tx.update)(params, tx.init(params), params)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-7)


PARAMS = {"w": jnp.ones((2, 3))}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: optax.adam(0.1).init(PARAMS), r"mu is None, wanted \['float32\[32\]'\]"),
        (lambda: jr.sgd(0.1).init(PARAMS), r"mu is \[\], wanted \['float32\[32\]'\]"),
        (lambda: jr.lion(0.1).init(PARAMS), r"nu is \[\], wanted \['float32\[32\]'\]"),
        (
            lambda: jr.adam(0.1).init({"w": jnp.ones((9, 9))}),
            r"mu is \['float32\[96\]'\], wanted \['float32\[32\]'\]",
        ),
        (
            lambda: jax.vmap(jr.adam(0.1).init)({"w": jnp.ones((5, 2, 3))}),
            r"mu is \['float32\[5, 32\]'\], wanted \['float32\[32\]'\]",
        ),
    ],
)
def test_a_state_of_something_else_is_an_error(state, message):
    tx = jr.adam(0.1)
    with pytest.raises(ValueError, match=f"^state: {message}"):
        tx.update(PARAMS, state(), PARAMS)
