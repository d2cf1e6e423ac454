"""Shapes of well-known models, for the plan command, benchmarks and tests; Flax is not needed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Shapes = dict[str, Any]
"""Nested dicts of float32 `jax.ShapeDtypeStruct`s."""


def named_shapes(name: str) -> Shapes:
    """The parameters' shapes of a model.

    Args:
        name: one of `MODELS`: "mlp" (784-256-256-10), "resnet50" (for ImageNet, with Flax's names:
            161 leaves, 25.6M parameters), "gpt2" (the small one: 148 leaves, 124.4M parameters),
            "many2000" (2000 leaves of about 1000 elements).

    Raises:
        ValueError: if there is no such model.
    """
    if name not in _MODELS:
        raise ValueError(f"name: expected one of {', '.join(MODELS)}; got {name!r}")
    return _MODELS[name]()


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _dense(inputs: int, outputs: int) -> Shapes:
    return {"kernel": _array(inputs, outputs), "bias": _array(outputs)}


def _norm(features: int) -> Shapes:
    return {"scale": _array(features), "bias": _array(features)}


def _mlp() -> Shapes:
    widths = (784, 256, 256, 10)
    return {f"Dense_{i}": _dense(*widths[i : i + 2]) for i in range(3)}


def _resnet50() -> Shapes:
    # As in Flax's examples/imagenet: bottleneck blocks without biases before the norms.
    shapes: Shapes = {
        "conv_init": {"kernel": _array(7, 7, 3, 64)},
        "bn_init": _norm(64),
    }
    inputs, block = 64, 0
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for i in range(blocks):
            parts: Shapes = {
                "Conv_0": {"kernel": _array(1, 1, inputs, width)},
                "BatchNorm_0": _norm(width),
                "Conv_1": {"kernel": _array(3, 3, width, width)},
                "BatchNorm_1": _norm(width),
                "Conv_2": {"kernel": _array(1, 1, width, 4 * width)},
                "BatchNorm_2": _norm(4 * width),
            }
            if i == 0:
                parts["conv_proj"] = {"kernel": _array(1, 1, inputs, 4 * width)}
                parts["norm_proj"] = _norm(4 * width)
            shapes[f"BottleneckResNetBlock_{block}"] = parts
            inputs, block = 4 * width, block + 1
    shapes["Dense_0"] = _dense(inputs, 1000)
    return shapes


def _gpt2() -> Shapes:
    width, layers = 768, 12
    shapes: Shapes = {
        "wte": {"embedding": _array(50257, width)},
        "wpe": {"embedding": _array(1024, width)},
        "ln_f": _norm(width),
    }
    for i in range(layers):
        shapes[f"h_{i}"] = {
            "ln_1": _norm(width),
            "attn": {"c_attn": _dense(width, 3 * width), "c_proj": _dense(width, width)},
            "ln_2": _norm(width),
            "mlp": {"c_fc": _dense(width, 4 * width), "c_proj": _dense(4 * width, width)},
        }
    return shapes


def _many2000() -> Shapes:
    # Sizes around 1000 that end on no tile; half of them biases.
    return {
        f"layer_{i:04d}": {"kernel": _array(25, 36 + i % 9), "bias": _array(996 + i % 9)}
        for i in range(1000)
    }


_MODELS: dict[str, Callable[[], Shapes]] = {
    "mlp": _mlp,
    "resnet50": _resnet50,
    "gpt2": _gpt2,
    "many2000": _many2000,
}
MODELS = tuple(_MODELS)
