import pickle
import time

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import FULL, KEY, LORA, MASKED, Layer, Pair, array, check_invariants, paths

from jaxrenaissance.models import MODELS, named_shapes
from jaxrenaissance.plan import MemoryPlan, PlanConfig
from jaxrenaissance.regions import BIAS_LIKE, WEIGHTS, Region


def test_layout_by_hand():
    plan = MemoryPlan.build(
        {
            "Conv_0": {"bias": array(8), "kernel": array(3, 3, 3, 8)},
            "head": {"kernel": array(33), "scale": array(1)},
            "norm": {"bias": array(40), "scale": array(40)},
        }
    )
    # head has no bias, so only norm has a bias of a norm.
    assert paths(plan) == [
        "Conv_0/bias",
        "Conv_0/kernel",
        "head/kernel",
        "head/scale",
        "norm/bias",
        "norm/scale",
    ]
    (arena,) = plan.arenas
    assert arena.leaves == (4, 3, 5, 0, 2, 1)
    assert arena.shapes == ((40,), (1,), (40,), (8,), (33,), (3, 3, 3, 8))
    assert arena.segments.tolist() == [
        [0, 40, 0, 0, 1],
        [64, 1, 1, 0, 1],
        [96, 40, 2, 0, 1],
        [160, 8, 3, 0, 1],
        [192, 33, 4, 0, 0],
        [256, 216, 5, 0, 0],
    ]
    assert arena.size == 480
    assert arena.dtype == np.float32
    assert arena.nbytes == plan.bytes() == 1920
    assert plan.num_parameters == 338
    assert plan.padding_bytes == 4 * (480 - 338)
    check_invariants(plan)


def test_stacked_leaf_has_a_segment_for_each_slice():
    plan = MemoryPlan.build({"w": array(2, 3, 5), "b": array(3)}, stacked={"w": 1})
    assert plan.arenas[0].segments.tolist() == [
        [0, 3, 0, 0, 1],
        [32, 15, 1, 0, 0],
        [64, 15, 1, 15, 0],
    ]
    assert [leaf.stacked for leaf in plan.leaves] == [0, 1]
    check_invariants(plan)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_each_of_several_devices_holds_whole_lines_of_every_leaf(shards):
    tree = {"w": array(7, 50), "b": array(5), "d": array(9, dtype=np.float64)}
    plan = MemoryPlan.build(tree, shards=shards)
    check_invariants(plan, shards)
    line = {1: 350, 2: 192, 3: 128, 8: 64}[shards]
    assert [arena.shapes for arena in plan.arenas] == [
        ((5,), (7, 50)) if shards == 1 else ((32,), (line,)),
        ((9,),) if shards == 1 else ((16,),),
    ]
    one = MemoryPlan.build(tree)
    assert (plan == one) == (shards == 1)
    assert plan.num_parameters == one.num_parameters == 364
    assert plan.padding_bytes == shards * plan.bytes() - 4 * 355 - 8 * 9


@pytest.mark.parametrize("shards", [0, -1, 1.0, True, None])
def test_bad_shards(shards):
    with pytest.raises(ValueError, match="shards"):
        MemoryPlan.build({"w": array(3)}, shards=shards)


EMPTY = array(0)


@pytest.mark.parametrize(
    "leaves",
    [
        [EMPTY, FULL, FULL],
        [FULL, FULL, EMPTY],
        [FULL, EMPTY, FULL, EMPTY],
        [EMPTY],
        [array(3, 0, 2), FULL],
        [array(), FULL, array()],
        [array(n) for n in (1, 3, 31, 32, 33)],
    ],
)
def test_empty_and_tiny_leaves(leaves):
    plan = MemoryPlan.build(leaves)
    check_invariants(plan)
    assert [leaf.size for leaf in plan.leaves] == [int(np.prod(x.shape)) for x in leaves]


def test_an_empty_leaf_lies_where_it_would_start():
    plan = MemoryPlan.build([FULL, EMPTY, FULL, EMPTY])
    assert [leaf.offset for leaf in plan.leaves] == [0, 32, 32, 64]
    assert plan.arenas[0].segments[:, 2].tolist() == [0, 2]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_an_empty_stacked_leaf(shape):
    plan = MemoryPlan.build([array(*shape), FULL], stacked={"0": 1})
    check_invariants(plan)
    assert len(plan.arenas[0].segments) == 1


