"""What bench_train.py trains in Flax Linen: models and random data."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from gpt_net import GPT, KERNELS_IN_BFLOAT16, Size  # pyright: ignore[reportMissingImports]

CLASSES = 1000
NUM_BATCHES = 4  # each is seen again and again, so that the losses fall

Batch = tuple[jax.Array, jax.Array]


class Task(NamedTuple):
    """A model and its data.

    Attributes:
        variables: what the model's `init` gives: params, and batch_stats where it has them.
        apply: (variables, inputs) → (logits, new batch_stats).
        batches: inputs and labels, on the device.
        compute_dtype: of `TrainState.create`: the dtypes to which the modules round parameters
            that are float32, so that both sides compute in the same precision.
    """

    variables: Any
    apply: Callable[[Any, jax.Array], tuple[jax.Array, Any]]
    batches: list[Batch]
    compute_dtype: Any


class MLP(nn.Module):
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.widths[:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


class Bottleneck(nn.Module):
    width: int
    strides: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype
        )
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), self.strides)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            projected = conv(4 * self.width, (1, 1), self.strides, name="conv_proj")(x)
            x = norm(name="norm_proj")(projected)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images [n, size, size, 3] → logits [n, 1000], in training; ResNet-50 by default."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.astype(self.dtype)
        x = nn.Conv(self.width, (7, 7), 2, use_bias=False, dtype=self.dtype, name="conv_init")(x)
        x = nn.BatchNorm(False, momentum=0.9, dtype=self.dtype, name="bn_init")(x)
        x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                strides = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(self.width * 2**stage, strides, self.dtype)(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2)))


SMALL_RESNET: dict[str, Any] = {"stages": (1,), "width": 4}


def mlp(quick: bool) -> Task:
    """784-256-256-10, in float32: a model so small that a step is mostly the host's."""
    inputs, hidden = (64, 16) if quick else (784, 256)
    batches = random_batches((128, inputs), 10)
    return _task(MLP((hidden, hidden, 10)), batches, compute_dtype=None)


def resnet(pixels: int, quick: bool) -> Task:
    """ResNet-50 with its running statistics, 64 images a batch."""
    model = ResNet(**SMALL_RESNET) if quick else ResNet()
    return _task(model, image_batches(pixels, quick), compute_dtype="bfloat16")


def gpt2(quick: bool) -> Task:
    """GPT-2 small: 8 sequences of 1024 tokens a batch."""
    size, vocabulary = Size(12, 12, 768, 1024), 50257
    if quick:
        size, vocabulary = Size(1, 2, 16, 16), 64
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(NUM_BATCHES):
        tokens = jnp.asarray(rng.integers(vocabulary, size=(8, size.context + 1), dtype=np.int32))
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    return _task(GPT(size, vocabulary, jnp.bfloat16), batches, compute_dtype=KERNELS_IN_BFLOAT16)


def image_batches(pixels: int, quick: bool) -> list[Batch]:
    """Images and labels of `CLASSES`."""
    return random_batches((4 if quick else 64, pixels, pixels, 3), CLASSES)


def random_batches(shape: tuple[int, ...], classes: int) -> list[Batch]:
    """Normal inputs of a shape, and a label for each."""
    rng = np.random.default_rng(0)
    return [
        (
            jnp.asarray(rng.standard_normal(shape, np.float32)),
            jnp.asarray(rng.integers(classes, size=shape[0], dtype=np.int32)),
        )
        for _ in range(NUM_BATCHES)
    ]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all labels, in float32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _task(model: nn.Module, batches: list[Batch], compute_dtype: Any) -> Task:
    def apply(variables: Any, inputs: jax.Array) -> tuple[jax.Array, Any]:
        logits, updated = model.apply(variables, inputs, mutable=["batch_stats"])
        return logits, updated.get("batch_stats", {})

    variables = jax.jit(model.init)(jax.random.key(0), batches[0][0])
    return Task(variables, apply, batches, compute_dtype)
