"""Decay and trust ratio fall where they should, for models as people write them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxrenaissance.plan import MemoryPlan
from jaxrenaissance.regions import BIAS_LIKE, WEIGHTS, Region
from jaxrenaissance.rules import default_rule, split_path


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def regions_of(tree, **options):
    return {leaf.path: leaf.region for leaf in MemoryPlan.build(tree, **options).leaves}


def group_of(tree, **options):
    return {path: region in BIAS_LIKE for path, region in regions_of(tree, **options).items()}


BIAS = Region.W_FC_BIAS
NORM_BIAS = Region.W_BN_BIAS
NORM_SCALE = Region.W_BN_WEIGHT
DENSE = Region.W_FC_WEIGHT
FIRST = Region.W_FIRST_CONV
DEEP = Region.W_DEEP_CONV


@pytest.mark.parametrize(
    ("path", "shape", "siblings", "region"),
    [
        # Biases, at any rank.
        ("attention/query/bias", (12, 64), {"kernel": (768, 12, 64)}, BIAS),
        ("layers/mlp/bias", (24, 4096), {"kernel": (24, 1024, 4096)}, BIAS),
        ("conv/bias", (64, 1, 1), {"weight": (64, 3, 3, 3)}, BIAS),
        ("linear/b", (10,), {"w": (20, 10)}, BIAS),
        ("experts/bias", (8, 512), {"kernel": (8, 256, 512)}, BIAS),
        ("layer_norm/offset", (64,), {"scale": (64,)}, NORM_BIAS),
        ("LayerNorm_0/bias", (64,), {"scale": (64,)}, NORM_BIAS),
        ("norm/beta", (64,), {"gamma": (64,)}, NORM_BIAS),
        ("norm/bias", (24, 64), {"scale": (24, 64)}, NORM_BIAS),
        ("norm/bias", (64,), {"weight": (64,)}, NORM_BIAS),
        # Scales of norms.
        ("RMSNorm_0/scale", (64,), {}, NORM_SCALE),
        ("layers/norm/scale", (24, 64), {"bias": (24, 64)}, NORM_SCALE),
        ("experts/norm/gamma", (8, 24, 64), {}, NORM_SCALE),
        ("norm/weight", (64,), {}, NORM_SCALE),
        ("norm/weight", (24, 64), {"bias": (24, 64)}, NORM_SCALE),
        ("norm/weight", (64, 8, 8), {"bias": (64, 8, 8)}, NORM_SCALE),
        # Weights.
        ("Dense_0/kernel", (3, 4), {"bias": (4,)}, DENSE),
        ("linear/weight", (4, 3), {"bias": (4,)}, DENSE),
        ("head/weight", (1, 64), {}, DENSE),
        ("linear/w", (3, 4), {"b": (4,)}, DENSE),
        ("attention/out/kernel", (12, 64, 768), {"bias": (768,)}, DENSE),
        ("experts/kernel", (8, 256, 512), {"bias": (8, 512)}, DENSE),
        ("moe/wi", (8, 256, 512), {}, DENSE),
        ("Embed_0/embedding", (100, 64), {}, DENSE),
        ("embed/embeddings", (100, 64), {}, DENSE),
        ("token_type/embedding", (1, 64), {}, DENSE),
        # Convolutions.
        ("Conv_0/kernel", (3, 3, 64, 64), {}, DEEP),
        ("Conv_0/kernel", (5, 64, 64), {}, DEEP),
        ("conv2_d/w", (3, 3, 64, 64), {"b": (64,)}, DEEP),
        ("conv1/weight", (64, 64, 3, 3), {"bias": (64, 1, 1)}, DEEP),
        ("Conv_0/kernel", (64, 64), {}, DENSE),
        # Anything else, by its rank without axes of size 1.
        ("cls", (1, 1, 768), {}, BIAS),
        ("class_embedding", (768,), {}, BIAS),
        ("pos_embedding", (1, 197, 768), {}, DENSE),
        ("log_std", (6,), {}, BIAS),
        ("temperature", (), {}, BIAS),
        ("relative_table", (15, 12), {}, DENSE),
        # The array may be an attribute of what bears the name.
        ("bn/scale/value", (64,), {}, NORM_SCALE),
        ("dense/kernel/raw_value", (64,), {}, DENSE),
        ("value", (64, 3), {}, DENSE),
    ],
)
def test_default_rule(path, shape, siblings, region):
    siblings = {**siblings, split_path(path)[1]: shape}
    assert default_rule(path, shape, siblings)[0] is region


def test_rules_say_what_decided():
    plan = MemoryPlan.build(
        {
            "Conv_0": {"kernel": array(3, 3, 3, 8), "bias": array(8)},
            "Norm_0": {"scale": array(8), "bias": array(8)},
            "cls": array(1, 1, 8),
        }
    )
    assert {leaf.path: leaf.rule for leaf in plan.leaves} == {
        "Conv_0/kernel": "first conv",
        "Conv_0/bias": "bias",
        "Norm_0/scale": "scale",
        "Norm_0/bias": "bias beside scale",
        "cls": "rank ≤ 1",
    }


@pytest.mark.parametrize(
    ("shapes", "first"),
    [
        ([(7, 7, 3, 64), (3, 3, 64, 64)], 0),
        ([(3, 3, 64, 64), (3, 3, 1, 8)], 1),
        ([(3, 3, 5, 64), (3, 3, 64, 64)], None),
        ([(3, 3, 3, 8), (3, 3, 3, 8)], 0),
        # Depthwise kernels have one input channel a group.
        ([(3, 3, 1, 32), (3, 3, 3, 32), (3, 3, 1, 64)], 1),
        ([(3, 3, 1, 4), (3, 3, 4, 8)], 0),
        ([], None),
    ],
)
def test_first_convolution_has_the_fewest_channels(shapes, first):
    tree = {f"Conv_{i}": {"kernel": array(*shape)} for i, shape in enumerate(shapes)}
    found = [path for path, region in regions_of(tree).items() if region == FIRST]
    assert found == ([] if first is None else [f"Conv_{first}/kernel"])


def test_first_convolution_where_output_channels_come_first():
    tree = {"conv1": {"weight": array(64, 3, 7, 7)}, "conv2": {"weight": array(4, 64, 3, 3)}}
    assert regions_of(tree) == {"conv1/weight": FIRST, "conv2/weight": DEEP}


def test_first_convolution_stacked_by_a_vmap():
    tree = {"conv1": {"kernel": array(2, 7, 7, 3, 64)}, "conv2": {"kernel": array(2, 3, 3, 64, 8)}}
    assert regions_of(tree, stacked=1) == {"conv1/kernel": FIRST, "conv2/kernel": DEEP}


def test_stacked_axes_are_not_counted():
    tree = {"norm": {"weight": array(24, 64)}, "token": array(24, 64)}
    assert group_of(tree) == {"norm/weight": False, "token": False}
    assert group_of(tree, stacked=1) == {"norm/weight": True, "token": True}


def test_scanned_transformer_of_flax():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
            return x + nn.Dense(8)(nn.RMSNorm()(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(11, 8)(tokens)
            layers = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return layers()(x, None)[0]

    tokens = jnp.zeros((1, 4), jnp.int32)
    params = jax.eval_shape(Model().init, jax.random.key(0), tokens)["params"]
    plan = MemoryPlan.build(params)
    for leaf in plan.leaves:
        name = leaf.path.rpartition("/")[2]
        assert (leaf.region in WEIGHTS) == (name in ("kernel", "embedding")), leaf
    assert {leaf.path: leaf.region for leaf in MemoryPlan.build(params, stacked=1).leaves} == {
        leaf.path: leaf.region for leaf in plan.leaves
    }


def test_nnx_state():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.head = nnx.Linear(8, 4, rngs=rngs)

    state = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
    found = {path.removesuffix("/value"): region for path, region in regions_of(state).items()}
    assert found == {
        "conv/bias": BIAS,
        "conv/kernel": FIRST,
        "head/bias": BIAS,
        "head/kernel": DENSE,
        "norm/bias": NORM_BIAS,
        "norm/scale": NORM_SCALE,
    }


def test_haiku_tree():
    tree = {
        "net/~/conv2_d": {"w": array(3, 3, 3, 8), "b": array(8)},
        "net/~/batch_norm": {"scale": array(1, 1, 1, 8), "offset": array(1, 1, 1, 8)},
        "net/~/linear": {"w": array(8, 4), "b": array(4)},
        "net/~/embed": {"embeddings": array(8, 4)},
    }
    assert regions_of(tree) == {
        "net/~/conv2_d/w": FIRST,
        "net/~/conv2_d/b": BIAS,
        "net/~/batch_norm/scale": NORM_SCALE,
        "net/~/batch_norm/offset": NORM_BIAS,
        "net/~/linear/w": DENSE,
        "net/~/linear/b": BIAS,
        "net/~/embed/embeddings": DENSE,
    }


def test_the_users_function_overrides_and_may_leave_the_decision():
    tree = {"lora": {"a": array(8, 2), "b": array(2, 8)}, "Dense_0": {"bias": array(8)}}

    def rules(path, leaf):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        return DENSE if path == "lora/b" else None

    plan = MemoryPlan.build(tree, rules=rules)
    assert {leaf.path: (leaf.region, leaf.rule) for leaf in plan.leaves} == {
        "lora/a": (DENSE, "rank ≥ 2"),
        "lora/b": (DENSE, "rules="),
        "Dense_0/bias": (BIAS, "bias"),
    }


@pytest.mark.parametrize("wrong", ["bias", 2, Region.G_FC_BIAS, Region.N])
def test_a_wrong_region_is_an_error_that_names_the_leaf(wrong):
    with pytest.raises(ValueError, match=r"rules: .*'a/b'"):
        MemoryPlan.build({"a": {"b": array(3)}}, rules=lambda path, leaf: wrong)
