r"""Trains an NNX model with batch statistics and dropout on scikit-learn's digits.

    python examples/flax_nnx.py
    python examples/flax_nnx.py --epochs 5 --batch-size 128

Lines marked "what changed" are all that differs from the usual loop, which has an nnx.Optimizer and
an nnx.jit: there every Variable of model and optimizer crosses the boundary of jit on each step.
Here a few buffers do, and the model exists inside the step only.
"""

import argparse
from typing import Any

import jax
import numpy as np
import optax
from digits_task import accuracy, batches, cross_entropy, load_data
from flax import nnx
from tqdm import tqdm

import jaxrenaissance as jr  # what changed
from jaxrenaissance.flax import NNXState


class Block(nnx.Module):
    """A convolution, a norm with running statistics."""

    def __init__(self, features_in: int, features_out: int, strides: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(
            features_in, features_out, (3, 3), strides=strides, use_bias=False, rngs=rngs
        )
        self.norm = nnx.BatchNorm(features_out, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.norm(self.conv(x)))


class Net(nnx.Module):
    """Images [n, 8, 8, 1] → logits [n, 10]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = ((1, 16, 1), (16, 32, 2), (32, 64, 2))
        self.blocks = nnx.List([Block(*size, rngs=rngs) for size in sizes])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean((1, 2))))


def loss_fn(model: Net, images: Any, labels: Any) -> jax.Array:
    return cross_entropy(model(images), labels)


@jax.jit(donate_argnums=0)  # what changed: nnx.jit
def train_step(state: NNXState, images: Any, labels: Any) -> tuple[NNXState, jax.Array]:
    model = state.model()  # what changed: the model comes from the state
    loss, grads = nnx.value_and_grad(loss_fn)(model, images, labels)
    # what changed: optimizer.update(model, grads). Statistics and dropout's counts come along.
    return state.apply_gradients(grads), loss


@nnx.jit
def evaluate(model: Net, images: Any, labels: Any) -> jax.Array:
    return accuracy(model(images), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    training, test = load_data()
    rng = np.random.default_rng(options.seed)
    steps_per_epoch = len(training[0]) // options.batch_size
    schedule = optax.cosine_decay_schedule(3e-3, options.epochs * steps_per_epoch)
    model = Net(nnx.Rngs(options.seed))
    # what changed: nnx.Optimizer; without a mask it decays neither biases nor norms
    tx = jr.adamw(schedule, weight_decay=0.1, mask="weights")
    state = NNXState.create(model, tx, wrt=nnx.Param)
    print(f"variables of the model: {len(jax.tree.leaves(nnx.state(model)))}")
    print(f"buffers of the state, moments included: {len(jax.tree.leaves(state))}")
    losses = []
    with tqdm(total=options.epochs * steps_per_epoch, unit="step") as bar:
        for _ in range(options.epochs):
            for images, labels in batches(*training, options.batch_size, rng):
                state, loss = train_step(state, images, labels)
                losses.append(loss)
                bar.update()
            jr.check(state)  # raises where many steps in a row were skipped for a NaN
            bar.set_postfix({"loss": f"{losses[-1]:.4f}"})
    model = state.model(full_precision=True)  # what changed: an ordinary module again
    model.eval()
    print(f"test accuracy: {evaluate(model, *test):.4f}")


if __name__ == "__main__":
    main()
