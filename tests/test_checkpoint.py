"""Checkpoints: what to_leaves gives, and that from_leaves goes on bit for bit under other plans."""

import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import device_of
from flax import linen as nn
from flax import nnx
from states import (
    assert_buffers_equal,
    assert_trees_equal,
    by_path,
    count_compilations,
    make_step,
    ones_like,
)

import jaxrenaissance as jr
import jaxrenaissance.flax as jf
from jaxrenaissance import checkpoint, packed, scalars


def params():
    rng = np.random.default_rng(0)
    return {
        "in": {"kernel": jnp.asarray(rng.normal(size=(3, 5)), jnp.bfloat16), "bias": jnp.ones(5)},
        "layers": (jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32), jnp.zeros((2, 3))),
        "base": jnp.arange(4, dtype=jnp.int8),
        "empty": jnp.zeros((0, 2)),
    }


def extra():
    return {"stats": jr.Packed({"mean": jnp.ones(3), "var": jnp.ones(2)}), "key": jax.random.key(7)}


OPTIONS = {
    "max_norm": 0.5,
    "ema_decay": 0.75,
    "loss_scale": jr.DynamicLossScale(initial=8, growth_interval=2),
    "accumulate": jr.Accumulate(2),
    "groups": [jr.Group("layers/*", scale=0.5, name="layers/*")],
}


def create(optimizer=None, **options):
    optimizer = jr.adamw(0.1, mask=True, **OPTIONS) if optimizer is None else optimizer
    options = {"trainable": lambda path, _: path != "base", "extra": extra(), **options}
    return jr.TrainState.create(params(), optimizer, ema_extra=optimizer.spec.ema, **options)


def gradients(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.asarray(scale * rng.normal(size=x.shape), "f4"), params())


STEP = make_step()


def run(state, seeds):
    """Steps that also change `extra`; the third is not finite."""
    for seed in seeds:
        grads = gradients(seed, np.inf if seed == 2 else 8.0)
        stats = state.extra["stats"]
        moved = stats.replace(jax.tree.map(lambda x: x * 0.9, stats.tree))
        state = STEP(state, grads).replace(extra={**state.extra, "stats": moved})
    return state


@pytest.fixture(scope="module")
def trained():
    """In the middle of a cycle, after a skipped one."""
    return run(create(), range(5))


def assert_goes_on_the_same(again, state, rtol=0.0):
    """Now bit for bit, wherever the plan puts a leaf, and after more steps within `rtol`."""
    assert_trees_equal(again.to_leaves(host=True), state.to_leaves(host=True))
    after = [run(x, range(5, 8)).to_leaves(host=True) for x in (again, state)]
    assert jax.tree.structure(after[0]) == jax.tree.structure(after[1])
    assert_buffers_equal(*jax.tree.map(np.float64, after), rtol=rtol)


def test_leaves_are_what_the_state_says(trained):
    leaves = trained.to_leaves()
    assert_trees_equal(leaves["params"], {**trained.params, "empty": None})
    assert leaves["params"]["in"]["kernel"].dtype == jnp.bfloat16
    series = {
        "mu": [own[0] for own in trained.moments],
        "nu": [own[1] for own in trained.moments],
        "ema": trained.ema,
        "accumulator": trained.accumulator,
    }
    for name, arenas in series.items():
        wanted = by_path(trained, arenas)
        assert wanted.keys() == {leaf.path for leaf in trained.plan.leaves}
        assert leaves[name].keys() == wanted.keys() - {"empty"}
        for path, x in leaves[name].items():
            assert x.dtype == jnp.float32
            np.testing.assert_array_equal(x, wanted[path])
    assert leaves["master"].keys() == {"in/kernel"}
    weights = by_path(trained, trained.weights)
    np.testing.assert_array_equal(leaves["master"]["in/kernel"], weights["in/kernel"])
    assert leaves["master"]["in/kernel"].dtype == jnp.float32
    assert_trees_equal(leaves["extra"]["stats"], trained.extra["stats"].tree)
    np.testing.assert_array_equal(leaves["extra"]["key"], jax.random.key_data(jax.random.key(7)))
    # By hand: five calls are two cycles and one call; the one with the NaN was skipped.
    counters = {name: int(x) for name, x in leaves["counters"].items()}
    # in/bias is the first of the float32 arena, and comes after base and empty in the tree.
    assert [leaf.path for leaf in trained.plan.leaves][counters["last_bad_leaf"]] == "in/bias"
    del counters["last_bad_leaf"]
    assert counters == {
        "step": 1,
        "calls": 5,
        "skipped": 1,
        "consecutive_skips": 1,
        "last_bad_call": 2,
        "has_nan": 0,
        "good_steps": 0,
        "micro": 1,
        "cycle_bad": 0,
        "every": 2,
        "growth_interval": 2,
    }
    assert float(leaves["scalars"]["loss_scale"]) == 4
    assert float(leaves["hyperparams"]["learning_rate"]) == np.float32(0.1)
    assert float(leaves["hyperparams"]["one_minus_b2"]) == np.float32(1 - 0.999)
    assert float(leaves["hyperparams"]["groups"]["layers/*"]["scale"]) == 0.5


