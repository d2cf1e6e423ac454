"""The optimizers that the bench command compares, as each library has them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from .. import optimizers
from ..transform import Optimizer

LEARNING_RATE, WEIGHT_DECAY, MOMENTUM = 1e-3, 0.1, 0.9
_DECAY = {"weight_decay": WEIGHT_DECAY}
_MASKED = {**_DECAY, "mask": "weights"}
_TRUST_MASKED = {"trust_ratio_mask": "weights"}


class Kind(NamedTuple):
    """An optimizer: how to make it, and the bytes a parameter that its step must move.

    Each float32 array is read or written once a pass: weights, gradients and moments.
    """

    ours: Callable[..., Optimizer]
    """With ``skip_nonfinite`` as its argument."""
    optax: Callable[[], optax.GradientTransformation]
    torch: tuple[str, dict[str, Any]] | None
    """A name in `torch.optim` and its arguments; None where torch has no such optimizer."""
    our_bytes: int
    look_bytes: int
    """More where the gradients are looked at before the update; 0 where norms do that anyway."""
    other_bytes: int
    """Of optax and torch, which look for nothing."""


def _ours(make: Callable[..., Optimizer], **arguments: Any) -> Callable[..., Optimizer]:
    return lambda skip_nonfinite: make(LEARNING_RATE, skip_nonfinite=skip_nonfinite, **arguments)


def _optax(make: Any, **arguments: Any) -> Callable[[], optax.GradientTransformation]:
    return lambda: make(LEARNING_RATE, **arguments)


KINDS = {
    "sgd": Kind(_ours(optimizers.sgd), _optax(optax.sgd), ("SGD", {}), 12, 4, 12),
    "momentum": Kind(
        _ours(optimizers.sgd, momentum=MOMENTUM),
        _optax(optax.sgd, momentum=MOMENTUM),
        ("SGD", {"momentum": MOMENTUM}),
        20,
        4,
        20,
    ),
    "adam": Kind(_ours(optimizers.adam), _optax(optax.adam), ("Adam", {}), 28, 4, 28),
    "adamw": Kind(
        _ours(optimizers.adamw, **_MASKED),
        _optax(optax.adamw, **_DECAY),
        ("AdamW", _DECAY),
        28,
        4,
        28,
    ),
    # Weights and gradients for the norms, then weights, momentum and gradients.
    "lars": Kind(
        _ours(optimizers.lars, **_DECAY, weight_decay_mask="weights", **_TRUST_MASKED),
        _optax(optax.lars, **_DECAY),
        None,
        28,
        0,
        28,
    ),
    # Ours forms the update twice, first for its norm. optax need not: it keeps the update, which is
    # written, read for its norm and read again: 28 + 12.
    "lamb": Kind(
        _ours(optimizers.lamb, **_MASKED, **_TRUST_MASKED),
        _optax(optax.lamb, **_DECAY),
        None,
        44,
        4,
        40,
    ),
    "lion": Kind(_ours(optimizers.lion, **_MASKED), _optax(optax.lion, **_DECAY), None, 20, 4, 20),
}
