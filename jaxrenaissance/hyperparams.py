"""Hyperparameters: what is allowed, and how they become the device scalars of `scalars.py`.

A Python number stays float64 until it is stored, and a β is stored as 1 − β, which is formed in
float64: float32(1 − .99999) is right to 6e-8, and 1 − float32(.99999) is wrong by 1.4e-3.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import scalars
from .plan import GROUPS
from .spec import Spec

Number = float | int | np.generic | np.ndarray | jax.Array
"""A hyperparameter's value: a Python or NumPy number, a device scalar or a traced scalar."""

ScheduleFunction = Callable[[Any], Any]

SCHEDULABLE = ("learning_rate", "weight_decay")

_LARGEST = float(np.finfo(np.float32).max)
# Inclusive lower end, upper end, whether the upper end belongs to the range.
_RANGES = {
    "learning_rate": (0.0, _LARGEST, True),
    "weight_decay": (0.0, _LARGEST, True),
    "momentum": (0.0, 1.0, True),
    "b1": (0.0, 1.0, False),
    "b2": (0.0, 1.0, False),
    "eps": (0.0, _LARGEST, True),
    "eps_root": (0.0, _LARGEST, True),
}
# Rounded to 16 bits .999 becomes 1 and 1e-8 may become 0; learning rates only lose digits.
_NOT_IN_16_BITS = ("momentum", "b1", "b2", "eps", "eps_root")


class Slot(NamedTuple):
    """Where a hyperparameter lies in a group's row, and what is stored there.

    Attributes:
        column: the slot in the row.
        complement: whether 1 − value is stored.
        decayed_only: whether it is 0 in every group but "decay".
    """

    column: int
    complement: bool = False
    decayed_only: bool = False


def slots(spec: Spec) -> dict[str, Slot]:
    """The slot of each hyperparameter of an optimizer."""
    decay = scalars.WEIGHT_DECAY if spec.decoupled else scalars.L2
    known = {
        "learning_rate": Slot(scalars.LEARNING_RATE),
        "momentum": Slot(scalars.MOMENTUM),
        "b1": Slot(scalars.ONE_MINUS_B1, complement=True),
        "b2": Slot(scalars.ONE_MINUS_B2, complement=True),
        "eps": Slot(scalars.EPS),
        "eps_root": Slot(scalars.EPS_ROOT),
        "weight_decay": Slot(decay, decayed_only=True),
    }
    return {name: known[name] for name in spec.names}


def check_number(name: str, value: Any) -> float | jax.Array:
    """A hyperparameter's value, checked: host numbers as float64, arrays as they are.

    Raises:
        TypeError: if it is not a number.
        ValueError: if a number is not finite or out of range, if an array is not a scalar, or if
            it has 16 bits where that changes what it means.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, Number):
        hint = " or a schedule" if name in SCHEDULABLE else ""
        raise TypeError(f"{name}: expected a number{hint}, got {value!r}")
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        _check_array(name, value, dtype)
    if isinstance(value, jax.Array):
        return value
    number = float(value)
    low, high, closed = _RANGES[name]
    if not (
        math.isfinite(number) and low <= number and (number <= high if closed else number < high)
    ):
        bracket = "]" if closed else ")"
        wanted = "finite and ≥ 0" if high == _LARGEST else f"in [{low:g}, {high:g}{bracket}"
        raise ValueError(f"{name}: expected a number {wanted}, got {value!r}")
    return number


def _check_array(name: str, value: Any, dtype: Any) -> None:
    if value.shape != ():
        raise ValueError(
            f"{name}: expected a scalar, got shape {value.shape}; for several values at once use "
            "jax.vmap over the function that makes the optimizer and the state"
        )
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"{name}: expected a real number, got one of dtype {dtype}")
    if name in _NOT_IN_16_BITS and dtype in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"{name}: a {np.dtype(dtype).name} was rounded already (.999 is 1 in bfloat16). Pass a "
            "Python number or a float32 scalar; to optax.inject_hyperparams pass "
            "hyperparam_dtype=jnp.float32"
        )


def initial_floats(
    spec: Spec, numbers: Mapping[str, float | jax.Array], num_groups: int, dtype: np.dtype
) -> jax.Array | np.ndarray:
    """The float scalars of a new state: [(1 + num_groups) * ROW] of `dtype`; 0 where scheduled.

    A NumPy array unless a number is an array.
    """
    floats = np.zeros(scalars.floats_size(num_groups), dtype)
    floats[scalars.APPLY] = floats[scalars.GRAD_FACTOR] = 1
    return write(spec, floats, numbers)


def write(
    spec: Spec, floats: jax.Array | np.ndarray, numbers: Mapping[str, Any]
) -> jax.Array | np.ndarray:
    """`floats`, [..., size], with numbers written into every group's row where they belong."""
    of = slots(spec)
    size, dtype = floats.shape[-1], np.dtype(floats.dtype)
    for name, value in numbers.items():
        stored = _stored(of[name], value, dtype)
        # A select by a constant mask is one fused loop, however many groups there are.
        on_host = isinstance(floats, np.ndarray) and isinstance(stored, np.number)
        where = np.where if on_host else jnp.where
        floats = where(_mask(of[name], size), stored, floats)
    return floats


def _stored(slot: Slot, value: Any, dtype: np.dtype) -> Any:
    if not isinstance(value, jax.Array):
        return dtype.type(1 - value if slot.complement else value)
    if slot.complement:
        wide = jax.dtypes.canonicalize_dtype(np.float64)
        value = 1 - value.astype(wide)
    return value.astype(dtype)


def _mask(slot: Slot, size: int) -> np.ndarray:
    mask = np.zeros(size, bool)
    for group in range(size // scalars.ROW - 1):
        if not slot.decayed_only or group == GROUPS.index("decay"):
            mask[scalars.float_index(group, slot.column)] = True
    return mask


def follow_schedules(spec: Spec, floats: jax.Array, count: jax.Array) -> jax.Array:
    """`floats` with the schedules' values for this call.

    Args:
        floats: the state's float scalars.
        count: int32 scalar, the updates made before this one: 0 at first, as in optax.
    """
    values = {}
    for name, schedule in spec.schedules:
        # optax's own schedules mix int32 counts and floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            value = jnp.asarray(schedule(count))
        if value.shape != ():
            raise ValueError(f"{name}: the schedule returned shape {value.shape}, wanted a scalar")
        values[name] = value
    result = write(spec, floats, values)
    assert not isinstance(result, np.ndarray)
    return result


def read(spec: Spec, floats: jax.Array) -> dict[str, jax.Array]:
    """Every hyperparameter's value, as the last call used it: scalars of the floats' dtype."""
    values = {}
    for name, slot in slots(spec).items():
        value = floats[..., scalars.float_index(GROUPS.index("decay"), slot.column)]
        values[name] = 1 - value if slot.complement else value
    return values