@pytest.mark.parametrize("sharding", [None, "replicated", "zero1"])
def test_the_host_cuts_the_same_leaves_from_one_transfer_a_buffer(sharding, trained, monkeypatch):
    if sharding:
        mesh = jax.make_mesh((len(jax.devices()),), ("data",))
        like = create(mesh=mesh, sharding=sharding)
        trained = jr.TrainState.from_leaves(trained.to_leaves(host=True), like)
    fetched = []

    def device_get(tree):
        fetched.extend(jax.tree.leaves(tree))
        return fetch(tree)

    fetch = jax.device_get
    monkeypatch.setattr(checkpoint.jax, "device_get", device_get)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.packed, "unpack", None)  # nothing is launched for a leaf
        leaves = trained.to_leaves(host=True)
    assert len(fetched) == len(jax.tree.leaves(trained))
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(leaves))
    assert_trees_equal(leaves, jax.device_get(trained.to_leaves()))


def test_leaves_can_be_made_under_jit_and_abstractly(trained):
    wanted = trained.to_leaves()
    assert_trees_equal(jax.jit(lambda state: state.to_leaves())(trained), wanted)
    abstract = jax.eval_shape(lambda: create().to_leaves())
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == shapes


@pytest.mark.parametrize("host", [False, True])
def test_leaves_survive_the_donation_of_the_state(host):
    state = create()
    leaves = state.to_leaves(host=host)
    wanted = jax.tree.map(np.array, leaves)
    make_step(donate_argnums=0)(state, gradients())
    # On the CPU, JAX 0.11 does not donate what the host has looked at.
    assert host or state.weights[0].is_deleted()
    assert_trees_equal(jax.device_get(leaves), wanted)


OTHER_PLANS = {
    "as before": {},
    "regions": {"rules": lambda path, _: jr.Region.W_BN_WEIGHT if "kernel" in path else None},
    "several devices": {"sharding": "zero1"},
    "compute dtype": {"compute_dtype": "bfloat16"},
    "stacked": {"stacked": {"layers/*": 1}},
}
REORDERED = ("regions", "several devices", "stacked")


@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("plan", OTHER_PLANS)
def test_a_state_goes_on_under_another_plan(plan, abstract, trained):
    over = {"mesh": jax.make_mesh((len(jax.devices()),), ("data",))}

    def make():
        options = OTHER_PLANS[plan]
        return create(**options, **(over if "sharding" in options else {}))

    like = jax.eval_shape(make) if abstract else make()
    again = jr.TrainState.from_leaves(trained.to_leaves(host=True), like)
    assert again.static == like.static
    # Where other segments are in another order, the norm that clips adds up in another.
    assert_goes_on_the_same(again, trained, rtol=1e-4 if plan in REORDERED else 0)