def test_trees_of_one_leaf_and_of_none():
    plan = MemoryPlan.build(array(3))
    assert paths(plan) == [""]
    check_invariants(plan)
    for tree in ({}, [], None, {"a": None}):
        plan = MemoryPlan.build(tree)
        assert (plan.leaves, plan.arenas, plan.bytes()) == ((), (), 0)
        assert "0 trained leaves" in str(plan)
        with pytest.raises(ValueError, match="arena"):
            plan.region_range(Region.W_FC_BIAS)


def test_none_is_no_leaf():
    plan = MemoryPlan.build({"a": None, "b": FULL, "c": {"d": None}})
    assert paths(plan) == ["b"]
    assert jtu.tree_unflatten(plan.treedef, ["x"]) == {"a": None, "b": "x", "c": {"d": None}}


def test_half_precision_shares_the_float32_arena_and_float64_has_its_own():
    plan = MemoryPlan.build(
        [array(3, dtype=d) for d in (np.float64, jnp.bfloat16, jnp.float32, jnp.float16)]
    )
    check_invariants(plan)
    assert [arena.dtype for arena in plan.arenas] == [np.float32, np.float64]
    assert [leaf.arena for leaf in plan.leaves] == [1, 0, 0, 0]
    assert [leaf.dtype for leaf in plan.leaves] == [
        np.float64,
        jnp.bfloat16,
        np.float32,
        np.float16,
    ]
    only64 = MemoryPlan.build([array(3, dtype=np.float64)])
    assert [arena.dtype for arena in only64.arenas] == [np.float64]
    assert only64.leaves[0].arena == 0


@pytest.mark.parametrize(
    "leaf",
    [
        array(3, dtype=jnp.int32),
        array(3, dtype=jnp.int8),
        array(3, dtype=jnp.complex64),
        array(3, dtype=bool),
        array(3, dtype=jnp.float8_e4m3fn),
        array(3, dtype=jax.dtypes.float0),
        KEY,
        1.0,
        "text",
    ],
)
def test_a_leaf_that_an_arena_cannot_hold(leaf):
    tree = {"a": {"bad": leaf, "good": array(3)}}
    dtype = getattr(leaf, "dtype", None)
    what = f"has dtype {dtype.name}" if dtype is not None else f"is a {type(leaf).__name__}"
    with pytest.raises(ValueError, match=r"'a/bad' .*trainable=") as error:
        MemoryPlan.build(tree)
    assert what in str(error.value)
    with pytest.raises(ValueError, match=r"'a/bad' .*exclude it from trainable="):
        MemoryPlan.build(tree, trainable="*")

    plan = MemoryPlan.build(tree, trainable="*/good")
    assert paths(plan) == ["a/good"]
    assert plan.trained == (False, True)
    assert plan.treedef == jtu.tree_structure(tree)
    assert "1 not trained" in str(plan)


def test_region_ranges_of_a_group_are_contiguous_and_meet():
    plan = MemoryPlan.build(named_shapes("resnet50"))
    bias_like = plan.region_range(BIAS_LIKE[0], BIAS_LIKE[-1])
    weights = plan.region_range(WEIGHTS[0], WEIGHTS[-1])
    assert bias_like == (0, 2 * 26560 + 1024)  # 1000 biases and their padding
    assert weights == (bias_like.size, 25_557_056 - bias_like.size)
    for leaf in plan.leaves:
        own = bias_like if leaf.region in BIAS_LIKE else weights
        assert own.offset <= leaf.offset < leaf.offset + leaf.size <= own.offset + own.size


def test_region_ranges_are_those_of_every_series():
    plan = MemoryPlan.build(MASKED)
    for series in "WGMV":
        first, last = Region[f"{series}_BN_BIAS"], Region[f"{series}_FC_BIAS"]
        assert plan.region_range(first, last) == (0, 32)
        assert plan.region_range(Region[f"{series}_FC_WEIGHT"]) == (32, 64)


