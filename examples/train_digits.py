"""Trains a small convolutional network on scikit-learn's digits, its parameters in one arena.

    python examples/train_digits.py
    python examples/train_digits.py --optimizer nesterov --backend xla --epochs 10 --plot run.png

Prints the memory plan and the time per step, draws loss and accuracy, and ends with the accuracy on
images that it was not trained on.
"""

import functools
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_options import Options, parse_options
from digits_plot import save_plot
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxrenaissance as jr

Arrays = tuple[np.ndarray, np.ndarray]

# name → (learning rate at the start, what makes the optimizer)
OPTIMIZERS = {
    "sgd": (0.3, jr.sgd),
    "momentum": (0.05, functools.partial(jr.sgd, momentum=0.9)),
    "nesterov": (0.05, functools.partial(jr.sgd, momentum=0.9, nesterov=True)),
    "adam": (3e-3, jr.adam),
    "adamw": (3e-3, functools.partial(jr.adamw, weight_decay=0.1, mask="weights")),
}


class DigitsNet(nn.Module):
    """Images [n, 8, 8, 1] → logits [n, 10]."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = images
        for features, strides in ((16, 1), (32, 2), (64, 2)):
            x = nn.Conv(features, (3, 3), strides, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x.mean((1, 2)))


MODEL = DigitsNet()


@jax.jit(donate_argnums=0)
def train_step(
    state: jr.TrainState, images: jax.Array, labels: jax.Array
) -> tuple[jr.TrainState, dict[str, jax.Array]]:
    """One step of the optimizer, in place: the state that was given is used up."""

    def loss_fn(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        variables = {"params": params, "batch_stats": state.extra.tree}
        logits, updated = MODEL.apply(variables, images, train=True, mutable=["batch_stats"])
        return cross_entropy(logits, labels), (logits, updated["batch_stats"])

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (logits, batch_stats)), grads = grad_fn(state.compute_params)
    # Where a NaN makes it skip this step, the batch statistics stay as they were, too.
    state = state.apply_gradients(grads, extra=state.extra.replace(batch_stats))
    return state, {"loss": loss, "accuracy": accuracy(logits, labels)}


@jax.jit
def evaluate(state: jr.TrainState, images: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Loss and accuracy of the state's parameters and batch statistics."""
    variables = {"params": state.compute_params, "batch_stats": state.extra.tree}
    logits = MODEL.apply(variables, images, train=False)
    return {"loss": cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(logits: Any, labels: jax.Array) -> jax.Array:
    return jnp.mean(logits.argmax(-1) == labels)


def load_data() -> tuple[Arrays, Arrays]:
    """Images [n, 8, 8, 1] in [0, 1] and labels [n], for training and for the test."""
    digits: Any = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    training, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    return (images[training], labels[training]), (images[test], labels[test])


def batches(
    images: np.ndarray, labels: np.ndarray, size: int, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One epoch in random order; what does not fill a batch is left out."""
    order = rng.permutation(len(images))
    for start in range(0, len(images) - size + 1, size):
        chosen = order[start : start + size]
        yield images[chosen], labels[chosen]


def initial_state(options: Options, num_steps: int) -> jr.TrainState:
    """Parameters and batch statistics, each in one buffer, and the optimizer's moments."""
    default_rate, factory = OPTIMIZERS[options.optimizer]
    learning_rate = options.learning_rate or default_rate
    schedule = optax.cosine_decay_schedule(learning_rate, num_steps)
    optimizer = factory(schedule, backend=options.backend)

    def init() -> tuple[Any, jr.Packed]:
        variables = MODEL.init(jax.random.key(options.seed), jnp.zeros((1, 8, 8, 1)), train=False)
        return variables["params"], jr.Packed(variables["batch_stats"], backend=options.backend)

    return jr.TrainState.init(init, optimizer, has_extra=True)


def train(options: Options, training: Arrays, test: Arrays) -> float:
    """Trains, prints and draws; returns the accuracy on the test images."""
    steps_per_epoch = len(training[0]) // options.batch_size
    num_steps = options.epochs * steps_per_epoch
    state = initial_state(options, num_steps)
    print(state.plan, state, sep="\n\n")

    rng = np.random.default_rng(options.seed)
    train_metrics, test_metrics, seconds = [], [], []
    with tqdm(total=num_steps, unit="step") as bar:
        for _ in range(options.epochs):
            start, epoch_metrics = time.perf_counter(), []
            for images, labels in batches(*training, options.batch_size, rng):
                state, metrics = train_step(state, images, labels)
                epoch_metrics.append(metrics)
                bar.update()
            train_metrics.append(jax.device_get(epoch_metrics))  # waits for the last step
            seconds.append((time.perf_counter() - start) / steps_per_epoch)
            jr.check(state)  # raises where many steps in a row were skipped for a NaN
            test_metrics.append(jax.device_get(evaluate(state, *test)))
            bar.set_postfix({"test accuracy": f"{test_metrics[-1]['accuracy']:.4f}"})

    final = test_metrics[-1]["accuracy"]
    note = "without the first, which compiles" if len(seconds) > 1 else "compiling included"
    median = statistics.median(seconds[1:] or seconds)
    print(f"time per step: {1e3 * median:.2f} ms (median over the epochs, {note})")
    title = f"Digits with {options.optimizer}: {final:.1%} of the test images right"
    save_plot(options.plot, train_metrics, test_metrics, title)
    print(f"loss and accuracy: {options.plot}")
    return final


def served_device(backend: str | None) -> Any:
    """A device for a compiled backend; None, JAX's default, for the others."""
    return jax.devices(backend)[0] if backend in ("cpu", "cuda") else None


def main() -> None:
    training, test = load_data()
    description = (__doc__ or "").splitlines()[0]
    options = parse_options(description, list(OPTIMIZERS), max_batch_size=len(training[0]))
    try:
        with jax.default_device(served_device(options.backend)):
            print(f"test accuracy: {train(options, training, test):.4f}")
    except jr.BackendUnavailable as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
