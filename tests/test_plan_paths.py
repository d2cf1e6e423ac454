"""The paths of leaves, in whatever containers they lie."""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from flax import linen as nn
from flax import nnx, struct
from flax.core import FrozenDict
from plans import Layer, Pair, array, check_invariants, paths

from jaxrenaissance.packed import all_paths
from jaxrenaissance.paths import leaves_with_paths, matches
from jaxrenaissance.plan import MemoryPlan
from jaxrenaissance.regions import WEIGHTS, Region


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda k, b: {"x": {"kernel": k, "bias": b}}, {"x/kernel", "x/bias"}),
        (lambda k, b: FrozenDict({"x": {"kernel": k, "bias": b}}), {"x/kernel", "x/bias"}),
        (lambda k, b: Pair(k, b), {"kernel", "bias"}),
        (lambda k, b: [Layer(k, b)], {"0/kernel", "0/bias"}),
        (lambda k, b: {"x": (k, [b])}, {"x/0", "x/1/0"}),
    ],
)
def test_containers(make, expected):
    tree = make(array(3, 4), array(4))
    plan = MemoryPlan.build(tree)
    check_invariants(plan)
    assert set(paths(plan)) == expected
    assert [(leaf.region in WEIGHTS, leaf.shape) for leaf in plan.leaves] == [
        (x.ndim == 2, x.shape) for x in jtu.tree_leaves(tree)
    ]
    assert plan.treedef == jtu.tree_structure(tree)


def test_names_that_repeat_in_different_branches():
    layer = {"kernel": array(3, 3), "bias": array(3)}
    tree = {"a": {"Dense_0": layer}, "b": {"Dense_0": {**layer, "scale": array(3)}}}
    found = {leaf.path: leaf.region for leaf in MemoryPlan.build(tree).leaves}
    assert found == {
        "a/Dense_0/bias": Region.W_FC_BIAS,
        "a/Dense_0/kernel": Region.W_FC_WEIGHT,
        "b/Dense_0/bias": Region.W_BN_BIAS,
        "b/Dense_0/kernel": Region.W_FC_WEIGHT,
        "b/Dense_0/scale": Region.W_BN_WEIGHT,
    }


def test_an_array_at_two_places_is_two_leaves():
    tied = jnp.ones((3, 4), jnp.float32)
    plan = MemoryPlan.build({"embed": {"embedding": tied}, "head": {"kernel": tied}})
    assert [leaf.offset for leaf in plan.leaves] == [0, 32]


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*/bias", "a/b/bias", True),
        ("*/bias", "bias", False),
        ("bias", "a/bias", False),
        ("a/*", "a/b/c", True),
        ("?/b", "a/b", True),
        ("[ab]/c", "b/c", True),
        ("A/*", "a/b", False),
        ("*", "", True),
    ],
)
def test_patterns_match_the_whole_path(pattern, path, expected):
    assert matches(pattern, path) is expected


def test_two_leaves_of_one_path_are_refused():
    tree = {"a/b": jnp.ones(2), "a": {"b": jnp.ones(3)}}
    with pytest.raises(ValueError, match="'a/b' is the path of more than one leaf"):
        MemoryPlan.build(tree)


class Attention(NamedTuple):
    query: Any
    key: Any
    value: Any


class Gate(NamedTuple):
    value: Any


class Both(NamedTuple):
    value: Any
    raw_value: Any


@struct.dataclass
class Cell:
    value: Any


class Projections(eqx.Module):
    key: Any
    value: Any


def test_only_flax_boxes_leave_their_value_out_of_the_path():
    tree = {
        "attn": Attention(*[array(2, 2)] * 3),
        "eqx": Projections(array(2, 2), array(2, 2)),
        "gate": Gate(array(3)),
        "cell": Cell(array(3)),
        "both": Both(array(1), array(1)),
        "head": nnx.Param(array(2, 2)),
        "list": [nn.Partitioned(array(2), ("a",)), nn.LogicallyPartitioned(array(2), ("a",))],
        "module": nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
        "nested": nnx.Param({"a": array(1), "b": array(1)}),
    }
    plan = MemoryPlan.build(tree)
    expected = [
        *("attn/query", "attn/key", "attn/value", "both/value", "both/raw_value", "cell/value"),
        *("eqx/key", "eqx/value", "gate/value", "head", "list/0", "list/1"),
        *("module/bias", "module/kernel", "nested/value/a", "nested/value/b"),
    ]
    assert paths(plan) == all_paths(plan) == expected
    assert paths(MemoryPlan.build(tree, trainable="attn/*")) == expected[:3]
    assert [path for path, _ in leaves_with_paths(tree)] == expected


def test_paths_where_nothing_is_looked_into():
    tree = {"a": Gate(1), "b": nnx.Param(2), "c": [3, 4], "d": None}
    found = leaves_with_paths(tree, lambda x: isinstance(x, list | nnx.Variable))
    assert found == [("a/value", 1), ("b", tree["b"]), ("c", [3, 4])]
    assert leaves_with_paths(nnx.Param(2)) == leaves_with_paths(2) == [("", 2)]
    assert leaves_with_paths(Gate(2)) == [("value", 2)]
