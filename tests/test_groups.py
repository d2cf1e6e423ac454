"""Groups: which leaves are in one, what their hyperparameters are, and how faults are named."""

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrenaissance as jr
from jaxrenaissance import hyperparams, scalars, transform
from jaxrenaissance.plan import MemoryPlan
from jaxrenaissance.regions import Region


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


SHAPES = {
    "conv": {"bias": array(4), "kernel": array(3, 3, 2, 4)},
    "embedding": array(7, 5),
    "head": {"bias": array(3), "kernel": array(5, 3)},
    "norm": {"bias": array(5), "scale": array(5)},
}


def in_group(plan, name):
    """The paths of the leaves of a group, whether they are decayed or not."""
    rows = {plan.groups.index(f"{name} {decay}") for decay in ("decay", "no decay")}
    return {leaf.path for leaf in plan.leaves if leaf.group in rows}


def of_three_axes(path, leaf):
    return leaf.ndim > 2


@pytest.mark.parametrize(
    ("match", "name", "paths"),
    [
        ("head/*", "head/*", {"head/bias", "head/kernel"}),
        ("embedding", "embedding", {"embedding"}),
        (["*/bias", "embedding"], "*/bias, embedding",
         {"conv/bias", "embedding", "head/bias", "norm/bias"}),
        (Region.W_BN_WEIGHT, "W_BN_WEIGHT", {"norm/scale"}),
        (jr.BIAS_LIKE, "W_BN_BIAS, W_BN_WEIGHT, W_FC_BIAS",
         {"conv/bias", "head/bias", "norm/bias", "norm/scale"}),
        # That the model has no deep convolution is no fault of the list.
        (jr.WEIGHTS, "W_FC_WEIGHT, W_FIRST_CONV, W_DEEP_CONV",
         {"conv/kernel", "embedding", "head/kernel"}),
        ([Region.W_FIRST_CONV, "head/bias"], "W_FIRST_CONV, head/bias",
         {"conv/kernel", "head/bias"}),
        (of_three_axes, "of_three_axes", {"conv/kernel"}),
        (partial(lambda rank, path, leaf: leaf.ndim == rank, 2), "partial",
         {"embedding", "head/kernel"}),
    ],
)  # fmt: skip
def test_what_a_match_selects(match, name, paths):
    group = jr.Group(match, scale=2.0)
    assert group.name == name
    plan = MemoryPlan.build(SHAPES, groups=[group])
    assert in_group(plan, name) == paths
    # A group moves no leaf.
    plain = MemoryPlan.build(SHAPES)
    assert [leaf.offset for leaf in plan.leaves] == [leaf.offset for leaf in plain.leaves]


def test_rows_are_in_order_and_the_mask_still_says_which_leaves_are_decayed():
    groups = [jr.Group("head/*", scale=2), jr.Group("conv/*", name="stem", b1=0.5)]
    mask = jax.tree.map(lambda leaf: leaf.ndim == 4, SHAPES)
    plan = MemoryPlan.build(SHAPES, groups=groups, mask=mask)
    assert plan.groups == (
        "decay", "no decay", "head/* decay", "head/* no decay", "stem decay", "stem no decay"
    )  # fmt: skip
    assert plan.num_groups == 6
    assert {leaf.path: leaf.group for leaf in plan.leaves} == {
        "conv/bias": 5,
        "conv/kernel": 4,
        "embedding": 1,
        "head/bias": 3,
        "head/kernel": 3,
        "norm/bias": 1,
        "norm/scale": 1,
    }
    for arena in plan.arenas:
        for _, _, leaf, _, row in arena.segments.tolist():
            assert row == plan.leaves[arena.leaves[leaf]].group


def test_rows_of_an_optimizer_with_trust_ratios():
    groups = [jr.Group("head/*", name="top", scale=2)]
    mask = {"conv": True, "embedding": False, "head": True, "norm": False}
    plan = MemoryPlan.build(SHAPES, groups=groups, mask=mask, trust_ratio_mask=None)
    names = ("decay, trust", "no decay, trust", "decay, no trust", "no decay, no trust")
    assert plan.groups == (*names, *(f"top {name}" for name in names))
    assert {leaf.path: leaf.group for leaf in plan.leaves} == {
        "conv/bias": 2,
        "conv/kernel": 0,
        "embedding": 1,
        "head/bias": 6,
        "head/kernel": 4,
        "norm/bias": 3,
        "norm/scale": 3,
    }


