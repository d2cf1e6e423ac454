"""The convolutional network of the examples on digits, and a step of its training."""

from typing import Any

import jax
import jax.numpy as jnp
from digits_task import accuracy, cross_entropy
from flax import linen as nn

import jaxrenaissance as jr


class DigitsNet(nn.Module):
    """Images [n, 8, 8, 1] → logits [n, 10]; computes in the images' dtype."""

    axis_name: str | None = None
    """Of the devices in `jax.shard_map`, over all of which batch statistics are taken."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x, dtype = images, images.dtype
        for features, strides in ((16, 1), (32, 2), (64, 2)):
            x = nn.Conv(features, (3, 3), strides, use_bias=False, dtype=dtype)(x)
            norm = nn.BatchNorm(
                use_running_average=not train, momentum=0.9, dtype=dtype, axis_name=self.axis_name
            )
            x = nn.relu(norm(x))
        return nn.Dense(10, dtype=dtype)(x.mean((1, 2)))


MODEL = DigitsNet()


@jax.jit
def _variables(key: jax.Array) -> Any:
    return MODEL.init(key, jnp.zeros((1, 8, 8, 1)), train=False)


def init(seed: int, backend: str | None = None) -> tuple[Any, jr.Packed]:
    """Parameters, and batch statistics in one buffer."""
    variables = _variables(jax.random.key(seed))
    return variables["params"], jr.Packed(variables["batch_stats"], backend=backend)


def step(
    state: jr.TrainState, images: jax.Array, labels: jax.Array, model: DigitsNet = MODEL
) -> tuple[jr.TrainState, dict[str, jax.Array]]:
    """One step of the optimizer."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.extra.tree}
        logits, updated = model.apply(variables, images, train=True, mutable=["batch_stats"])
        loss = cross_entropy(logits, labels)
        return state.scale_loss(loss), (loss, logits, updated["batch_stats"])

    grads, (loss, logits, batch_stats) = jax.grad(loss_fn, has_aux=True)(state.compute_params)
    # Where a NaN makes it skip this step, the batch statistics stay as they were, too.
    state = state.apply_gradients(grads, extra=state.extra.replace(batch_stats))
    return state, {"loss": loss, "accuracy": accuracy(logits, labels)}


train_step = jax.jit(step, donate_argnums=0)
"""In place: the state that was given is used up."""


@jax.jit
def evaluate(
    params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array
) -> dict[str, jax.Array]:
    """Loss and accuracy of parameters and batch statistics."""
    logits = MODEL.apply({"params": params, "batch_stats": batch_stats}, images, train=False)
    return {"loss": cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}