def test_a_state_goes_on_on_another_backend(trained, backend):
    with jax.default_device(device_of(backend)):
        optimizer = jr.adamw(0.1, mask=True, backend=backend, **OPTIONS)
        leaves = trained.to_leaves(host=True)
        again = jr.TrainState.from_leaves(leaves, create(optimizer))
        assert_trees_equal(again.to_leaves(host=True), leaves)


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: jr.sgd(0.1, **o),
        lambda **o: jr.sgd(0.1, momentum=0.9, nesterov=True, **o),
        lambda **o: jr.lars(0.1, trust_ratio_mask="weights", **o),
        lambda **o: jr.lion(0.1, mask="weights", **o),
        lambda **o: jr.adam(lambda count: 0.1 / (count + 1), ema_decay=0.9, ema_debias=True, **o),
    ],
)
def test_every_kind_goes_on(make):
    optimizer = make(metrics="grad_norm")
    state = run(create(optimizer), range(3))
    again = jr.TrainState.from_leaves(state.to_leaves(), jax.eval_shape(lambda: create(optimizer)))
    assert_goes_on_the_same(again, state)
    metrics = [run(x, range(5, 6)).metrics for x in (again, state)]
    assert_buffers_equal(*metrics)


def test_containers_may_come_back_as_others_and_paths_as_one_mapping(trained, tmp_path):
    leaves = trained.to_leaves(host=True)
    as_lists = {**leaves, "params": {**leaves["params"], "layers": [*leaves["params"]["layers"]]}}
    nested = {"in": {"kernel": leaves["mu"].pop("in/kernel")}, **leaves["mu"]}
    again = jr.TrainState.from_leaves({**as_lists, "mu": nested}, create())
    assert_goes_on_the_same(again, trained)

    leaves = trained.to_leaves(host=True)
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(leaves)
    }
    np.savez(tmp_path / "state.npz", **flat)
    # An npz file has no name for bfloat16 and gives it back as bare bytes.
    with np.load(tmp_path / "state.npz") as file:
        again = jr.TrainState.from_leaves(file, create())
    assert_goes_on_the_same(again, trained)


def test_a_tree_that_is_one_leaf_has_leaves_without_a_path():
    state = jr.TrainState.create(jnp.ones(3, jnp.float16), jr.adam(0.1))
    state = state.apply_gradients(jnp.ones(3))
    leaves = state.to_leaves(host=True)
    assert leaves["mu"].shape == leaves["master"].shape == leaves["params"].shape == (3,)
    again = jr.TrainState.from_leaves(leaves, state)
    assert_buffers_equal(again.apply_gradients(jnp.ones(3)), state.apply_gradients(jnp.ones(3)))


def test_float64_and_float32_leaves_go_on():
    with jax.enable_x64(True):
        tree = {"a": jnp.ones(3, jnp.float64), "b": jnp.ones(2, jnp.float32)}
        state = jr.TrainState.create(tree, jr.adam(0.1, b2=0.9999))
        state = state.apply_gradients(tree)
        leaves = state.to_leaves(host=True)
        assert leaves["mu"]["a"].dtype == leaves["scalars"]["grad_norm"].dtype == np.float64
        again = jr.TrainState.from_leaves(leaves, jax.eval_shape(lambda: state))
        assert_buffers_equal(again.apply_gradients(tree), state.apply_gradients(tree))


def test_parameters_that_were_changed_in_a_checkpoint_count(trained):
    leaves = trained.to_leaves(host=True)
    leaves["params"]["in"]["kernel"][0, 0] = 2
    again = jr.TrainState.from_leaves(leaves, create())
    wanted = by_path(trained, trained.weights)["in/kernel"]
    wanted[0, 0] = 2
    np.testing.assert_array_equal(by_path(again, again.weights)["in/kernel"], wanted)


def told(caplog, leaves, like):
    with caplog.at_level(logging.WARNING, logger="jaxrenaissance"):
        state = jr.TrainState.from_leaves(leaves, like)
    return state, [record.getMessage() for record in caplog.records]


def test_the_numbers_of_the_checkpoint_win_and_the_others_are_told(trained, caplog):
    groups = [jr.Group("layers/*", scale=2, name="layers/*"), jr.Group("in/bias", b1=0.5)]
    options = {**OPTIONS, "groups": groups, "accumulate": jr.Accumulate(3)}
    like = create(jr.adamw(0.3, mask=True, **options))
    state, (message,) = told(caplog, trained.to_leaves(), like)
    assert "counters/every is 2, not 3" in message
    assert "hyperparams/learning_rate is 0.1, not 0.3" in message
    assert "hyperparams/groups/layers/*/scale is 0.5, not 2" in message
    assert "has none: hyperparams/groups/in/bias/one_minus_b1" in message
    assert "replace_hyperparams" in message
    values = {name: float(x) for name, x in state.metrics.items() if "/" in name or "rate" in name}
    assert values == {
        "learning_rate": np.float32(0.1),
        "layers/*/scale": 0.5,
        "in/bias/b1": 0.5,
    }
    assert int(state.ints[scalars.EVERY]) == 2