@pytest.mark.parametrize(
    "arguments",
    [
        (Region.W_FC_BIAS, Region.W_BN_BIAS),
        (Region.W_FC_BIAS, Region.G_FC_BIAS),
        (Region.N,),
        (Region.S_SCALAR_FP32, Region.S_SCALAR_INT32),
        (Region.W_FC_BIAS, None, 1),
        (Region.W_FC_BIAS, None, -1),
    ],
)
def test_region_range_errors(arguments):
    with pytest.raises(ValueError, match=r"last:|arena:|holds no leaves"):
        MemoryPlan.build(MASKED).region_range(*arguments)


def test_equal_plans_are_equal_and_hash_alike():
    one, other = (MemoryPlan.build(named_shapes("mlp")) for _ in range(2))
    assert one is not other
    assert one == other
    assert hash(one) == hash(other)
    assert one.arenas[0] == other.arenas[0]
    assert hash(one.arenas[0]) == hash(other.arenas[0])
    assert one != "a plan"
    assert one.arenas[0] != "a layout"
    assert {one: 1}[other] == 1


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (MASKED, {"mask": True}),
        (MASKED, {"shards": 64}),
        (MASKED, {"stacked": {"b/*": 1}}),
        (MASKED, {"trainable": "a/*"}),
        (MASKED, {"rules": lambda path, leaf: Region.W_DEEP_CONV}),
        ({**MASKED, "b": {"kernel": array(3, 3, dtype=jnp.bfloat16)}}, {}),
        ({**MASKED, "b": {"kernel": array(9, 1)}}, {}),
        ({**MASKED, "b": {"weight": array(3, 3)}}, {}),
        ({**MASKED, "b": Pair(array(3, 3), None)}, {}),
    ],
)
def test_different_plans_differ(tree, options):
    assert MemoryPlan.build(tree, **options) != MemoryPlan.build(MASKED)


def test_plans_differ_by_tree_even_where_the_paths_agree():
    one, other = {"x": Layer(FULL, None)}, {"x": Pair(FULL, None)}
    assert paths(MemoryPlan.build(one)) == paths(MemoryPlan.build(other))
    assert MemoryPlan.build(one) != MemoryPlan.build(other)


def test_layouts_survive_pickling():
    plan = MemoryPlan.build(MASKED)
    hash(plan)
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert not copy.arenas[0].segments.flags.writeable


def test_shapes_tracers_and_arrays_give_the_same_plan():
    def init():
        return {"a": jnp.zeros((3, 4)), "b": jnp.zeros(4, jnp.bfloat16), "c": jnp.zeros(())}

    plans = [MemoryPlan.build(init()), MemoryPlan.build(jax.eval_shape(init))]
    plans.append(MemoryPlan.build(jtu.tree_map(np.asarray, init())))
    jax.jit(lambda tree: plans.append(MemoryPlan.build(tree)))(init())
    assert plans[1:] == plans[:1] * 3


def test_many_leaves_are_fast():
    tree = {
        f"layer_{i}": {"kernel": array(3, 4), "bias": array(4), "norm": {"scale": array(4)}}
        for i in range(7000)
    }
    start = time.process_time()
    plan = MemoryPlan.build(tree, trainable=["*"], mask=True)
    hash(plan)
    str(plan)
    assert time.process_time() - start < 2
    assert len(plan.arenas[0].segments) == 21_000
    check_invariants(MemoryPlan.build({k: tree[k] for k in list(tree)[:50]}))


def test_more_than_two_to_the_31_elements():
    plan = MemoryPlan.build([array(2**31 + 5), array(2**16, 2**17), array(3)], stacked={"1": 1})
    check_invariants(plan)
    assert plan.arenas[0].size > 2**33


@pytest.mark.parametrize(
    ("name", "leaves", "millions"),
    [("mlp", 6, 0.269), ("resnet50", 161, 25.557), ("gpt2", 148, 124.440), ("many2000", 2000, 2.0)],
)
def test_named_models(name, leaves, millions):
    plan = MemoryPlan.build(named_shapes(name))
    assert name in MODELS
    assert len(plan.leaves) == leaves
    assert plan.num_parameters / 1e6 == pytest.approx(millions, abs=1e-3)
    check_invariants(plan)


