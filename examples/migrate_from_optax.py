"""Switches an optax loop to a TrainState in mid-training, and back again.

    python examples/migrate_from_optax.py

A dense network learns scikit-learn's digits three times from the same start: all the way with
optax; with optax for the first third and in place from there; and with optax again for the last
third. Moments and counts are taken along, so that all three end at the same parameters, but for the
rounding of float32.
"""

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_task import Arrays, accuracy, batches, cross_entropy, load_data
from tqdm import tqdm

import jaxrenaissance as jr

# Without this, a GPU multiplies matrices of float32 with fewer bits, and runs drift apart.
jax.config.update("jax_default_matmul_precision", "highest")

WIDTHS, BATCH_SIZE = (64, 128, 128, 10), 128
RATE = optax.cosine_decay_schedule(2e-3, 400)

Params = list[dict[str, jax.Array]]

# What the loop has used so far …
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=0.01))
# … and the same thing here. Without mask=True, biases would no longer be decayed.
OPTIMIZER = jr.adamw(RATE, weight_decay=0.01, mask=True, max_norm=1.0)


def init(key: jax.Array) -> Params:
    layers = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        key, own = jax.random.split(key)
        kernel = jax.nn.initializers.he_normal()(own, (inputs, outputs))
        layers.append({"kernel": kernel, "bias": jnp.zeros(outputs)})
    return layers


def predict(params: Params, images: Any) -> jax.Array:
    """Images [n, 8, 8, 1] → logits [n, 10]."""
    x = images.reshape(len(images), -1)
    for i, layer in enumerate(params):
        x = jax.nn.relu(x) if i > 0 else x
        x = x @ layer["kernel"] + layer["bias"]
    return x


def loss_fn(params: Params, images: Any, labels: Any) -> jax.Array:
    return cross_entropy(predict(params, images), labels)


@jax.jit(donate_argnums=(0, 1))
def optax_step(params: Params, opt_state: Any, images: Any, labels: Any) -> tuple[Params, Any]:
    grads = jax.grad(loss_fn)(params, images, labels)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state  # pyright: ignore[reportReturnType]


@jax.jit(donate_argnums=0)
def train_step(state: jr.TrainState, images: Any, labels: Any) -> jr.TrainState:
    grads = jax.grad(loss_fn)(state.compute_params, images, labels)
    return state.apply_gradients(grads)


def fit(data: Arrays, epochs: int, switches: list[str], name: str) -> Params:
    """Trains in equal parts, each with "optax" or "in place"."""
    params = init(jax.random.key(0))
    opt_state = TX.init(params)
    state = None
    for epoch in tqdm(range(epochs), desc=name, unit="epoch"):
        how = switches[epoch * len(switches) // epochs]
        if how == "in place" and state is None:
            state = jr.from_optax(params, opt_state, OPTIMIZER)
        elif how == "optax" and state is not None:
            params, opt_state = jr.to_optax(state, TX)
            state = None
        for batch in batches(*data, BATCH_SIZE, np.random.default_rng(epoch)):
            if state is not None:
                state = train_step(state, *batch)
            else:
                params, opt_state = optax_step(params, opt_state, *batch)
    return params if state is None else state.params


def difference(a: Params, b: Params) -> float:
    return max(
        float(jnp.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    if options.epochs < 3:
        parser.error("argument --epochs: expected 3 or more, one for each part")
    training, test = load_data()
    runs = {
        "optax": ["optax"],
        "switched": ["optax", "in place", "in place"],
        "switched and back": ["optax", "in place", "optax"],
    }
    fitted = {name: fit(training, options.epochs, how, name) for name, how in runs.items()}
    moved = difference(fitted["optax"], init(jax.random.key(0)))
    print(f"the largest change of a parameter in training: {moved:.2g}")
    for name in ("switched", "switched and back"):
        far = difference(fitted[name], fitted["optax"])
        print(f"{name}: the largest difference to optax all the way: {far:.1e}")
    for name, params in fitted.items():
        print(f"test accuracy, {name}: {accuracy(predict(params, test[0]), test[1]):.4f}")


if __name__ == "__main__":
    main()