def test_nothing_is_told_where_nothing_differs(trained, caplog):
    assert told(caplog, trained.to_leaves(), create())[1] == []


def test_numbers_that_have_no_place_are_told(trained, caplog):
    options = {**OPTIONS, "groups": (), "max_norm": None}
    _, (message,) = told(caplog, trained.to_leaves(), create(jr.adamw(0.1, mask=True, **options)))
    assert "no place for: " in message
    assert "hyperparams/max_norm" in message
    assert "hyperparams/groups/layers/*/scale" in message
    assert "learning_rate" not in message


def without(leaves, section, path):
    return {**leaves, section: {k: x for k, x in leaves[section].items() if k != path}}


def changed(leaves, section, path, value):
    return {**leaves, section: {**leaves[section], path: value}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: without(x, "mu", "in/bias"), "'mu/in/bias' is missing"),
        (lambda x: without(x, "params", "in"), "'params/in/bias' is missing; 'params/in/kernel'"),
        (lambda x: without(x, "counters", "step"), "'counters/step' is missing"),
        (lambda x: without(x, "master", "in/kernel"), "'master/in/kernel' is missing"),
        (lambda x: {k: v for k, v in x.items() if k != "extra"}, "'extra/stats/mean' is missing"),
        (
            lambda x: changed(x, "nu", "in/bias", np.zeros(4, np.float32)),
            r"'nu/in/bias' has shape \(4,\), wanted \(5,\)",
        ),
        (
            lambda x: changed(x, "ema", "in/bias", np.zeros(5, np.int32)),
            "'ema/in/bias' has dtype int32, wanted float32",
        ),
        (
            lambda x: changed(x, "params", "head", np.zeros(5, np.float32)),
            "'params/head' is not in the state",
        ),
        (lambda x: {**x, "more": np.zeros(1)}, "'more' is not in the state"),
        (lambda x: {**x, "format": np.int32(2)}, "'format' is 2, and this version .* reads 1"),
        (lambda x: x["params"], "'format' is missing, so they are not what state.to_leaves"),
        (
            lambda x: changed(x, "counters", "step", np.zeros(2)),
            r"'counters/step' is .*, wanted a number",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_with_its_path(change, message, trained):
    with pytest.raises(ValueError, match=message):
        jr.TrainState.from_leaves(change(trained.to_leaves(host=True)), create())


def test_an_abstract_state_has_no_numbers_to_give(trained):
    more = [*OPTIONS["groups"], jr.Group("in/bias", b1=0.5)]
    optimizer = jr.adamw(0.1, mask=True, **{**OPTIONS, "groups": more})
    with pytest.raises(ValueError, match="'hyperparams/groups/in/bias/one_minus_b1' is missing"):
        jr.TrainState.from_leaves(trained.to_leaves(), jax.eval_shape(lambda: create(optimizer)))


@pytest.mark.parametrize(
    ("saved", "like", "message"),
    [
        (jr.lion(0.1, mask=True), jr.sgd(0.1, momentum=0.9), "those of lion, and momentum has"),
        (jr.sgd(0.1), jr.adam(0.1), "'mu/in/bias' is missing"),
        (jr.adam(0.1), jr.sgd(0.1), "'mu/in/bias' is not in the state"),
        (
            jr.lars(0.1, trust_ratio_mask=True),
            jr.lars(0.1, trust_ratio_mask=True, optax_form=True),
            "those of lars, and lars_optax_form has others of the same names: 'mu/",
        ),
        (
            jr.adam(0.1, ema_decay=0.5),
            jr.adam(0.1, ema_decay=0.5, ema_debias=True),
            "the average is not debiased, and that of `like` is: .* ema_debias=False",
        ),
    ],
)
def test_other_optimizers_moments_are_an_error(saved, like, message):
    leaves = create(saved).to_leaves()
    with pytest.raises(ValueError, match=message):
        jr.TrainState.from_leaves(leaves, create(like))


def test_optimizers_with_the_same_moments_take_them_over(caplog):
    state = create(jr.adam(0.1)).apply_gradients(gradients())
    lamb = create(jr.lamb(0.1, mask=True, trust_ratio_mask=True))
    again, (message,) = told(caplog, state.to_leaves(), lamb)
    assert_buffers_equal(again.moments, state.moments)
    assert "hyperparams/eps is 1e-08, not 1e-06" in message


class Nets(NamedTuple):
    policy: Any
    value: Any


class Only(NamedTuple):
    value: Any


def nets():
    return Nets(jnp.ones((2, 2)), jnp.full((2, 2), 2.0))


VALUES = {
    "siblings": (nets, lambda: None),
    "inside": (lambda: {"attn": nets(), "head": Only(jnp.ones(3, jnp.bfloat16))}, lambda: None),
    "alone": (lambda: Only(jnp.ones((2, 2))), lambda: Only(jnp.ones(2))),
    "extra": (lambda: {"w": jnp.ones(2)}, nets),
    "packed": (lambda: {"w": jnp.ones(2)}, lambda: jr.Packed(nets())),
    "packed inside": (lambda: {"w": jnp.ones(2)}, lambda: {"s": jr.Packed(nets()), "": nets()}),
    "one Variable": (lambda: nnx.Param(jnp.ones(2)), lambda: nnx.BatchStat(jnp.ones(3))),
    "Variables": (
        lambda: {"value": nnx.Param(jnp.ones((2, 2))), "bias": nnx.Param(jnp.ones(2, jnp.float16))},
        lambda: jr.Packed({"value": nnx.BatchStat(jnp.ones(3))}),
    ),
    "boxed": (
        lambda: {"w": nn.Partitioned(jnp.ones((2, 2)), ("a", "b"))},
        lambda: jr.Packed(nn.Partitioned(jnp.ones(2), ("a",))),
    ),
}


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_leaves_called_value_go_on(name, host):
    tree, extra = (make() for make in VALUES[name])
    grads = ones_like(tree)
    state = jr.TrainState.create(tree, jr.sgd(0.5, momentum=0.5), extra=extra)
    state = state.apply_gradients(grads)
    leaves = state.to_leaves(host=host)
    again = jr.TrainState.from_leaves(leaves, jax.eval_shape(lambda: state))
    assert_trees_equal(again.to_leaves(), state.to_leaves())
    # In plain containers, as readers of files give them back.
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(leaves)
    }
    again = jr.TrainState.from_leaves(flat, state)
    assert_trees_equal(again.to_leaves(), state.to_leaves())


