"""The optimizers in float64 NumPy, written from their formulas: what the tests compare against."""

from collections.abc import Sequence

import numpy as np

MOMENTS = {
    "sgd": 0,
    "momentum": 1,
    "nesterov": 1,
    "adam": 2,
    "adamw": 2,
    "lars": 1,
    "lars_nesterov": 1,
    "lamb": 2,
    "lion": 1,
}


class Oracle:
    """An optimizer over a list of leaves, in float64.

    Args:
        kind: one of `MOMENTS`.
        leaves: the parameters.
        decayed: for each leaf whether weight decay applies to it; one bool: to all or none.
        decoupled: whether the decay shrinks the weights rather than adding to the gradient.
        trusted: for each leaf whether it has a trust ratio, for LARS and LAMB; one bool as above.
        stacked: how many leading axes of each leaf are slices with ratios of their own.
        optax_form: LARS as optax has it.
        skip_nonfinite: whether a non-finite gradient element makes the whole step do nothing.
        numbers: learning_rate, weight_decay, momentum, b1, b2, eps, eps_root,
            trust_coefficient, min_norm, max_ratio; the rest has optax's defaults. Each may be a
            function of the updates made before.
    """

    def __init__(
        self,
        kind: str,
        leaves: Sequence[object],
        *,
        decayed: Sequence[bool] | bool = True,
        decoupled: bool | None = None,
        trusted: Sequence[bool] | bool = True,
        stacked: Sequence[int] | int = 0,
        optax_form: bool = False,
        skip_nonfinite: bool = True,
        **numbers: object,
    ) -> None:
        self.kind = kind
        self.weights = [np.asarray(w, np.float64) for w in leaves]
        self.decayed = [decayed] * len(self.weights) if isinstance(decayed, bool) else list(decayed)
        self.decoupled = kind != "adam" if decoupled is None else decoupled
        count = len(self.weights)
        self.trusted = [trusted] * count if isinstance(trusted, bool) else list(trusted)
        self.stacked = [stacked] * count if isinstance(stacked, int) else list(stacked)
        self.optax_form = optax_form
        self.skip_nonfinite = skip_nonfinite
        defaults = {"momentum": 0.9, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0}
        defaults |= {"trust_coefficient": 1e-3, "min_norm": 0.0, "max_ratio": np.inf}
        self.numbers = {"learning_rate": 1e-3, "weight_decay": 0.0, **defaults, **numbers}
        self.m = [np.zeros_like(w) for w in self.weights]
        self.v = [np.zeros_like(w) for w in self.weights]
        self.start_ratios()
        self.count = self.calls = self.skipped = 0

    def number(self, name: str) -> float:
        value = self.numbers[name]
        return float(value(self.count) if callable(value) else value)

    def step(self, gradients: Sequence[object], bound: float = np.inf) -> list[np.ndarray]:
        """The weights after one call with these gradients, of which no element is to pass `bound`.

        LARS's ratios are of the gradients before that.
        """
        gradients = [np.asarray(g).astype(np.float64) for g in gradients]
        self.calls += 1
        self.start_ratios()
        if self.skip_nonfinite and not all(np.isfinite(g).all() for g in gradients):
            self.skipped += 1
            return self.weights
        lr, wd = self.number("learning_rate"), self.number("weight_decay")
        for i, g in enumerate(gradients):
            w, decay = self.weights[i], wd if self.decayed[i] else 0.0
            if self.kind.startswith("lars"):
                self.weights[i] = w - self._lars(i, g, decay, bound)
                continue
            g = np.clip(g, -bound, bound)
            if self.kind == "lamb":
                u = self._direction(i, g) + decay * w
                self.weights[i] = w - lr * self._ratio(i, _norms(u, self.stacked[i])) * u
                continue
            if not self.decoupled:
                g = g + decay * w
            shrunk = w * (1 - lr * decay) if self.decoupled else w
            self.weights[i] = shrunk - lr * self._direction(i, g)
        self.count += 1
        return self.weights

    def start_ratios(self) -> None:
        """Before the first update, and where a call makes none, all trust ratios are 1."""
        self.ratios = [
            np.ones(w.shape[:n]) for w, n in zip(self.weights, self.stacked, strict=True)
        ]

    def _lars(self, i: int, g: np.ndarray, decay: float, bound: float) -> np.ndarray:
        """What the weights lose."""
        w, axes, eps = self.weights[i], self.stacked[i], self.number("eps")
        if self.optax_form:
            norms = _norms(g + decay * w, axes)
            ratio = self._ratio(i, norms, norms + eps)
        else:
            norms = _norms(g, axes)
            ratio = self._ratio(i, norms, norms + decay * _norms(w, axes) + eps)
        lr, beta = self.number("learning_rate"), self.number("momentum")
        g = np.clip(g, -bound, bound) + decay * w
        # The learning rate is part of the momentum; but without a ratio it is ordinary momentum.
        late = 1.0
        if self.trusted[i] or self.optax_form:
            g = lr * ratio * g
        else:
            late = lr
        self.m[i] = beta * self.m[i] + g
        return late * (self.m[i] if self.kind == "lars" else beta * self.m[i] + g)

    def _ratio(
        self, i: int, update: np.ndarray, denominator: np.ndarray | None = None
    ) -> np.ndarray:
        """The trust ratio of each slice, to multiply the leaf with."""
        w, axes, least = self.weights[i], self.stacked[i], self.number("min_norm")
        weight = _norms(w, axes)
        tau = self.number("trust_coefficient") if self.kind != "lamb" else 1.0
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = tau * weight / (update if denominator is None else denominator)
        ratio = np.minimum(ratio, self.number("max_ratio"))
        regular = (weight > 0) & (update > 0) & (weight >= least) & (update >= least)
        self.ratios[i] = np.where(regular & self.trusted[i], ratio, 1.0)
        return self.ratios[i].reshape(self.ratios[i].shape + (1,) * (w.ndim - axes))

    def _direction(self, i: int, g: np.ndarray) -> np.ndarray:
        if self.kind == "sgd":
            return g
        if self.kind in ("momentum", "nesterov"):
            beta = self.number("momentum")
            self.m[i] = beta * self.m[i] + g
            return self.m[i] if self.kind == "momentum" else beta * self.m[i] + g
        b1, b2, t = self.number("b1"), self.number("b2"), self.count + 1
        if self.kind == "lion":
            direction = np.sign(b1 * self.m[i] + (1 - b1) * g)
            self.m[i] = b2 * self.m[i] + (1 - b2) * g
            return direction
        self.m[i] = b1 * self.m[i] + (1 - b1) * g
        self.v[i] = b2 * self.v[i] + (1 - b2) * g**2
        m, v = self.m[i] / (1 - b1**t), self.v[i] / (1 - b2**t)
        denominator = np.sqrt(v + self.number("eps_root")) + self.number("eps")
        # eps = 0 and gradients that were always zero: no update, rather than 0/0.
        return np.divide(m, denominator, out=np.zeros_like(m), where=denominator != 0)


def _norms(x: np.ndarray, axes: int) -> np.ndarray:
    """Over all axes but the first ones."""
    return np.sqrt(np.sum(np.square(x), axis=tuple(range(axes, x.ndim))))
