"""replan: what a state keeps when its tree of parameters changes."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from states import (
    assert_buffers_equal,
    assert_trees_equal,
    batch,
    by_path,
    mlp,
    ones_like,
    train_step,
)

import jaxrenaissance as jr
from jaxrenaissance import scalars


def optimizer(backend, **options):
    return jr.adamw(0.1, mask="weights", backend=backend, **options)


def stepped(backend, params=None, optimizer_options=None, **options):
    params = mlp() if params is None else params
    state = jr.TrainState.create(params, optimizer(backend, **(optimizer_options or {})), **options)
    return state.apply_gradients(ones_like(params))


def series(state):
    """Moments and averages by path."""
    found = {f"moment {k}": by_path(state, [m[k] for m in state.moments]) for k in range(2)}
    return found | ({"ema": by_path(state, state.ema)} if state.ema else {})


def buffers(state):
    """What replan of the same tree keeps; norms are of the last gradients."""
    return [state.weights, state.moments, state.ema, state.floats, state.ints]


def changed():
    """Another head, another tail, a new leaf in between; `norm` is gone."""
    tree = mlp(5)
    del tree["norm"]
    return {**tree, "out": {"kernel": jnp.ones((5, 2)), "bias": jnp.full(2, 3.0)}, "new": mlp(6)}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("debias", [False, True])
def test_leaves_of_the_same_path_and_shape_keep_their_moments(debias, jitted, backend, caplog):
    state = stepped(backend, optimizer_options={"ema_decay": 0.75, "ema_debias": debias})
    replan = jax.jit(lambda s, tree: s.replan(tree)) if jitted else lambda s, tree: s.replan(tree)
    with caplog.at_level(logging.WARNING, logger="jaxrenaissance"):
        new = replan(state, changed())
    (record,) = caplog.records
    assert "no longer trained: 'norm/bias', 'norm/scale'" in record.getMessage()
    assert "of another shape, so that their moments start anew: 'out/bias', 'out/kernel'" in (
        record.getMessage()
    )
    assert_trees_equal(new.params, changed())
    before, after = series(state), series(new)
    for name, leaves in after.items():
        for path, got in leaves.items():
            if path in ("in/bias", "in/kernel"):
                np.testing.assert_array_equal(got, before[name][path])
            elif name != "ema":
                np.testing.assert_array_equal(got, 0)
    averages = by_path(new, jr.TrainState.create(new.ema_params, optimizer(backend)).weights)
    weights = by_path(new, new.weights)
    for path in weights.keys() - {"in/bias", "in/kernel"}:
        np.testing.assert_allclose(averages[path], weights[path], rtol=1e-6)
    # Counters and scalars stay, and it trains on.
    assert_buffers_equal((new.floats, new.ints), (state.floats, state.ints))
    assert int(new.apply_gradients(ones_like(changed())).step) == 2


def test_the_same_tree_changes_nothing_and_warns_of_nothing(backend, caplog):
    state = stepped(backend, optimizer_options={"ema_decay": 0.5, "metrics": "leaves"})
    with caplog.at_level(logging.WARNING, logger="jaxrenaissance"):
        new = state.replan(state.params)
    assert not caplog.records
    assert new.static == state.static
    assert_buffers_equal(buffers(new), buffers(state))
    again, _ = jax.jit(train_step)(new, batch())
    wanted, _ = jax.jit(train_step)(state, batch())
    assert_buffers_equal(again, wanted)


def test_known_leaves_keep_region_stacking_group_and_compute_dtype_and_new_ones_go_by_rule(backend):
    params = {
        "blocks": {"odd": jnp.ones((3, 4, 2)), "bias": jnp.ones((3, 2))},
        "head": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
        "base": jnp.ones(2, jnp.int8),
    }
    own = jr.adamw(
        0.1,
        weight_decay=0.5,
        mask=lambda tree: jax.tree.map(lambda x: x.ndim == 1, tree),
        groups=[jr.Group("head/*", scale=0.5, name="head")],
        backend=backend,
    )
    state = jr.TrainState.create(
        params,
        own,
        rules=lambda path, _: jr.Region.W_BN_WEIGHT if "odd" in path else None,
        stacked={"blocks/*": 1},
        trainable=lambda path, _: path != "base",
        compute_dtype=jnp.bfloat16,
    )
    tree = {
        **params,
        "blocks": {"odd": jnp.ones((5, 4, 2)), "bias": jnp.ones((3, 2))},
        "tail": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
        "table": jnp.ones(2, int),
    }
    new = state.replan(tree)
    old = {leaf.path: leaf for leaf in state.plan.leaves}
    for leaf in new.plan.leaves:
        if leaf.path in old:
            before = old[leaf.path]
            assert (leaf.region, leaf.stacked, leaf.group, leaf.rule) == (
                before.region,
                before.stacked,
                before.group,
                before.rule,
            )
    assert new.plan.groups == state.plan.groups
    names = {leaf.path: new.plan.groups[leaf.group] for leaf in new.plan.leaves}
    assert names["tail/kernel"] == "decay"
    assert names["tail/bias"] == "no decay"
    assert names["head/kernel"] == "head no decay"
    assert [x.dtype for x in new.frozen] == [jnp.int8, jnp.int32]
    dtypes = jax.tree.map(lambda x: x.dtype.name, new.compute_params)
    assert dtypes["blocks"] == {"odd": "bfloat16", "bias": "bfloat16"}
    assert dtypes["tail"] == {"kernel": "float32", "bias": "float32"}
    # What the kernels read says the same as the leaves.
    for layout in new.plan.arenas:
        for row in layout.segments:
            assert row[4] == new.plan.leaves[layout.leaves[row[2]]].group


def test_arguments_decide_where_they_are_given(backend):
    state = stepped(backend)
    new = state.replan(
        mlp(1),
        rules=lambda path, _: jr.Region.W_FC_WEIGHT if path == "norm/scale" else None,
        stacked={"in/kernel": 1},
        trainable="*/[ks]*",
        compute_dtype="bfloat16",
    )
    leaves = {leaf.path: leaf for leaf in new.plan.leaves}
    assert leaves.keys() == {"in/kernel", "norm/scale", "out/kernel"}
    assert leaves["norm/scale"].region == jr.Region.W_FC_WEIGHT
    assert leaves["in/kernel"].stacked == 1
    assert new.compute_params["out"]["kernel"].dtype == jnp.bfloat16
    # Stacked otherwise, the leaf is the same.
    for name, got in series(new).items():
        for path, moment in got.items():
            np.testing.assert_array_equal(moment, series(state)[name][path])
    assert_trees_equal(new.params, mlp(1))


def test_mask_and_groups_come_from_an_optimizer_of_the_same_spec(backend):
    def make(head, lr):
        return jr.sgd(
            lr, 0.9, groups=[jr.Group(head, scale=0.5, name="head")], mask=True, backend=backend
        )

    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = jr.TrainState.create(params, make("a", 0.1))
    tree = {**params, "c": jnp.ones(2)}
    new = state.replan(tree, make(["b", "c"], 0.2))
    groups = {leaf.path: new.plan.groups[leaf.group] for leaf in new.plan.leaves}
    assert groups == {"a": "decay", "b": "head decay", "c": "head decay"}
    new = new.apply_gradients(ones_like(tree))
    np.testing.assert_allclose(new.params["a"], 0.9, rtol=1e-6)  # the state's own number, 0.1
    np.testing.assert_allclose(new.params["c"], 0.95, rtol=1e-6)
    with pytest.raises(ValueError, match="optimizer: expected one of the state's spec"):
        state.replan(tree, jr.adam(0.1, backend=backend))
    with pytest.raises(TypeError, match="optimizer: TrainState updates in place"):
        state.replan(tree, optax.adam(0.1))


def test_a_running_cycle_starts_anew(backend):
    own = jr.sgd(1.0, accumulate=jr.Accumulate(2), backend=backend)
    params = {"a": jnp.zeros(2)}
    state = jr.TrainState.create(params, own).apply_gradients({"a": jnp.full(2, jnp.nan)})
    state = state.replan({"a": jnp.zeros(2), "b": jnp.zeros(3)})
    for value in (1.0, 3.0):
        state = state.apply_gradients({"a": jnp.full(2, value), "b": jnp.ones(3)})
    np.testing.assert_array_equal(state.params["a"], -2.0)
    assert [int(n) for n in (state.step, state.calls, state.skipped)] == [1, 3, 0]


def test_the_last_bad_leaf_is_still_named(backend):
    state = jr.TrainState.create({"b": jnp.ones(2)}, jr.sgd(0.1, backend=backend))
    state = state.apply_gradients({"b": jnp.full(2, jnp.nan)})
    with pytest.raises(FloatingPointError, match="the gradient of 'b' had"):
        jr.check(state.replan({"a": jnp.ones(3), "b": jnp.ones(2)}), max_consecutive=0)
    with pytest.raises(FloatingPointError, match="a leaf that replan has dropped"):
        jr.check(state.replan({"a": jnp.ones(3)}), max_consecutive=0)
    clean = jr.TrainState.create({"b": jnp.ones(2)}, jr.sgd(0.1, backend=backend))
    assert int(clean.replan({"a": jnp.ones(3)}).ints[scalars.LAST_BAD_LEAF]) == -1


def test_leaves_move_between_arenas_with_their_moments(backend):
    with jax.enable_x64(True):
        params = {"a": jnp.ones(3, jnp.float32), "b": jnp.ones(2, jnp.float32)}
        state = stepped(backend, params)
        wide = state.replan({**params, "a": jnp.ones(3, jnp.float64)})
        assert [w.dtype for w in wide.weights] == [jnp.float32, jnp.float64]
        assert wide.floats.dtype == jnp.float64
        before, after = series(state), series(wide)
        for name in before:
            for path in params:
                np.testing.assert_array_equal(after[name][path], before[name][path])
        assert int(wide.apply_gradients({**params}).step) == 2


def test_what_was_only_rounded_when_it_was_read_is_not_rounded(backend):
    params = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones(2, jnp.float16)}
    state = jr.TrainState.create(params, jr.sgd(1e-4, ema_decay=0.5, backend=backend))
    state = state.apply_gradients(params)
    tree = {**state.params, "new": jnp.ones(2)}
    tree["a"] = tree["a"].at[1].set(3)
    new = state.replan(tree)
    weights = by_path(new, new.weights)
    np.testing.assert_allclose(weights["a"], [0.9999, 3, 0.9999, 0.9999], rtol=1e-7)
    np.testing.assert_allclose(weights["b"], 0.9999, rtol=1e-7)
    np.testing.assert_array_equal(by_path(new, new.ema)["b"], by_path(state, state.ema)["b"])


def test_replanning_to_and_from_a_tree_without_leaves(backend):
    state = stepped(backend).replan({})
    assert state.weights == ()
    assert state.replan(mlp()).moments[0][0].shape == state.replan(mlp()).weights[0].shape


def test_members_replan_under_vmap(backend):
    own = optimizer(backend)
    scales = jnp.asarray([1.0, 2.0])

    def member(scale):
        params = jax.tree.map(lambda x: x * scale, mlp())
        return jr.TrainState.create(params, own).apply_gradients(params)

    states = jax.vmap(member)(scales)
    new = jax.vmap(lambda s: s.replan({**mlp(1), "more": jnp.ones(2)}))(states)
    wanted = member(2.0).replan({**mlp(1), "more": jnp.ones(2)})
    assert_buffers_equal(jax.tree.map(lambda x: x[1], new), wanted, rtol=1e-6, atol=1e-7)


def test_what_a_state_cannot_hold_is_named():
    state = stepped("xla")
    with pytest.raises(ValueError, match=r"new_tree: the leaf 'f' is a .*eqx.filter"):
        state.replan({**mlp(), "f": jax.nn.relu})
    tree = {**mlp(), "in": {**mlp()["in"], "bias": jnp.ones(5, int)}}
    with pytest.raises(ValueError, match="'in/bias' has dtype int32, which cannot be trained"):
        state.replan(tree)


@pytest.mark.parametrize("again", [False, True])
def test_leaves_keep_their_trust_ratios_and_new_ones_have_one_by_region(again):
    masks = {"weight_decay_mask": "weights", "trust_ratio_mask": True}
    optimizer = jr.lars(0.1, 0.1, **masks, groups=[jr.Group("out/*", scale=2)], backend="xla")
    state = jr.TrainState.create(mlp(), optimizer)
    assert _rows(state)["in/bias"] == "no decay, trust"
    new = state.replan(changed(), optimizer) if again else state.replan(changed())
    assert new.plan.groups == state.plan.groups
    rows = _rows(new)
    assert rows["in/bias"] == "no decay, trust"
    assert rows["out/kernel"] == "out/* decay, trust"
    assert rows["new/in/kernel"] == "decay, trust"
    assert rows["new/in/bias"] == ("no decay, trust" if again else "no decay, no trust")
    np.testing.assert_array_equal(new.floats, state.floats)


def _rows(state):
    return {leaf.path: state.plan.groups[leaf.group] for leaf in state.plan.leaves}
