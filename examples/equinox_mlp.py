r"""Trains an Equinox MLP on scikit-learn's digits.

    python examples/equinox_mlp.py
    python examples/equinox_mlp.py --epochs 5 --batch-size 128

Lines marked "what changed" are all that differs from the usual loop of Equinox and optax: the
arrays of the model are taken out once, and put back inside of the step.
"""

import argparse
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from digits_task import Arrays, accuracy, batches, cross_entropy, load_data
from tqdm import tqdm

import jaxrenaissance as jr  # what changed


@eqx.filter_value_and_grad
def loss_fn(model: Any, images: Any, labels: Any) -> jax.Array:
    return cross_entropy(predict(model, images), labels)


def predict(model: Any, images: Any) -> jax.Array:
    """Images [n, 8, 8, 1] → logits [n, 10]."""
    return jax.vmap(model)(images.reshape(len(images), -1))


@eqx.filter_jit(donate="all-except-first")
def train_step(
    batch: Arrays, state: jr.TrainState, rest: eqx.Module
) -> tuple[jr.TrainState, jax.Array]:
    model = eqx.combine(state.compute_params, rest)  # what changed: the model comes from the state
    loss, grads = loss_fn(model, *batch)
    # what changed: optim.update and eqx.apply_updates, in one
    return state.apply_gradients(grads), loss


@eqx.filter_jit
def evaluate(model: Any, images: Any, labels: Any) -> jax.Array:
    return accuracy(predict(model, images), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    training, test = load_data()
    rng = np.random.default_rng(options.seed)
    steps_per_epoch = len(training[0]) // options.batch_size
    schedule = optax.cosine_decay_schedule(3e-3, options.epochs * steps_per_epoch)
    model = eqx.nn.MLP(64, 10, 128, 3, key=jax.random.key(options.seed))
    # what changed: the optimizer; without a mask it does not decay biases
    optim = jr.adamw(schedule, weight_decay=0.1, mask="weights")
    # what changed: optim.init(eqx.filter(model, eqx.is_inexact_array))
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    state = jr.TrainState.create(params, optim)
    print(state.plan)
    losses = []
    with tqdm(total=options.epochs * steps_per_epoch, unit="step") as bar:
        for _ in range(options.epochs):
            for batch in batches(*training, options.batch_size, rng):
                state, loss = train_step(batch, state, rest)
                losses.append(loss)
                bar.update()
            jr.check(state)  # raises where many steps in a row were skipped for a NaN
            bar.set_postfix({"loss": f"{losses[-1]:.4f}"})
    model = eqx.combine(state.params, rest)  # what changed: an ordinary model again
    print(f"test accuracy: {evaluate(model, *test):.4f}")


if __name__ == "__main__":
    main()