@pytest.mark.parametrize(
    ("tree", "extra"),
    [
        ({"": jnp.ones(2)}, None),
        ({"": jnp.ones(2), "w": jnp.ones(2)}, None),
        ({"w": jnp.ones(2)}, {"": jnp.ones(2)}),
        ({"w": jnp.ones(2)}, {"s": jr.Packed({"": jnp.ones(2)})}),
    ],
)
def test_what_could_not_be_restored_is_not_written(tree, extra):
    state = jr.TrainState.create(tree, jr.sgd(0.5, momentum=0.5), extra=extra)
    for host in (False, True):
        with pytest.raises(ValueError, match="to_leaves: no checkpoint can name the leaf '"):
            state.to_leaves(host=host)


def test_a_donated_state_will_do_to_be_like(trained):
    donated = jax.device_put(create(), jax.devices()[-1])
    leaves = trained.to_leaves(host=True)
    make_step(donate_argnums=0)(donated, gradients())
    assert donated.weights[0].is_deleted()
    again = jr.TrainState.from_leaves(leaves, donated)
    assert_trees_equal(again.to_leaves(host=True), leaves)
    assert all(x.devices() == {jax.devices()[-1]} and x.committed for x in jax.tree.leaves(again))


def test_all_series_are_unpacked_by_one_program():
    tree = {"w": jnp.ones((7, 3)), "b": jnp.ones(11)}
    state = jr.TrainState.create(tree, jr.adam(0.1, ema_decay=0.5, accumulate=jr.Accumulate(2)))
    compiled = packed._unpack._cache_size()
    state.to_leaves()
    assert packed._unpack._cache_size() == compiled + 1
    with count_compilations() as compilations:
        state.to_leaves()
    assert compilations == []