def test_an_unknown_model():
    with pytest.raises(ValueError, match=r"name: expected one of mlp, .*got 'resnet'"):
        named_shapes("resnet")


@pytest.mark.parametrize(
    ("kind", "moments"),
    [
        ("sgd", 0),
        ("momentum", 1),
        ("nesterov", 1),
        ("lars", 1),
        ("lion", 1),
        ("adam", 2),
        ("adamw", 2),
        ("lamb", 2),
    ],
)
def test_an_optimizer_gets_the_series_it_needs(kind, moments):
    plan = MemoryPlan.build(MASKED)
    config = PlanConfig.for_kind(kind)
    assert config == PlanConfig(moments=moments, ema=False, accumulator=False)
    assert plan.total_bytes(config) == (1 + moments) * plan.bytes()
    with_ema = PlanConfig.for_kind(kind, ema=True)
    assert plan.total_bytes(with_ema) == (2 + moments) * plan.bytes(1) == plan.bytes(2 + moments)
    with_both = PlanConfig.for_kind(kind, ema=True, accumulator=True)
    assert plan.total_bytes(with_both) == plan.bytes(3 + moments)


def test_an_unknown_kind():
    with pytest.raises(ValueError, match=r"kind: expected one of sgd, .*got 'adagrad'"):
        PlanConfig.for_kind("adagrad")


def test_the_table_shows_every_leaf_and_why():
    text = str(MemoryPlan.build(LORA, trainable="lora/*", stacked={"lora/a": 1}))
    for word in ("lora/a", "8×2 (1 stacked)", "lora/b", "W_FC_BIAS", "no decay", "rank ≤ 1"):
        assert word in text
    assert "base/kernel" not in text
    assert "2 trained leaves, 32 parameters; 2 not trained" in text


def test_values_of_the_leaves_by_path():
    plan = MemoryPlan.build({"b": array(3), "w": [array(4, 4), array(5)]})
    assert plan.by_path(jnp.arange(3.0)) == {"b": 0, "w/0": 1, "w/1": 2}
    assert plan.by_path([7, 8, 9]) == {"b": 7, "w/0": 8, "w/1": 9}
    members = plan.by_path(np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(members["w/1"], [2, 5])
    inside = jax.jit(lambda values: plan.by_path(values)["w/0"])
    assert inside(jnp.arange(3.0)) == 1
    for values in (np.ones(4), np.ones(()), np.ones((3, 1))):
        with pytest.raises(ValueError, match=r"values: expected one for each of 3 leaves"):
            plan.by_path(values)


def test_a_long_table_is_abbreviated():
    plan = MemoryPlan.build(named_shapes("resnet50"))
    assert "… 111 more" in str(plan)
    whole = plan.table(all=True)
    assert "more" not in whole
    assert all(path in whole for path in paths(plan))
    assert len(str(plan).splitlines()) < 75
    assert repr(plan) == "MemoryPlan(161 leaves, 25557032 parameters, float32[25557056])"
    assert repr(plan.arenas[0]) == "ArenaLayout(float32[25557056], 161 leaves, 161 segments)"


names = st.sampled_from(["kernel", "bias", "scale", "weight", "w", "b", "conv", "embedding", "x"])


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


dtypes = st.sampled_from([np.float32, jnp.bfloat16, np.float16, np.float64])


trees = st.recursive(
    st.builds(jax.ShapeDtypeStruct, shapes, dtypes) | st.none(),
    lambda inner: st.dictionaries(names, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=30,
)


@settings(deadline=None)
@given(trees, st.integers(1, 5), st.sampled_from([None, True, False]), st.integers(0, 2))
def test_random_trees(tree, shards, mask, axes):
    plan = MemoryPlan.build(
        tree, shards=shards, mask=mask, stacked=lambda path, leaf: min(axes, leaf.ndim)
    )
    check_invariants(plan, shards)
    leaves = jtu.tree_leaves(tree)
    assert [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in plan.leaves]
    assert plan == MemoryPlan.build(
        tree, shards=shards, mask=mask, stacked=lambda path, leaf: min(axes, leaf.ndim)
    )
