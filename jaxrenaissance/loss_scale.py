"""Loss scales: what the loss is multiplied by, so that float16 gradients do not vanish."""

import math
from dataclasses import dataclass, fields

import numpy as np

from .paths import is_int

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class StaticLossScale:
    """A loss scale that stays as it is.

    Args:
        scale: a finite number > 0. `state.replace_hyperparams(loss_scale=…)` takes device scalars
            and traced values, too.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is out of range.
    """

    scale: float

    def __post_init__(self) -> None:
        _set_number(self, "scale")


@dataclass(frozen=True)
class DynamicLossScale:
    r"""A loss scale that backs off where gradients overflow, and grows again.

    With s the scale, decided on the device after each call that could have updated:

    .. math::
        s \leftarrow \begin{cases}
            \max(s \cdot \text{backoff}, \text{minimum}) & \text{skipped: not finite} \\
            \min(s \cdot \text{growth}, \text{maximum}) &
                \text{the last growth\_interval updates since } s \text{ changed were finite} \\
            s & \text{otherwise}
        \end{cases}

    Args:
        initial: the first scale, from minimum to maximum.
        growth_interval: updates until it grows: an int ≥ 1.
        growth: ≥ 1.
        backoff: in (0, 1].
        minimum, maximum: finite, 0 < minimum ≤ maximum. Powers of two lose no bits.

    Raises:
        TypeError: if one is not a number.
        ValueError: if one is out of range.

    References:
        Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "growth_interval":
                _set_number(self, field.name)
        if not is_int(self.growth_interval):
            raise TypeError(f"growth_interval: expected an int, got {self.growth_interval!r}")
        if not 1 <= self.growth_interval <= np.iinfo(np.int32).max:
            raise ValueError(
                f"growth_interval: expected an int from 1 to 2³¹ - 1, got {self.growth_interval}"
            )
        if self.growth < 1:
            raise ValueError(f"growth: expected a number ≥ 1, got {self.growth:g}")
        if self.backoff > 1:
            raise ValueError(f"backoff: expected a number in (0, 1], got {self.backoff:g}")
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"initial: expected minimum ≤ initial ≤ maximum, got {self.initial:g}, which is "
                f"not in [{self.minimum:g}, {self.maximum:g}]"
            )


LossScale = DynamicLossScale | StaticLossScale


def _set_number(owner: LossScale, name: str) -> None:
    """Checks a field and keeps it as a float."""
    value = getattr(owner, name)
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name}: expected a Python number, got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and 0 < number <= _LARGEST):
        raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
    object.__setattr__(owner, name, number)