def test_the_table_shows_the_groups():
    text = str(MemoryPlan.build(SHAPES, groups=[jr.Group("head/*", name="top", scale=2)]))
    line = next(line for line in text.splitlines() if line.startswith("head/bias"))
    assert "top no decay" in line
    line = next(line for line in text.splitlines() if line.startswith("head/kernel"))
    assert "top decay" in line


def test_plans_of_other_groups_are_told_apart():
    plans = [
        MemoryPlan.build(SHAPES),
        MemoryPlan.build(SHAPES, groups=[jr.Group("head/*", scale=2)]),
        MemoryPlan.build(SHAPES, groups=[jr.Group("conv/*", scale=2)]),
        MemoryPlan.build(SHAPES, groups=[jr.Group("head/*", name="head", scale=2)]),
    ]
    assert len(set(plans)) == len(plans)
    # Its numbers are no part of a plan.
    assert MemoryPlan.build(SHAPES, groups=[jr.Group("head/*", b1=0.1)]) == plans[1]
    assert pickle.loads(pickle.dumps(plans[1])) == plans[1]


def test_leaves_that_are_not_trained_are_in_no_group_and_are_not_asked_about():
    asked = []

    def match(path, leaf):
        asked.append(path)
        return True

    plan = MemoryPlan.build(SHAPES, trainable="head/*", groups=[jr.Group(match, scale=2)])
    assert asked == ["head/bias", "head/kernel"]
    assert in_group(plan, "match") == set(asked)
    with pytest.raises(ValueError, match=r"groups: 'conv/\*': .*matches no trained leaf"):
        MemoryPlan.build(SHAPES, trainable="head/*", groups=[jr.Group("conv/*", scale=2)])


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (
            [jr.Group("head/*", scale=2), jr.Group("*/bias", name="biases", scale=3)],
            ValueError,
            r"groups: the leaf 'head/bias' is matched by 'head/\*' and by 'biases'",
        ),
        ([jr.Group("haed/*", scale=2)], ValueError, r"groups: 'haed/\*': the pattern 'haed/\*' m"),
        (
            [jr.Group(["head/*", "x"], name="top", scale=2)],
            ValueError,
            "groups: 'top': the pattern 'x' matches no trained leaf",
        ),
        (
            [jr.Group(Region.W_DEEP_CONV, scale=2)],
            ValueError,
            "groups: 'W_DEEP_CONV': 'W_DEEP_CONV' matches no trained leaf",
        ),
        (
            [jr.Group(lambda path, leaf: False, name="none", scale=2)],
            ValueError,
            "groups: 'none': '<lambda>' matches no trained leaf",
        ),
        ([jr.Group([], name="none", scale=2)], ValueError, "groups: 'none': .*no trained leaf"),
        ([jr.Group(Region.M_FC_BIAS, scale=2)], ValueError, "'M_FC_BIAS': expected a region of s"),
        (
            [jr.Group(lambda path, leaf: leaf.ndim, name="f", scale=2)],
            ValueError,
            "groups: 'f': expected a bool for 'conv/bias', got 1",
        ),
        ([jr.Group(3, scale=2)], TypeError, "groups: '3': expected a pattern, a Region, a list"),
        (
            [jr.Group("head/*", scale=2), jr.Group("head/*", scale=2)],
            ValueError,
            r"groups: two groups have the name 'head/\*'",
        ),
        (jr.Group("head/*", scale=2), TypeError, "groups: expected a list of jr.Group, got Group"),
        (["head/*"], TypeError, "groups: expected a list of jr.Group"),
    ],
)
def test_faults_are_named(groups, error, message):
    with pytest.raises(error, match=message):
        MemoryPlan.build(SHAPES, groups=groups)


def test_a_group_that_makes_no_sense_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match=r"the group 'a' has no hyperparameter of its own"):
        jr.Group("a")
    with pytest.raises(ValueError, match=r"the group 'a' has both learning_rate and scale"):
        jr.Group("a", learning_rate=1.0, scale=1.0)
    with pytest.raises(ValueError, match=r"name: expected a name for the group"):
        jr.Group([], scale=1.0)
    with pytest.raises(TypeError, match=r"name: expected a string, got 3"):
        jr.Group("a", name=3, scale=1.0)
    with pytest.raises(TypeError, match="ema_decay"):
        jr.Group("a", ema_decay=0.9)


