r"""Trains a Linen CNN with batch statistics on scikit-learn's digits.

    python examples/flax_linen.py
    python examples/flax_linen.py --epochs 5 --batch-size 128

The loop is the usual one of Flax and optax. Lines marked "what changed" are all that differs from
it: the state, batch statistics included, is 6 buffers where it was 42 arrays.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_task import accuracy, batches, cross_entropy, load_data
from flax import linen as nn
from tqdm import tqdm

import jaxrenaissance as jr  # what changed
from jaxrenaissance.flax import TrainState  # what changed: from flax.training.train_state


class Net(nn.Module):
    """Images [n, 8, 8, 1] → logits [n, 10]."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features, strides in ((16, 1), (32, 2), (64, 2)):
            x = nn.Conv(features, (3, 3), strides, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x.mean((1, 2)))


class NetState(TrainState):  # as a subclass of Flax's
    batch_stats: Any


@jax.jit(donate_argnums=0)
def train_step(state: NetState, images: Any, labels: Any) -> tuple[NetState, jax.Array]:
    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        return cross_entropy(logits, labels), updated["batch_stats"]

    params = state.compute_params  # what changed: state.params works too, and is full precision
    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


@jax.jit
def evaluate(state: NetState, images: Any, labels: Any) -> jax.Array:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return accuracy(state.apply_fn(variables, images, train=False), labels)


def initial_state(seed: int, num_updates: int) -> NetState:
    model = Net()
    variables = model.init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)), train=False)
    schedule = optax.cosine_decay_schedule(3e-3, num_updates)
    return NetState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        # what changed: the optimizer; without a mask it decays neither biases nor norms
        tx=jr.adamw(schedule, weight_decay=0.1, mask="weights"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    training, test = load_data()
    rng = np.random.default_rng(options.seed)
    steps_per_epoch = len(training[0]) // options.batch_size
    state = initial_state(options.seed, options.epochs * steps_per_epoch)
    print(f"buffers of the state: {len(jax.tree.leaves(state))}")
    losses = []
    with tqdm(total=options.epochs * steps_per_epoch, unit="step") as bar:
        for _ in range(options.epochs):
            for images, labels in batches(*training, options.batch_size, rng):
                state, loss = train_step(state, images, labels)
                losses.append(loss)
                bar.update()
            jr.check(state)  # raises where many steps in a row were skipped for a NaN
            bar.set_postfix({"loss": f"{losses[-1]:.4f}"})
    print(f"test accuracy: {evaluate(state, *test):.4f}")


if __name__ == "__main__":
    main()
