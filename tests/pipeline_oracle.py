"""A whole train state in float64 NumPy: what the end-to-end tests compare against.

Loss scale, finite check, accumulation, clipping, groups and averages around the optimizers of
`oracle.py`, written from their formulas. Each leaf has an optimizer of its own, so a group is
nothing but other numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from oracle import Oracle

Number = float | Callable[[int], float]


class LossScale:
    """A loss scale and when it changes; its arguments are those of jr.DynamicLossScale."""

    def __init__(
        self,
        initial: float = 1.0,
        growth_interval: float = math.inf,
        growth: float = 1.0,
        backoff: float = 1.0,
        minimum: float = 1.0,
        maximum: float = 1.0,
    ) -> None:
        self.value, self.good = initial, 0
        self.interval, self.growth, self.backoff = growth_interval, growth, backoff
        self.minimum, self.maximum = minimum, maximum

    def skipped(self) -> None:
        self.value, self.good = max(self.value * self.backoff, self.minimum), 0

    def updated(self) -> None:
        self.good += 1
        if self.good >= self.interval:
            self.value, self.good = min(self.value * self.growth, self.maximum), 0


class Pipeline:
    """A train state over a list of leaves.

    Args:
        kind: of `Oracle`.
        leaves: the trained parameters.
        decayed: for each leaf whether it has weight decay.
        of_leaf: for each leaf the numbers of its group; `scale` multiplies the learning rate, and
            a weight decay given here applies whatever `decayed` says.
        trusted: for each leaf whether it has a trust ratio; a trust coefficient of its group
            applies whatever this says.
        stacked, decoupled, optax_form: as in `Oracle`.
        skip_nonfinite: whether a cycle with a non-finite gradient updates nothing.
        loss_scale: what the gradients that come in are multiplied by.
        every: gradients a cycle.
        max_norm, max_value: bounds of the unscaled mean gradient.
        ema_decay: of the average of the weights; None: there is none.
        ema_debias: whether the average starts at zero and is divided by its weight when it is read.
        **numbers: of `Oracle`; each of all these may be a function of the updates made before.
    """

    def __init__(
        self,
        kind: str,
        leaves: Sequence[object],
        *,
        decayed: Sequence[bool] | None = None,
        of_leaf: Sequence[Mapping[str, Number]] | None = None,
        trusted: Sequence[bool] | None = None,
        stacked: Sequence[int] | None = None,
        decoupled: bool | None = None,
        optax_form: bool = False,
        skip_nonfinite: bool = True,
        loss_scale: LossScale | None = None,
        every: int = 1,
        max_norm: Number = math.inf,
        max_value: Number = math.inf,
        ema_decay: Number | None = None,
        ema_debias: bool = False,
        **numbers: Number,
    ) -> None:
        self.numbers = dict(numbers)
        self.of_leaf = [{} for _ in leaves] if of_leaf is None else list(of_leaf)
        decays = [True] * len(leaves) if decayed is None else decayed
        trusts = [True] * len(leaves) if trusted is None else trusted
        axes = [0] * len(leaves) if stacked is None else stacked
        self.optimizers = [
            Oracle(
                kind,
                [leaf],
                decayed=decay or "weight_decay" in group,
                decoupled=decoupled,
                trusted=trust or "trust_coefficient" in group,
                stacked=own_axes,
                optax_form=optax_form,
                skip_nonfinite=False,
                **_scaled(numbers | dict(group)),
            )
            for leaf, decay, trust, own_axes, group in zip(
                leaves, decays, trusts, axes, self.of_leaf, strict=True
            )
        ]
        self.skip_nonfinite, self.every = skip_nonfinite, every
        self.loss_scale = LossScale() if loss_scale is None else loss_scale
        self.max_norm, self.max_value = max_norm, max_value
        self.ema_decay, self.ema_debias = ema_decay, ema_debias
        self.ema = [np.zeros_like(w) if ema_debias else w for w in self.weights]
        self.ema_weight = 0.0
        self.step = self.calls = self.skipped = self.consecutive_skips = 0
        self.has_nan = self.bad_since_call = False
        self.grad_norm, self.clip_factor, self.update_norm = 0.0, 1.0, 0.0
        self.param_norm, self.leaf_grad_norm = 0.0, [0.0] * len(leaves)
        self._start_cycle()

    @property
    def weights(self) -> list[np.ndarray]:
        return [optimizer.weights[0] for optimizer in self.optimizers]

    @property
    def first_moments(self) -> list[np.ndarray]:
        return [optimizer.m[0] for optimizer in self.optimizers]

    @property
    def second_moments(self) -> list[np.ndarray]:
        return [optimizer.v[0] for optimizer in self.optimizers]

    @property
    def ratios(self) -> list[np.ndarray]:
        return [optimizer.ratios[0] for optimizer in self.optimizers]

    @property
    def average(self) -> list[np.ndarray]:
        """The average of the weights as it is read."""
        if not self.ema_debias:
            return self.ema
        return [e / self.ema_weight for e in self.ema] if self.ema_weight else self.weights

    def set(
        self, *, of_leaf: Sequence[Mapping[str, Number]] | None = None, **numbers: float
    ) -> None:
        """Other values of hyperparameters, and of those that a leaf's group has of its own."""
        for name, value in numbers.items():
            if name in ("max_norm", "max_value", "ema_decay"):
                setattr(self, name, value)
            elif name == "loss_scale":
                self.loss_scale.value = value
            else:
                self.numbers[name] = value
        self.of_leaf = self.of_leaf if of_leaf is None else list(of_leaf)
        for optimizer, group in zip(self.optimizers, self.of_leaf, strict=True):
            optimizer.numbers |= _scaled(self.numbers | dict(group))

    def call(self, gradients: Sequence[object]) -> None:
        """One call with the gradients of the scaled loss: every `every`-th is an update."""
        self.add(gradients)
        self.finish(self.every)

    def add(self, gradients: Sequence[object]) -> None:
        """One more gradient of the running cycle."""
        wide = [np.asarray(g).astype(np.float64) for g in gradients]
        bad = self.skip_nonfinite and not all(np.isfinite(g).all() for g in wide)
        self.bad_since_call = self.bad_since_call or bad
        with np.errstate(invalid="ignore"):  # inf - inf
            self.sum = [s + g for s, g in zip(self.sum, wide, strict=True)] if self.micro else wide
        self.micro += 1

    def finish(self, every: int = 1) -> None:
        """What a call does once its gradients were added: an update where the cycle is complete."""
        self.calls += 1
        self.has_nan, self.bad_since_call = self.bad_since_call, False
        self.bad = self.bad or self.has_nan
        self.param_norm = _norm(self.weights)
        self.update_norm = 0.0
        for optimizer in self.optimizers:
            optimizer.start_ratios()
        if self.micro < max(every, 1):
            return
        divisor = self.loss_scale.value * self.micro
        mean = [s / divisor for s in self.sum]
        with np.errstate(over="ignore", invalid="ignore"):
            self.leaf_grad_norm = [_norm([g]) for g in mean]
            self.grad_norm = _norm(mean)
        max_norm = self.now(self.max_norm)
        self.clip_factor = max_norm / self.grad_norm if self.grad_norm > max_norm else 1.0
        if self.bad:
            self.skipped += 1
            self.consecutive_skips += 1
            self.loss_scale.skipped()
        else:
            self._update(mean)
            self.step += 1
            self.consecutive_skips = 0
            self.loss_scale.updated()
        self._start_cycle()

    def now(self, number: Number) -> float:
        """A number as this call uses it."""
        return float(number(self.step) if callable(number) else number)

    def _start_cycle(self) -> None:
        self.sum: list[np.ndarray] = []
        self.micro, self.bad = 0, False

    def _update(self, mean: Sequence[np.ndarray]) -> None:
        before, bound = self.weights, self.now(self.max_value)
        for optimizer, g in zip(self.optimizers, mean, strict=True):
            optimizer.step([g * self.clip_factor], bound)
        self.update_norm = _norm([new - w for new, w in zip(self.weights, before, strict=True)])
        if self.ema_decay is not None:
            decay = self.now(self.ema_decay)
            self.ema = [
                decay * e + (1 - decay) * w for e, w in zip(self.ema, self.weights, strict=True)
            ]
            self.ema_weight = 1 - decay * (1 - self.ema_weight)


def _norm(leaves: Sequence[np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(x))) for x in leaves))


def _scaled(numbers: Mapping[str, Number]) -> dict[str, Number]:
    numbers = dict(numbers)
    scale = numbers.pop("scale", 1.0)
    rate = numbers.get("learning_rate", 1e-3)
    if callable(rate) or callable(scale):
        rate_of, scale_of = _function(rate), _function(scale)
        return numbers | {"learning_rate": lambda count: rate_of(count) * scale_of(count)}
    return numbers | {"learning_rate": rate * scale}


def _function(number: Number) -> Callable[[int], float]:
    return number if callable(number) else lambda count: number
