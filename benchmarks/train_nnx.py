"""The train steps of bench_train.py in Flax NNX: ResNet-50 once more."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from train_sides import TrainSide, optax_adamw, our_adamw
from train_tasks import CLASSES, SMALL_RESNET, Batch, cross_entropy, image_batches

from jaxrenaissance.flax import NNXState


class ConvNorm(nnx.Module):
    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        strides: int,
        dtype: Any,
        rngs: nnx.Rngs,
        scale_init: Any = nnx.initializers.ones,
    ) -> None:
        self.conv = nnx.Conv(
            inputs, outputs, (kernel, kernel), strides, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.norm = nnx.BatchNorm(
            outputs, momentum=0.9, dtype=dtype, scale_init=scale_init, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class Bottleneck(nnx.Module):
    def __init__(self, inputs: int, width: int, strides: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.reduce = ConvNorm(inputs, width, 1, 1, dtype, rngs)
        self.convolve = ConvNorm(width, width, 3, strides, dtype, rngs)
        self.expand = ConvNorm(width, 4 * width, 1, 1, dtype, rngs, nnx.initializers.zeros)
        if strides > 1 or inputs != 4 * width:
            self.project = ConvNorm(inputs, 4 * width, 1, strides, dtype, rngs)
        else:
            self.project = None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.reduce(x))
        y = self.expand(nnx.relu(self.convolve(y)))
        return nnx.relu(y + (x if self.project is None else self.project(x)))


class ResNet(nnx.Module):
    """Images [n, size, size, 3] → logits [n, 1000], in training; ResNet-50 by default."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        stages: tuple[int, ...] = (3, 4, 6, 3),
        width: int = 64,
        dtype: Any = jnp.bfloat16,
    ) -> None:
        self.dtype = dtype
        self.stem = ConvNorm(3, width, 7, 2, dtype, rngs)
        blocks, inputs = [], width
        for stage, number in enumerate(stages):
            features = width * 2**stage
            for block in range(number):
                strides = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(inputs, features, strides, dtype, rngs))
                inputs = 4 * features
        self.blocks = nnx.Sequential(*blocks)
        self.head = nnx.Linear(inputs, CLASSES, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(images.astype(self.dtype)))
        x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
        return self.head(self.blocks(x).mean((1, 2)))


def loss_fn(model: ResNet, batch: Batch) -> jax.Array:
    images, labels = batch
    return cross_entropy(model(images), labels)


def copied(model: ResNet) -> ResNet:
    """A model with arrays of its own, which a step may donate."""
    graph, leaves = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(jnp.copy, leaves))


def usual_side(
    model: ResNet, optimizer: optax.GradientTransformation, batches: list[Batch]
) -> TrainSide:
    """`nnx.jit` with `nnx.Optimizer`."""

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: ResNet, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    model = copied(model)
    arguments = model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    return TrainSide(step, arguments, batches, in_place=True)


def split_side(
    model: ResNet, optimizer: optax.GradientTransformation, batches: list[Batch]
) -> TrainSide:
    """`jax.jit` of what `nnx.split` gives, which spares the host the walk through the modules."""
    model = copied(model)
    graph, leaves = nnx.split((model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)))

    @jax.jit(donate_argnums=0)
    def step(leaves: Any, batch: Batch) -> Any:
        model, optimizer = nnx.merge(graph, leaves)
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return TrainSide(step, (leaves,), batches)


def state_side(model: ResNet, batches: list[Batch]) -> TrainSide:
    """Everything in a few buffers."""

    @jax.jit(donate_argnums=0)
    def step(state: NNXState, batch: Batch) -> Any:
        model = state.model()
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        return state.apply_gradients(grads), loss

    state = NNXState.create(model, our_adamw(), wrt=nnx.Param, compute_dtype="bfloat16")
    return TrainSide(step, (state,), batches)


def nnx_sides(pixels: int, quick: bool) -> dict[str, Callable[[], TrainSide]]:
    """By name, what makes a side: ResNet-50 with its running statistics, 64 images a batch."""
    sizes = SMALL_RESNET if quick else {}
    model = nnx.jit(lambda: ResNet(nnx.Rngs(0), **sizes))()
    batches = image_batches(pixels, quick)
    return {
        "ours": lambda: state_side(model, batches),
        "drop-in": lambda: usual_side(model, our_adamw(), batches),
        "optax split": lambda: split_side(model, optax_adamw(), batches),
        "optax": lambda: usual_side(model, optax_adamw(), batches),
    }
