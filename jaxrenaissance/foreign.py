"""What to use instead of an optax transformation that was handed to `TrainState`."""

import functools
import types
from typing import Any

import optax

from .transform import Optimizer

_BEFORE = "the same transformation on the gradients, before apply_gradients"
_FROZEN = "TrainState.create(trainable=…) for frozen leaves"

# The factory's name in optax → what this package has for it.
_INSTEAD = {
    "scale_by_adam": "jr.adam or jr.adamw",
    "scale_by_lion": "jr.lion",
    "scale_by_trust_ratio": "jr.lars or jr.lamb",
    "trace": "momentum= of jr.sgd or jr.lars",
    "add_decayed_weights": "weight_decay= and mask= of jr.adamw, or of jr.sgd with decoupled=False",
    "scale_by_learning_rate": "learning_rate=, a number or a schedule",
    "scale_by_schedule": "learning_rate=, which takes the schedule",
    "scale": "learning_rate=",
    "inject_hyperparams": "the numbers themselves, traced or not, and state.replace_hyperparams",
    "apply_if_finite": "skip_nonfinite=True, the default",
    "zero_nans": "skip_nonfinite=True, the default",
    "masked": f"mask= for weight decay, trust_ratio_mask=, groups= with jr.Group, {_FROZEN}",
    "set_to_zero": "TrainState.create(trainable=…)",
    "partition": f"groups= with jr.Group, {_FROZEN}",
    "multi_transform": f"groups= with jr.Group, {_FROZEN}",
    "freeze": "TrainState.create(trainable=…)",
    "selective_transform": _FROZEN,
    "clip": "max_value=",
    "clip_by_global_norm": "max_norm=",
    "ema": "ema_decay= where the weights are to be averaged; of the updates, jr.sgd(momentum=…)",
    "MultiSteps": "accumulate=jr.Accumulate(…)",
    "clip_by_block_rms": _BEFORE,
    "adaptive_grad_clip": _BEFORE,
    "centralize": _BEFORE,
}
_OURS = "jr.adamw, jr.adam, jr.sgd, jr.lars, jr.lamb, jr.lion"
_CONTAINERS = ("chain", "named_chain", "identity", "with_extra_args_support")
_MAX_DEPTH = 6


def check_optimizer(optimizer: Any) -> None:
    """Raises a TypeError unless it is an optimizer of this package; one of optax's with advice."""
    if isinstance(optimizer, Optimizer):
        return
    if isinstance(optimizer, optax.GradientTransformation | optax.MultiSteps):
        raise TypeError(
            "optimizer: TrainState updates in place and takes an optimizer of this package "
            f"({_OURS}), got an optax transformation. Use {_advice(optimizer)}"
        )
    raise TypeError(f"optimizer: expected one made by {_OURS}; got {optimizer!r}")


def _advice(transformation: Any) -> str:
    """Advice for an optax transformation: what it is made of, and what to use for each part."""
    names = list(dict.fromkeys(_parts(transformation.update, 0)))
    parts = [f"for optax.{name}: {_INSTEAD[name]}" for name in names if name in _INSTEAD]
    unknown = [f"optax.{name}" for name in names if name not in _INSTEAD]
    if unknown:
        parts.append(
            f"for {', '.join(unknown)}: the same transformation on the gradients, before "
            "apply_gradients; or keep optax's training loop, which takes the jr optimizers too"
        )
    return "; ".join(parts) or f"one of {_OURS}"


def _parts(function: Any, depth: int) -> list[str]:
    """Names of the optax factories whose update functions are called, found in the closures."""
    if depth > _MAX_DEPTH:
        return []
    if isinstance(function, functools.partial):
        return _parts(function.func, depth + 1)
    if isinstance(function, types.MethodType):  # Of optax.MultiSteps and what wraps like it.
        own = vars(function.__self__).values()
        wrapped = [x.update for x in own if isinstance(x, optax.GradientTransformation)]
        return [type(function.__self__).__name__, *_parts(wrapped, depth + 1)]
    if isinstance(function, list | tuple):
        return [name for item in function for name in _parts(item, depth + 1)]
    module = getattr(function, "__module__", None) or ""
    qualified = getattr(function, "__qualname__", "")
    factory, _, inner = qualified.partition(".<locals>.")
    if not callable(function) or not module.startswith("optax") or not inner:
        return []
    names = [] if factory in _CONTAINERS or "init" in inner else [factory]
    cells = getattr(function, "__closure__", None) or ()
    return names + [name for cell in cells for name in _parts(cell.cell_contents, depth + 1)]