@pytest.mark.parametrize(
    ("factory", "values", "message"),
    [
        (jr.sgd, {"b1": 0.5}, "groups: 'a' has b1, and sgd has no such hyperparameter"),
        (jr.sgd, {"momentum": 0.5}, "groups: 'a' has momentum, and sgd has no such"),
        (jr.adamw, {"momentum": 0.5}, "groups: 'a' has momentum, and adamw has no such"),
        (jr.lamb, {"trust_coefficient": 0.5}, "groups: 'a' has trust_coefficient, and lamb has no"),
        (jr.lars, {"trust_coefficient": 0.0}, "groups: 'a': trust_coefficient: expected a number"),
        (jr.adamw, {"scale": -1.0}, "groups: 'a': scale: expected a number finite and ≥ 0"),
        (jr.adamw, {"b2": 1.0}, r"groups: 'a': b2: expected a number in \[0, 1\)"),
        (jr.adamw, {"eps": jnp.bfloat16(1e-8)}, "groups: 'a': eps: a bfloat16 was rounded"),
        (jr.adamw, {"learning_rate": jnp.ones(2)}, "groups: 'a': learning_rate: expected a scalar"),
    ],
)
def test_an_optimizer_refuses_what_a_group_cannot_have(factory, values, message):
    with pytest.raises(ValueError, match=message):
        factory(0.1, groups=[jr.Group("a", **values)])


def test_an_optimizer_refuses_what_is_no_group():
    with pytest.raises(TypeError, match=r"groups: expected a list of jr.Group, got Group\('a'"):
        jr.adamw(0.1, groups=jr.Group("a", scale=2))
    with pytest.raises(TypeError, match="groups: 'a': scale: expected a number or a schedule"):
        jr.adamw(0.1, groups=[jr.Group("a", scale="2")])


def params_like(rng):
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), SHAPES)


