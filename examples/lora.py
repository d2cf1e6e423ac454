"""Adapts a frozen bfloat16 network to another task by low-rank adapters, in plain JAX.

    python examples/lora.py

A small network learns scikit-learn's digits and is frozen. Then the images are turned by a quarter,
and it can no longer read them. Adapters learn to (Hu et al., https://arxiv.org/abs/2106.09685):
each adds the product of two thin matrices, a and b, to a kernel of the base, which keeps its bits.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from digits_task import Arrays, accuracy, batches, cross_entropy, load_data
from tqdm import tqdm

import jaxrenaissance as jr

WIDTHS, RANK = (64, 256, 256, 10), 8
EPOCHS, BATCH_SIZE = 20, 64

Params = dict[str, list[dict[str, jax.Array]]]


def init(key: jax.Array) -> Params:
    """A network of dense layers, and adapters that change nothing yet: b is zero."""
    base, lora = [], []
    he_normal = jax.nn.initializers.he_normal()
    for inputs, outputs in itertools.pairwise(WIDTHS):
        key, base_key, lora_key = jax.random.split(key, 3)
        base.append({"kernel": he_normal(base_key, (inputs, outputs)), "bias": jnp.zeros(outputs)})
        lora.append({"a": he_normal(lora_key, (inputs, RANK)), "b": jnp.zeros((RANK, outputs))})
    return {"base": base, "lora": lora}


def predict(params: Params, images: Any) -> jax.Array:
    """Images [n, 8, 8, 1] → logits [n, 10]; float32, also over a bfloat16 base."""
    x = images.reshape(len(images), -1)
    for i, (layer, adapter) in enumerate(zip(params["base"], params["lora"], strict=True)):
        x = jax.nn.relu(x) if i > 0 else x
        x = x @ layer["kernel"] + x @ adapter["a"] @ adapter["b"] + layer["bias"]
    return x


def adapter_rule(path: str, leaf: jax.ShapeDtypeStruct) -> jr.Region | None:
    """By its name `b` would be a bias, and have no weight decay; here it is a matrix."""
    return jr.Region.W_FC_WEIGHT if path.endswith("/b") else None


@jax.jit(donate_argnums=0)
def train_step(
    state: jr.TrainState, images: jax.Array, labels: jax.Array
) -> tuple[jr.TrainState, jax.Array]:
    """One step of the optimizer; what is frozen has no gradients, as nothing asks for them."""

    def loss_fn(params: Params) -> jax.Array:
        return cross_entropy(predict(params, images), labels)

    loss, grads = jax.value_and_grad(loss_fn)(state.compute_params)
    return state.apply_gradients(grads), loss


def fit(name: str, state: jr.TrainState, images: np.ndarray, labels: np.ndarray) -> Params:
    """Trains what is not frozen."""
    rng = np.random.default_rng(0)
    steps = len(labels) // BATCH_SIZE
    with tqdm(total=EPOCHS * steps, desc=name, unit="step") as bar:
        for _ in range(EPOCHS):
            losses = []
            for batch in batches(images, labels, BATCH_SIZE, rng):
                state, loss = train_step(state, *batch)
                losses.append(loss)
                bar.update()
            bar.set_postfix({"loss": f"{np.mean(jax.device_get(losses)):.4f}"})
            jr.check(state)
    return state.params


def turned(data: Arrays) -> Arrays:
    images, labels = data
    return np.rot90(images, axes=(1, 2)), labels


def accuracy_of(params: Params, images: np.ndarray, labels: np.ndarray) -> float:
    return float(accuracy(predict(params, images), labels))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def main() -> None:
    training, test = load_data()
    params = init(jax.random.key(0))
    state = jr.TrainState.create(
        params, jr.adamw(1e-3, weight_decay=0.01, mask="weights"), trainable="base/*"
    )
    params = fit("base", state, *training)
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params["base"])
    params = {"base": base, "lora": params["lora"]}

    optimizer = jr.adamw(3e-3, weight_decay=0.01, mask="weights")
    state = jr.TrainState.create(params, optimizer, trainable="lora/*", rules=adapter_rule)
    frozen = sum(leaf.size for leaf in state.frozen)
    print(state.plan, end="\n\n")
    print(f"parameters: {state.plan.num_parameters:,} trained, {frozen:,} frozen in bfloat16")
    adapted = fit("adapters", state, *turned(training))

    print(f"the base kept its bits: {bits(adapted['base']) == bits(base)}")
    print(f"test accuracy, upright digits: {accuracy_of(params, *test):.4f}")
    print(f"test accuracy, turned digits, before: {accuracy_of(params, *turned(test)):.4f}")
    print(f"test accuracy, turned digits, after:  {accuracy_of(adapted, *turned(test)):.4f}")


if __name__ == "__main__":
    main()
