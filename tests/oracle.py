"""The optimizers in float64 NumPy, written from their formulas: what the tests compare against."""

from collections.abc import Sequence

import numpy as np

MOMENTS = {"sgd": 0, "momentum": 1, "nesterov": 1, "adam": 2, "adamw": 2}


class Oracle:
    """An optimizer over a list of leaves, in float64.

    Args:
        kind: "sgd", "momentum", "nesterov", "adam" or "adamw".
        leaves: the parameters.
        decayed: for each leaf whether weight decay applies to it; one bool: to all or none.
        decoupled: whether the decay shrinks the weights rather than adding to the gradient.
        skip_nonfinite: whether a non-finite gradient element makes the whole step do nothing.
        numbers: learning_rate, weight_decay, momentum, b1, b2, eps, eps_root; the rest has optax's
            defaults. Each may be a function of the updates made before.
    """

    def __init__(
        self,
        kind: str,
        leaves: Sequence[object],
        *,
        decayed: Sequence[bool] | bool = True,
        decoupled: bool | None = None,
        skip_nonfinite: bool = True,
        **numbers: object,
    ) -> None:
        self.kind = kind
        self.weights = [np.asarray(w, np.float64) for w in leaves]
        self.decayed = [decayed] * len(self.weights) if isinstance(decayed, bool) else list(decayed)
        self.decoupled = kind != "adam" if decoupled is None else decoupled
        self.skip_nonfinite = skip_nonfinite
        defaults = {"momentum": 0.9, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0}
        self.numbers = {"learning_rate": 1e-3, "weight_decay": 0.0, **defaults, **numbers}
        self.m = [np.zeros_like(w) for w in self.weights]
        self.v = [np.zeros_like(w) for w in self.weights]
        self.count = self.calls = self.skipped = 0

    def number(self, name: str) -> float:
        value = self.numbers[name]
        return float(value(self.count) if callable(value) else value)

    def step(self, gradients: Sequence[object]) -> list[np.ndarray]:
        """The weights after one call with these gradients."""
        gradients = [np.asarray(g).astype(np.float64) for g in gradients]
        self.calls += 1
        if self.skip_nonfinite and not all(np.isfinite(g).all() for g in gradients):
            self.skipped += 1
            return self.weights
        lr, wd = self.number("learning_rate"), self.number("weight_decay")
        for i, g in enumerate(gradients):
            w, decay = self.weights[i], wd if self.decayed[i] else 0.0
            if not self.decoupled:
                g = g + decay * w
            shrunk = w * (1 - lr * decay) if self.decoupled else w
            self.weights[i] = shrunk - lr * self._direction(i, g)
        self.count += 1
        return self.weights

    def _direction(self, i: int, g: np.ndarray) -> np.ndarray:
        if self.kind == "sgd":
            return g
        if self.kind in ("momentum", "nesterov"):
            beta = self.number("momentum")
            self.m[i] = beta * self.m[i] + g
            return self.m[i] if self.kind == "momentum" else beta * self.m[i] + g
        b1, b2, t = self.number("b1"), self.number("b2"), self.count + 1
        self.m[i] = b1 * self.m[i] + (1 - b1) * g
        self.v[i] = b2 * self.v[i] + (1 - b2) * g**2
        m, v = self.m[i] / (1 - b1**t), self.v[i] / (1 - b2**t)
        denominator = np.sqrt(v + self.number("eps_root")) + self.number("eps")
        # eps = 0 and gradients that were always zero: no update, rather than 0/0.
        return np.divide(m, denominator, out=np.zeros_like(m), where=denominator != 0)