def decay_mask(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


# Name → (ours without groups, a factory of optax's for the same, the numbers of two groups).
CASES = {
    "momentum": (
        partial(jr.sgd, 0.1, momentum=0.9, decoupled=False, weight_decay=0.01),
        lambda learning_rate=0.1, momentum=0.9, weight_decay=0.01, mask=decay_mask: optax.chain(
            optax.add_decayed_weights(weight_decay, mask), optax.sgd(learning_rate, momentum)
        ),
        ({"learning_rate": 0.02, "momentum": 0.5}, {"weight_decay": 0.3}),
    ),
    "adam": (
        partial(jr.adam, 0.1),
        lambda learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, mask=None: optax.adam(
            learning_rate, b1, b2, eps, eps_root
        ),
        ({"b1": 0.5, "b2": 0.9}, {"eps": 1e-2, "eps_root": 1e-3, "learning_rate": 0.3}),
    ),
    "adamw": (
        partial(jr.adamw, 0.1, weight_decay=0.2),
        lambda learning_rate=0.1, weight_decay=0.2, b1=0.9, b2=0.999, mask=decay_mask: optax.adamw(
            learning_rate, b1, b2, weight_decay=weight_decay, mask=mask
        ),
        ({"weight_decay": 0.05, "b2": 0.99}, {"learning_rate": lambda count: 0.1 / (1 + count)}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_are_optaxs_multi_transform(name):
    ours, theirs, numbers = CASES[name]
    rng = np.random.default_rng(0)
    params = params_like(rng)
    groups = [
        jr.Group(["head/*", "norm/scale"], name="first", **numbers[0]),
        jr.Group(Region.W_FIRST_CONV, name="second", **numbers[1]),
    ]
    optimizer = ours(groups=groups, mask=decay_mask, backend="xla")
    # A weight decay of its own is for all leaves of the group.
    masks = [{"mask": True} if "weight_decay" in own else {} for own in numbers]
    labels = jax.tree.map(lambda _: "rest", params)
    labels["head"] = {"bias": "first", "kernel": "first"}
    labels["norm"]["scale"], labels["conv"]["kernel"] = "first", "second"
    reference = optax.multi_transform(
        {
            "rest": theirs(),
            "first": theirs(**numbers[0], **masks[0]),
            "second": theirs(**numbers[1], **masks[1]),
        },
        labels,
    )
    state, optax_state = optimizer.init(params), reference.init(params)
    update = jax.jit(optimizer.update)
    for _ in range(4):
        grads = params_like(rng)
        updates, state = update(grads, state, params)
        wanted, optax_state = reference.update(grads, optax_state, params)
        for got, want in zip(jax.tree.leaves(updates), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-6)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1


def test_scale_is_a_factor_on_the_learning_rate_and_on_decoupled_decay():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    optimizer = jr.sgd(
        lambda count: 0.5**count,
        weight_decay=0.25,
        mask=True,
        groups=[jr.Group("b", scale=0.5)],
        backend="xla",
    )
    state = optimizer.init(params)
    for factor in (1.0, 0.5):
        updates, state = optimizer.update({"a": jnp.ones(2), "b": jnp.ones(2)}, state, params)
        np.testing.assert_allclose(updates["a"], -factor * 1.25, rtol=1e-6)
        np.testing.assert_allclose(updates["b"], -0.5 * factor * 1.25, rtol=1e-6)


def test_decay_of_a_group_alone_needs_params():
    optimizer = jr.sgd(0.1, groups=[jr.Group("b", weight_decay=0.1)], backend="xla")
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match="params: weight decay needs them"):
        optimizer.update(params, optimizer.init(params))
    without = jr.sgd(0.1, groups=[jr.Group("b", weight_decay=0.0)], backend="xla")
    without.update(params, without.init(params))


def test_all_groups_are_one_update():
    def updates(groups):
        optimizer = jr.adamw(0.1, mask="weights", groups=groups, backend="auto")
        params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), SHAPES)
        text = str(jax.make_jaxpr(optimizer.update)(params, optimizer.init(params), params))
        return text.count("jaxrenaissance_changes"), text.count("jaxrenaissance_")

    assert updates([])[0] == 1
    assert updates([jr.Group("head/*", scale=2), jr.Group("norm/*", b1=0.5)]) == updates([])


def rows_of(optimizer):
    """The header, and the rows of the hyperparameters."""
    plan = transform.build_plan(SHAPES, optimizer.selection)
    floats = hyperparams.initial_floats(
        optimizer.spec, optimizer.numbers, plan.num_groups, np.dtype("float32")
    )
    return floats[: scalars.HEADER], floats[scalars.HEADER :].reshape(-1, scalars.ROW)


def test_the_rows_of_the_scalars_by_hand():
    optimizer = jr.adamw(
        0.5,
        b1=0.75,
        weight_decay=0.125,
        mask="weights",
        groups=[
            jr.Group("head/*", scale=2, weight_decay=0.25),
            jr.Group("norm/*", learning_rate=4.0, b1=0.5),
        ],
    )
    _, rows = rows_of(optimizer)
    assert rows.shape == (6, scalars.ROW)
    assert rows[:, scalars.LEARNING_RATE].tolist() == [0.5, 0.5, 0.5, 0.5, 4.0, 4.0]
    assert rows[:, scalars.LR_SCALE].tolist() == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
    assert rows[:, scalars.WEIGHT_DECAY].tolist() == [0.125, 0.0, 0.25, 0.25, 0.125, 0.0]
    assert rows[:, scalars.ONE_MINUS_B1].tolist() == [0.25, 0.25, 0.25, 0.25, 0.5, 0.5]
    assert not rows[:, scalars.L2].any()
    assert not rows[:, [scalars.TRUST, scalars.LR_IN_MOMENT]].any()


@pytest.mark.parametrize("optax_form", [False, True])
def test_the_rows_of_lars_by_hand(optax_form):
    optimizer = jr.lars(
        0.5,
        0.125,
        trust_coefficient=0.25,
        eps=0.5,
        groups=[
            jr.Group("head/*", trust_coefficient=0.75, weight_decay=0.25),
            jr.Group("norm/*", scale=2, momentum=0.5),
        ],
        optax_form=optax_form,
    )
    _, rows = rows_of(optimizer)
    assert rows.shape == (12, scalars.ROW)
    # Decayed or not with a trust ratio, then the same without, for each group.
    assert rows[:, scalars.TRUST].reshape(3, 4).tolist() == [
        [0.25, 0.25, 0, 0],
        [0.75, 0.75, 0.75, 0.75],
        [0.25, 0.25, 0, 0],
    ]
    in_moment = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert rows[:, scalars.LR_IN_MOMENT].reshape(3, 4).tolist() == (
        [[1, 1, 1, 1]] * 3 if optax_form else in_moment
    )
    assert rows[:, scalars.L2].reshape(3, 4).tolist() == [
        [0.125, 0, 0.125, 0],
        [0.25, 0.25, 0.25, 0.25],
        [0.125, 0, 0.125, 0],
    ]
    assert rows[::4, scalars.MOMENTUM].tolist() == [np.float32(0.9), np.float32(0.9), 0.5]
    assert rows[::4, scalars.LR_SCALE].tolist() == [1, 1, 2]
    assert (rows[:, scalars.EPS] == 0.5).all()
    assert not rows[:, scalars.WEIGHT_DECAY].any()


def test_the_rows_of_lamb_and_lion_by_hand():
    numbers = {"b1": 0.75, "b2": 0.5, "weight_decay": 0.125}
    groups = [jr.Group("head/*", weight_decay=0.25)]
    _, rows = rows_of(jr.lamb(0.5, **numbers, groups=groups))
    assert rows[:, scalars.TRUST].tolist() == [1, 1, 0, 0] * 2
    assert rows[:, scalars.WEIGHT_DECAY].tolist() == [0.125, 0, 0.125, 0, *[0.25] * 4]
    assert (rows[:, scalars.ONE_MINUS_B1] == 0.25).all()
    assert (rows[:, scalars.EPS] == np.float32(1e-6)).all()
    assert not rows[:, [scalars.L2, scalars.LR_IN_MOMENT]].any()
    _, rows = rows_of(jr.lion(0.5, **numbers, groups=groups))
    assert rows[:, scalars.WEIGHT_DECAY].tolist() == [0.125, 0, 0.25, 0.25]
    assert (rows[:, scalars.ONE_MINUS_B1] == 0.25).all()
    assert (rows[:, scalars.ONE_MINUS_B2] == 0.5).all()
    assert not rows[:, [scalars.L2, scalars.TRUST, scalars.LR_IN_MOMENT]].any()


def test_a_trust_coefficient_is_set_where_there_is_a_trust_ratio():
    optimizer = jr.lars(
        0.5,
        trust_coefficient=lambda count: 0.5 / 2**count,
        groups=[jr.Group("head/*", trust_coefficient=0.75)],
    )
    header, rows = rows_of(optimizer)
    floats = jnp.concatenate([header, rows.reshape(-1)])
    for count, value in ((0, 0.5), (2, 0.125)):
        after = hyperparams.follow_schedules(optimizer.spec, floats, jnp.int32(count))
        trust = after[scalars.HEADER :].reshape(-1, scalars.ROW)[:, scalars.TRUST]
        assert trust.tolist() == [value, value, 0, 0, *[0.75] * 4]
    after = hyperparams.replace(optimizer.spec, floats, {}, {"head/*": {"trust_coefficient": 0.5}})
    assert hyperparams.read(optimizer.spec, after)["head/*/trust_coefficient"] == 0.5


def test_numbers_of_groups_are_no_part_of_the_spec_and_their_structure_is():
    def build(**values):
        return jr.adamw(0.1, groups=[jr.Group("a", **values)])

    assert build(scale=2).spec == build(scale=3).spec
    assert build(scale=2) != build(scale=3)
    assert build(scale=2) == build(scale=2)
    assert jr.adamw(0.1, groups=[jr.Group("b", name="a", scale=2)]) != build(scale=2)
    specs = [
        jr.adamw(0.1).spec,
        build(scale=2).spec,
        build(learning_rate=2).spec,
        build(scale=2, b1=0.5).spec,
        build(scale=optax.constant_schedule(2.0)).spec,
        build(scale=optax.constant_schedule(3.0)).spec,
        jr.adamw(0.1, groups=[jr.Group("b", scale=2)]).spec,
    ]
    assert len(set(specs)) == len(specs)
    assert build(scale=optax.constant_schedule(2.0)) == build(scale=optax.constant_schedule(2.0))


def test_an_optimizer_prints_its_groups_and_can_be_pickled():
    optimizer = jr.sgd(0.1, groups=[jr.Group("head/*", scale=2.0, weight_decay=0.5)])
    assert repr(optimizer) == (
        "sgd(learning_rate=0.1, weight_decay=0, "
        "groups=[Group('head/*', scale=2.0, weight_decay=0.5)])"
    )
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer


def test_a_plan_of_other_groups_is_not_taken_from_the_cache():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    for match, wanted in (("a", [2.0, 1.0]), ("b", [1.0, 2.0])):
        optimizer = jr.sgd(1.0, groups=[jr.Group(match, name="g", scale=2)], backend="xla")
        updates, _ = optimizer.update(params, optimizer.init(params))
        assert [-float(updates[path][0]) for path in "ab"] == wanted
