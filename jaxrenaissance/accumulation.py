"""Accumulate: several calls add up to one update."""

from dataclasses import dataclass

import numpy as np

from .paths import is_int


@dataclass(frozen=True)
class Accumulate:
    """Every `every`-th call updates, with the mean of the gradients since the update before it.

    An object and not a bare number, because it changes what a step does. The number itself is data:
    a state made with another one shares the compiled programs.

    Args:
        every: micro-batches an update: an int ≥ 1.

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is less than 1.
    """

    every: int

    def __post_init__(self) -> None:
        if not is_int(self.every):
            raise TypeError(f"every: expected an int, got {self.every!r}")
        if not 1 <= self.every <= np.iinfo(np.int32).max:
            raise ValueError(f"every: expected an int from 1 to 2³¹ - 1, got {self.every}")