def test_leaves_are_copies_where_they_fill_their_arena():
    tree = {"w": jnp.ones(32)}
    state = jr.TrainState.create(tree, jr.sgd(0.5, momentum=0.5, backend="xla"), extra=jnp.ones(32))
    leaves = state.to_leaves()
    wanted = jax.tree.map(np.array, leaves)
    make_step(donate_argnums=0)(state, tree)
    assert_trees_equal(jax.device_get(leaves), wanted)


def test_what_has_no_elements_need_not_be_there():
    empty = jnp.zeros((0, 2), jnp.bfloat16)
    extra = {"a": jr.Packed({"b": empty}), "k": jax.random.split(jax.random.key(0), 3)[:0]}
    for tree in (empty, {"w": empty, "i": jnp.zeros(0, jnp.int8)}, {"w": empty, "b": jnp.ones(2)}):
        options = {"trainable": None if tree is empty else ["w", *({"b"} & tree.keys())]}
        state = jr.TrainState.create(tree, jr.adam(0.1, ema_decay=0.5), extra=extra, **options)
        for host in (False, True):
            leaves = state.to_leaves(host=host)
            assert all(x.size for x in jax.tree.leaves(leaves))
            again = jr.TrainState.from_leaves(leaves, state)
            assert_trees_equal(again.params, state.params)
            assert again.extra["a"].plan == state.extra["a"].plan
            assert again.extra["k"].shape == (0,)
            assert again.extra["k"].dtype == state.extra["k"].dtype
        # Where they are, as in files of other makers, they are read.
        whole = {**leaves, "params": state.params, "extra": {"a": {"b": np.zeros((0, 2), "f4")}}}
        jr.TrainState.from_leaves(whole, state)


def test_a_state_of_members_is_an_error():
    one = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(0.1))
    states = jax.vmap(lambda _: jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(0.1)))(
        jnp.arange(2)
    )
    with pytest.raises(ValueError, match=r"to_leaves: .*jax.vmap"):
        states.to_leaves()
    with pytest.raises(ValueError, match=r"like: it holds \(2,\) members"):
        jr.TrainState.from_leaves(one.to_leaves(), states)
    leaves = jax.vmap(lambda state: state.to_leaves())(states)
    again = jr.TrainState.from_leaves(jax.tree.map(lambda x: x[1], leaves), one)
    assert_trees_equal(again.to_leaves(host=True), one.to_leaves(host=True))


def test_what_is_no_state_or_traced_is_an_error(trained):
    with pytest.raises(TypeError, match="like: expected a TrainState, or jax"):
        jr.TrainState.from_leaves(trained.to_leaves(), params())
    around = jf.TrainState(core=trained, apply_fn=None)
    with pytest.raises(
        TypeError, match=r"a TrainState of .*flax: like\.restore\(leaves\) gives one"
    ):
        jr.TrainState.from_leaves(trained.to_leaves(), around)
    for traced in (lambda x: (x, trained), lambda x: (x, x)):
        with pytest.raises(TypeError, match="from_leaves: the leaves or `like` are traced"):
            jax.jit(lambda x, traced=traced: jr.TrainState.from_leaves(*traced(x)))(trained)


def test_two_leaves_of_one_path_are_an_error():
    twice = {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}
    state = jr.TrainState.create(ones_like({"w": jnp.ones(1)}), jr.sgd(0.1), extra=twice)
    with pytest.raises(ValueError, match="to_leaves: two leaves have the path 'extra/a/b'"):
        state.to_leaves()


def test_the_new_state_is_where_the_one_to_be_like_is(trained):
    device = jax.devices()[-1]
    like = jax.device_put(create(), device)
    again = jr.TrainState.from_leaves(trained.to_leaves(), like)
    assert all(x.devices() == {device} and x.committed for x in jax.tree.leaves(again))
    # As those that Orbax restores; a state that is committed would compile the next step anew.
    leaves = jax.device_put(trained.to_leaves(), device)
    assert leaves["format"].committed
    for like in (create(), jax.eval_shape(create)):
        again = jr.TrainState.from_leaves(leaves, like)
        assert not any(x.committed for x in jax.tree.leaves(again))
        with count_compilations() as compilations:
            STEP(again, gradients())
        assert compilations == []
