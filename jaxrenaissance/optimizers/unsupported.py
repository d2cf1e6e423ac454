"""Options of optax's signatures that are not supported: an error that says what to do."""

from typing import Any

import numpy as np


def check_moment_dtype(name: str, dtype: Any) -> None:
    """Raises unless moments in float32 (float64 for float64 leaves) are what is asked for."""
    if dtype is not None and np.dtype(dtype) != np.float32:
        raise ValueError(
            f"{name}: got {dtype!r}, but moments are kept in float32 (float64 for float64 leaves) "
            f"whatever the parameters' dtype; leave {name} at None"
        )


def check_no_nadam(nesterov: bool) -> None:
    """Raises where Adam's Nesterov variant is asked for."""
    if nesterov is not False:
        raise ValueError(
            "nesterov: Adam with Nesterov momentum is not supported; leave nesterov=False, or use "
            "jr.sgd(learning_rate, momentum, nesterov=True)"
        )
