"""Orbax saves and restores leaves, and states as they are."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, struct
from flax.core import FrozenDict
from states import assert_trees_equal, make_step

import jaxrenaissance as jr

# Without a target to restore to, Orbax says that it reads the sharding from a file.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

STEP = make_step()
DONATED = make_step(donate_argnums=0)


def params():
    return {
        "in": {"kernel": jnp.full((3, 4), 0.3, jnp.bfloat16)},
        "out": (jnp.ones(2), jnp.ones(3)),
    }


def create(**options):
    optimizer = jr.adamw(0.1, mask="weights", ema_decay=0.9, groups=[jr.Group("in/*", scale=2.0)])
    stats = jr.Packed({"mean": jnp.ones(3)})
    return jr.TrainState.create(params(), optimizer, extra=stats, **options)


def gradients():
    return jax.tree.map(lambda x: jnp.full(x.shape, 0.5), params())


@pytest.fixture(scope="module")
def state():
    return STEP(STEP(create(), gradients()), gradients())


def assert_goes_on_the_same(again, state):
    assert_trees_equal(
        STEP(again, gradients()).to_leaves(host=True), STEP(state, gradients()).to_leaves(host=True)
    )


@pytest.mark.parametrize("host", [False, True])
def test_standard_checkpointer(host, state, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", state.to_leaves(host=host))
        checkpointer.wait_until_finished()
        bare = checkpointer.restore(tmp_path / "run")
        abstract = jax.eval_shape(create)
        target = jax.eval_shape(lambda state: state.to_leaves(), abstract)
        whole = checkpointer.restore(tmp_path / "run", target)
    assert isinstance(bare["params"]["out"], list)
    assert isinstance(whole["params"]["out"], tuple)
    # An ordinary tree of parameters, for whoever knows nothing of this package.
    assert bare["params"]["in"]["kernel"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(bare["params"]["in"]["kernel"], state.params["in"]["kernel"])
    for leaves in (bare, whole):
        assert_goes_on_the_same(jr.TrainState.from_leaves(leaves, abstract), state)


def test_files_without_ocdbt_and_another_plan(state, tmp_path):
    checkpointer = ocp.PyTreeCheckpointer(use_ocdbt=False)
    checkpointer.save(tmp_path / "run", state.to_leaves())
    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    like = create(mesh=mesh, sharding="zero1", compute_dtype="bfloat16")
    again = jr.TrainState.from_leaves(checkpointer.restore(tmp_path / "run"), like)
    assert again.plan != state.plan
    assert_goes_on_the_same(again, state)


@pytest.mark.parametrize("host", [False, True])
def test_an_asynchronous_save_survives_the_donation_of_the_state(host, tmp_path):
    state = STEP(create(), gradients())
    wanted = state.to_leaves(host=True)
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "run", args=ocp.args.StandardSave(state.to_leaves(host=host)))
        for _ in range(3):
            state = DONATED(state, gradients())
        checkpointer.wait_until_finished()
        leaves = checkpointer.restore(tmp_path / "run")
    again = jr.TrainState.from_leaves(leaves, jax.eval_shape(create))
    assert_trees_equal(again.to_leaves(host=True), wanted)


def test_a_checkpoint_manager_keeps_the_last_and_restores_it(tmp_path):
    state = create()
    with ocp.CheckpointManager(
        tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2)
    ) as manager:
        for step in range(3):
            state = STEP(state, gradients())
            manager.save(step, args=ocp.args.StandardSave(state.to_leaves()))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
        abstract = jax.eval_shape(create)
        target = jax.eval_shape(lambda state: state.to_leaves(), abstract)
        leaves = manager.restore(2, args=ocp.args.StandardRestore(target))
    assert_goes_on_the_same(jr.TrainState.from_leaves(leaves, abstract), state)


def test_a_state_is_a_pytree_that_orbax_saves_as_it_is(state, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", state)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "run", jax.eval_shape(create))
    assert isinstance(again, jr.TrainState)
    assert_goes_on_the_same(again, state)


def test_another_tree_names_the_paths(state, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", state.to_leaves())
        checkpointer.wait_until_finished()
        leaves = checkpointer.restore(tmp_path / "run")
    tree = {**params(), "head": jnp.ones(2)}
    like = jr.TrainState.create(tree, jr.adamw(0.1, mask="weights", ema_decay=0.9))
    with pytest.raises(ValueError, match="'params/head' is missing; 'mu/head' is missing"):
        jr.TrainState.from_leaves(leaves, like)


class Pair(NamedTuple):
    first: Any
    second: Any


class Nets(NamedTuple):
    policy: Any
    value: Any


class Only(NamedTuple):
    value: Any


@struct.dataclass
class Layer:
    kernel: Any
    bias: Any


TREES = {
    "NamedTuple": Pair([jnp.ones(2)], jnp.ones((2, 2))),
    "dataclass": {"layer": Layer(jnp.ones((2, 2)), jnp.ones(2))},
    "FrozenDict": FrozenDict({"layer": {"kernel": jnp.ones((2, 2))}}),
    "nnx.State": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param),
    "one array": jnp.ones(3),
    "value": Nets({"w": jnp.ones(2)}, Only(jnp.ones(3))),
    "no elements": {"a": jnp.zeros((0, 3)), "b": Only(jnp.zeros(0)), "c": jnp.ones(2)},
    "nothing but": Pair(jnp.zeros(0), jnp.zeros((2, 0))),
}


@pytest.mark.parametrize("name", TREES)
def test_containers_come_back_as_dicts_and_lists_and_are_known_by_path(name, tmp_path):
    tree = TREES[name]
    state = jr.TrainState.create(tree, jr.sgd(0.5, momentum=0.5))
    state = state.apply_gradients(jax.tree.map(jnp.ones_like, tree))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", state.to_leaves())
        checkpointer.wait_until_finished()
        leaves = checkpointer.restore(tmp_path / "run")
        abstract = jax.eval_shape(lambda: state)
        target = jax.eval_shape(lambda state: state.to_leaves(), abstract)
        whole = checkpointer.restore(tmp_path / "run", target)
    for given in (leaves, whole):
        again = jr.TrainState.from_leaves(given, abstract)
        assert_trees_equal(again.params, state.params)
        assert_trees_equal(again.moments, state.moments)
