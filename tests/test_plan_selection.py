"""Which leaves a plan trains, stacks, decays and gives trust ratios."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from plans import KEY, LORA, MASKED, array, check_invariants, groups, paths

from jaxrenaissance.plan import MemoryPlan
from jaxrenaissance.regions import Region


@pytest.mark.parametrize(
    "stacked", [1, {"*": 1}, {"a*": 1, "*": 1}, lambda path, leaf: leaf.ndim - 1]
)
def test_ways_to_say_what_is_stacked(stacked):
    plan = MemoryPlan.build({"a": array(2, 3), "b": array(4, 5)}, stacked=stacked)
    assert [leaf.stacked for leaf in plan.leaves] == [1, 1]
    assert len(plan.arenas[0].segments) == 6


@pytest.mark.parametrize(
    ("stacked", "message"),
    [
        (3, "stacked: .*'a/w'"),
        (-1, "stacked: .*'a/w'"),
        (True, "stacked: .*'a/w'"),
        (1.0, "stacked: .*'a/w'"),
        ({"*/w": 3}, "stacked: .*'a/w'"),
        ({"*/kernel": 1}, r"stacked: the pattern '\*/kernel' matches no leaf"),
        ({"*": 1, "a/*": 2}, "stacked: patterns disagree .*'a/w'"),
        (lambda path, leaf: 3, "stacked: .*'a/w'"),
        (lambda path, leaf: None, "stacked: .*'a/w'"),
        ("*", "stacked: .*'a/w'"),
    ],
)
def test_stacked_errors_name_leaf_or_pattern(stacked, message):
    with pytest.raises(ValueError, match=message):
        MemoryPlan.build({"a": {"w": array(2, 3)}}, stacked=stacked)


@pytest.mark.parametrize(
    "trainable",
    [
        "lora/*",
        "*lora*",
        ["lora/a", "lora/b"],
        ("lora/?",),
        lambda path, leaf: path.startswith("lora"),
        lambda path, leaf: np.bool_(leaf.dtype == jnp.float32 and leaf.ndim == 2),
        {"base": {"kernel": False, "scale": False}, "lora": {"a": True, "b": True}},
        {"base": False, "lora": np.True_},
    ],
)
def test_ways_to_say_what_is_trained(trainable):
    plan = MemoryPlan.build(LORA, trainable=trainable)
    assert plan.trained == (False, False, True, True)
    assert paths(plan) == ["lora/a", "lora/b"]
    check_invariants(plan)


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ("head/*", r"trainable: the pattern 'head/\*' matches no leaf.*'base/kernel'"),
        (["lora/*", "head"], "trainable: the pattern 'head' matches no leaf"),
        (["lora/*", 3], "trainable: expected a pattern, got 3"),
        (lambda path, leaf: False, "trainable: selects no leaf"),
        (False, "trainable: selects no leaf"),
        (lambda path, leaf: None, "trainable: expected a bool for 'base/kernel', got None"),
        ({"base": False, "lora": {"a": True, "b": 1}}, "trainable: expected a bool for 'lora/b'"),
        ({"base": False}, "trainable: expected a tree of bools"),
        (["lora/*", True], "trainable: expected a pattern"),
    ],
)
def test_trainable_errors(trainable, message):
    with pytest.raises(ValueError, match=message):
        MemoryPlan.build(LORA, trainable=trainable)


def test_a_frozen_norm_still_says_what_its_bias_is():
    tree = {"norm": {"scale": array(8), "bias": array(8)}}
    (leaf,) = MemoryPlan.build(tree, trainable="*/bias").leaves
    assert leaf.region is Region.W_BN_BIAS


def test_options_for_leaves_are_asked_for_trained_leaves_only():
    seen = []

    def note(value):
        def function(path, leaf):
            seen.append(path)
            return value

        return function

    MemoryPlan.build(LORA, trainable="lora/*", rules=note(None), stacked=note(0))
    assert sorted(set(seen)) == ["lora/a", "lora/b"]
    # A number for all leaves does not speak of frozen ones either.
    frozen = {"key": KEY, "w": array(3, 4)}
    assert MemoryPlan.build(frozen, trainable="w", stacked=1).leaves[0].stacked == 1


@pytest.mark.parametrize(
    ("mask", "decayed"),
    [
        (None, {"a/kernel", "b/kernel"}),
        ("weights", {"a/kernel", "b/kernel"}),
        (True, {"a/bias", "a/kernel", "b/kernel"}),
        (False, set()),
        ({"a": {"bias": True, "kernel": False}, "b": {"kernel": True}}, {"a/bias", "b/kernel"}),
        ({"a": True, "b": False}, {"a/bias", "a/kernel"}),
        (lambda params: jtu.tree_map(lambda x: x.ndim > 1, params), {"a/kernel", "b/kernel"}),
        (lambda params: {"a": np.False_, "b": {"kernel": True}}, {"b/kernel"}),
        (lambda params: True, {"a/bias", "a/kernel", "b/kernel"}),
    ],
)
def test_mask(mask, decayed):
    plan = MemoryPlan.build(MASKED, mask=mask)
    check_invariants(plan)
    assert {path for path, group in groups(plan).items() if group == "decay"} == decayed
    assert plan.groups == ("decay", "no decay")
    assert plan.num_groups == 2
    # A mask moves no leaf.
    assert [leaf.offset for leaf in plan.leaves] == [
        leaf.offset for leaf in MemoryPlan.build(MASKED).leaves
    ]


def test_mask_that_is_a_callable_tree():
    @jtu.register_dataclass
    @dataclass
    class Model:
        weight: Any
        bias: Any

        def __call__(self, x):
            raise AssertionError("called as a function of the parameters")

    plan = MemoryPlan.build(Model(array(3, 3), array(3)), mask=Model(False, True))
    assert groups(plan) == {"weight": "no decay", "bias": "decay"}


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("biases", "mask: expected None"),
        ({"a": True}, "mask: expected a tree of bools"),
        ({"a": {"bias": True, "kernel": "no"}, "b": True}, "mask: expected a bool for 'a/kernel'"),
        ({"a": 1, "b": True}, "mask: expected a bool for 'a', got 1"),
        (lambda params: params, "mask: expected a bool for 'a/bias'"),
        (lambda params: None, "mask: expected a tree of bools"),
    ],
)
def test_mask_errors(mask, message):
    with pytest.raises(ValueError, match=message):
        MemoryPlan.build(MASKED, mask=mask)


def trusted(plan):
    return {path for path, group in groups(plan).items() if group.endswith(", trust")}


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        (None, {"a/kernel", "b/kernel"}),
        ("weights", {"a/kernel", "b/kernel"}),
        (True, {"a/bias", "a/kernel", "b/kernel"}),
        (False, set()),
        ({"a": {"bias": True, "kernel": False}, "b": True}, {"a/bias", "b/kernel"}),
        (lambda params: jtu.tree_map(lambda x: x.ndim == 1, params), {"a/bias"}),
    ],
)
def test_trust_ratio_mask(mask, wanted):
    plan = MemoryPlan.build(MASKED, trust_ratio_mask=mask, mask={"a": True, "b": False})
    check_invariants(plan)
    assert trusted(plan) == wanted
    assert plan.num_groups == 4
    # The two masks are independent, and move no leaf.
    decayed = {path for path, group in groups(plan).items() if group.startswith("decay")}
    assert decayed == {"a/bias", "a/kernel"}
    plain = MemoryPlan.build(MASKED)
    assert [leaf.offset for leaf in plan.leaves] == [leaf.offset for leaf in plain.leaves]
    assert plan != plain
    assert "no decay, " + ("trust" if "b/kernel" in wanted else "no trust") in str(plan)


def test_no_bias_or_norm_of_a_model_has_a_trust_ratio():
    layers, heads = 3, 2
    tree = {
        "attention": {"query": {"kernel": array(8, heads, 4), "bias": array(heads, 4)}},
        "class_token": array(1, 1, 8),
        "conv": {"weight": array(6, 3, 3, 3), "bias": array(6, 1, 1)},
        "haiku": {"w": array(4, 4), "b": array(4), "offset": array(4)},
        "layers": {"mlp": {"kernel": array(layers, 8, 8), "bias": array(layers, 8)}},
        "rms": {"scale": array(8)},
        "scanned_norm": {"scale": array(layers, 8), "bias": array(layers, 8)},
    }
    plan = MemoryPlan.build(tree, trust_ratio_mask=None, stacked={"layers/*": 1, "scanned*": 1})
    weights = {"attention/query/kernel", "conv/weight", "haiku/w", "layers/mlp/kernel"}
    assert trusted(plan) == weights
    assert {path for path, group in groups(plan).items() if group == "decay, trust"} == weights
    assert set(groups(plan).values()) == {"decay, trust", "no decay, no trust"}


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("biases", "trust_ratio_mask: expected None"),
        ({"a": True}, "trust_ratio_mask: expected a tree of bools"),
        (lambda params: params, "trust_ratio_mask: expected a bool for 'a/bias'"),
    ],
)
def test_trust_ratio_mask_errors(mask, message):
    with pytest.raises(ValueError, match=message):
        MemoryPlan.build(MASKED, trust_ratio_mask=mask)
