"""The task of the examples: scikit-learn's digits, the loss and the accuracy."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Arrays = tuple[np.ndarray, np.ndarray]


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
) -> Iterator[Arrays]:
    """One epoch in random order; what does not fill a batch is left out."""
    order = rng.permutation(len(images))
    for start in range(0, len(images) - size + 1, size):
        chosen = order[start : start + size]
        yield images[chosen], labels[chosen]


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
    """The mean over a batch: float32 at least."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(logits: Any, labels: Any) -> jax.Array:
    """The part of the images whose largest logit is the label's."""
    return jnp.mean(logits.argmax(-1) == labels)
