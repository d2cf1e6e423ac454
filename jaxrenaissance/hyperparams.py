"""Hyperparameters: what is allowed, and how they become the device scalars of `scalars.py`.

A Python number stays float64 until it is stored, and a β is stored as 1 − β, which is formed in
float64: float32(1 − .99999) is right to 6e-8, and 1 − float32(.99999) is wrong by 1.4e-3.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from . import scalars
from .groups import rows_each
from .loss_scale import DynamicLossScale, LossScale
from .spec import Schedule, Spec

Number = float | int | np.generic | np.ndarray | jax.Array
"""A hyperparameter's value: a Python or NumPy number, a device scalar or a traced scalar."""

ScheduleFunction = Callable[[Any], Any]

Value = Number | ScheduleFunction
"""What a factory takes for a hyperparameter: a number, or a schedule from the updates made so far
to one."""

Values = Mapping[str, float | jax.Array]
"""Checked numbers by hyperparameter: floats, or traced scalars."""

_LARGEST = float(np.finfo(np.float32).max)


class Range(NamedTuple):
    """The numbers that a hyperparameter can be: from low to high, with or without the ends."""

    low: float = 0.0
    high: float = _LARGEST
    with_low: bool = True
    with_high: bool = True

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, float) or math.isnan(number):
            return False
        above = self.low <= number if self.with_low else self.low < number
        return above and (number <= self.high if self.with_high else number < self.high)

    def __str__(self) -> str:
        low = f"{'≥' if self.with_low else '>'} {self.low:g}"
        if self.high == math.inf:
            return low
        if self.high == _LARGEST:
            return f"finite and {low}"
        brackets = "(["[self.with_low] + ")]"[self.with_high]
        return f"in {brackets[0]}{self.low:g}, {self.high:g}{brackets[1]}"


_POSITIVE = Range()
_BETA = Range(0.0, 1.0, with_high=False)
_BOUND = Range(0.0, math.inf, with_low=False)
_RANGES = {
    "learning_rate": _POSITIVE,
    "scale": _POSITIVE,
    "weight_decay": _POSITIVE,
    "momentum": Range(0.0, 1.0),
    "b1": _BETA,
    "b2": _BETA,
    "eps": _POSITIVE,
    "eps_root": _POSITIVE,
    "trust_coefficient": Range(with_low=False),
    "min_norm": _POSITIVE,
    "max_ratio": _BOUND,
    "max_norm": _BOUND,
    "max_value": _BOUND,
    "ema_decay": _BETA,
    "loss_scale": Range(with_low=False),
}
# Rounded to 16 bits .999 becomes 1 and 1e-8 may become 0; learning rates only lose digits.
_NOT_IN_16_BITS = ("momentum", "b1", "b2", "eps", "eps_root", "min_norm", "ema_decay")


class Numbers(NamedTuple):
    """An optimizer's numbers, which are in a state's scalars and in no program.

    Attributes:
        values: the hyperparameters that are not scheduled.
        groups: likewise each group's own, in the order of `Spec.groups`.
        loss_scale: None where the loss is not scaled.
        every: micro-batches an update, 1 without accumulation.
    """

    values: Values
    groups: tuple[Values, ...] = ()
    loss_scale: LossScale | None = None
    every: int = 1


class Slot(NamedTuple):
    """Where a hyperparameter lies in the header or in a group's row, and what is stored there.

    Attributes:
        column: the slot.
        header: whether it is one of the header's.
        complement: whether 1 − value is stored.
        decayed_only: whether leaves without weight decay have 0.
        trusted_only: whether leaves without a trust ratio have 0.
    """

    column: int
    header: bool = False
    complement: bool = False
    decayed_only: bool = False
    trusted_only: bool = False


_SLOTS = {
    "learning_rate": Slot(scalars.LEARNING_RATE),
    "scale": Slot(scalars.LR_SCALE),
    "momentum": Slot(scalars.MOMENTUM),
    "b1": Slot(scalars.ONE_MINUS_B1, complement=True),
    "b2": Slot(scalars.ONE_MINUS_B2, complement=True),
    "eps": Slot(scalars.EPS),
    "eps_root": Slot(scalars.EPS_ROOT),
    "trust_coefficient": Slot(scalars.TRUST, trusted_only=True),
    "min_norm": Slot(scalars.MIN_NORM, header=True),
    "max_ratio": Slot(scalars.MAX_RATIO, header=True),
    "max_norm": Slot(scalars.MAX_NORM, header=True),
    "max_value": Slot(scalars.MAX_VALUE, header=True),
    "ema_decay": Slot(scalars.ONE_MINUS_EMA, header=True, complement=True),
    "loss_scale": Slot(scalars.LOSS_SCALE, header=True),
}


def _slot(spec: Spec, name: str) -> Slot:
    if name == "weight_decay":
        decay = scalars.WEIGHT_DECAY if spec.decoupled else scalars.L2
        return Slot(decay, decayed_only=True)
    return _SLOTS[name]


def check_number(name: str, value: Any, argument: str | None = None) -> float | jax.Array:
    """A hyperparameter's value, checked: a float64, or a traced scalar as it is.

    A device scalar is read. So its range is checked, a state never depends on the device that it
    was committed to, and optimizers of equal numbers are equal.

    Args:
        name: the hyperparameter.
        value: what was given.
        argument: what errors name instead.

    Raises:
        TypeError: if it is not a number.
        ValueError: if a number is not finite or out of range, if an array is not a scalar, or if
            it has 16 bits where that changes what it means.
    """
    argument = argument or name
    if isinstance(value, bool | np.bool_) or not isinstance(value, Number):
        raise TypeError(f"{argument}: expected a number or a schedule, got {value!r}")
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        _check_array(name, value, dtype, argument)
    if isinstance(value, jax.core.Tracer):
        return value
    number = float(jax.device_get(value))
    if number not in _RANGES[name]:
        raise ValueError(f"{argument}: expected a number {_RANGES[name]}, got {value!r}")
    return number


def _check_array(name: str, value: Any, dtype: Any, argument: str) -> None:
    if value.shape != ():
        raise ValueError(
            f"{argument}: expected a scalar, got shape {value.shape}; for several values at once "
            "use jax.vmap over the function that makes the optimizer and the state"
        )
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"{argument}: expected a real number, got one of dtype {dtype}")
    if name in _NOT_IN_16_BITS and dtype in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"{argument}: a {np.dtype(dtype).name} was rounded already (.999 is 1 in bfloat16). "
            "Pass a Python number or a float32 scalar; to optax.inject_hyperparams pass "
            "hyperparam_dtype=jnp.float32"
        )


def initial_floats(
    spec: Spec, numbers: Numbers, num_groups: int, dtype: np.dtype
) -> jax.Array | np.ndarray:
    """The float scalars of a new state: [HEADER + num_groups * ROW] of `dtype`.

    A NumPy array unless a number is traced. What is scheduled is not in it yet.
    """
    floats = scalars.initial_floats(num_groups, dtype)
    scaling = numbers.loss_scale
    values = dict(numbers.values)
    if isinstance(scaling, DynamicLossScale):
        values["loss_scale"] = scaling.initial
        floats[[scalars.GROWTH, scalars.BACKOFF]] = scaling.growth, scaling.backoff
        floats[[scalars.MIN_SCALE, scalars.MAX_SCALE]] = scaling.minimum, scaling.maximum
    elif scaling is not None:
        values["loss_scale"] = scaling.scale
        floats[[scalars.MIN_SCALE, scalars.MAX_SCALE]] = 0, np.inf  # A skip is not to move it.
    _set_trust(spec, floats)
    return write(spec, floats, values, numbers.groups)


def _set_trust(spec: Spec, floats: np.ndarray) -> None:
    """What makes LARS or LAMB of momentum or Adam, and is no hyperparameter."""
    if spec.trust is None:
        return
    own = [i for i, group in enumerate(spec.groups, 1) if "trust_coefficient" in group.names]
    masks = [_mask(spec, "trust_coefficient", i, floats.size) for i in (0, *own)]
    table = floats[scalars.HEADER :].reshape(-1, scalars.ROW)
    trusted = np.any(masks, axis=0)[scalars.HEADER :].reshape(table.shape)[:, scalars.TRUST]
    if spec.trust == "lamb":
        table[trusted, scalars.TRUST] = 1
    else:  # optax keeps the learning rate in the momentum of every leaf.
        table[trusted | (spec.trust == "lars_optax"), scalars.LR_IN_MOMENT] = 1


def initial_ints(numbers: Numbers) -> np.ndarray:
    """The counters of a new state: int32 of shape (INTS,)."""
    ints = scalars.initial_ints()
    ints[scalars.EVERY] = numbers.every
    if isinstance(numbers.loss_scale, DynamicLossScale):
        ints[scalars.GROWTH_INTERVAL] = numbers.loss_scale.growth_interval
    return ints


def write(
    spec: Spec, floats: jax.Array | np.ndarray, values: Values, groups: Sequence[Values] = ()
) -> jax.Array | np.ndarray:
    """`floats`, [..., size], with checked numbers written where they belong.

    Args:
        spec: says which hyperparameters each group has of its own.
        floats: the scalars.
        values: the optimizer's numbers, which go to every group that has none of its own.
        groups: each group's own, in the order of `Spec.groups`.
    """
    size, dtype = floats.shape[-1], np.dtype(floats.dtype)
    known, is_known = np.zeros(size, dtype), np.zeros(size, bool)
    for number, own in enumerate([values, *groups]):
        for name, value in own.items():
            slot = _slot(spec, name)
            mask = _mask(spec, name, number, size)
            if isinstance(value, jax.Array):
                # A select by a constant mask is one fused loop, however many groups there are.
                floats = jnp.where(mask, _stored(slot, value, dtype), floats)
            else:
                known[mask] = 1 - value if slot.complement else value
                is_known |= mask
    if not is_known.any():
        return floats
    where = np.where if isinstance(floats, np.ndarray) else jnp.where
    return where(is_known, known, floats)


def _stored(slot: Slot, value: jax.Array, dtype: np.dtype) -> jax.Array:
    if slot.complement:
        value = 1 - value.astype(jax.dtypes.canonicalize_dtype(np.float64))
    return value.astype(dtype)


def _mask(spec: Spec, name: str, number: int, size: int) -> np.ndarray:
    """Where a hyperparameter of group `number` (0: the optimizer's own) is stored."""
    slot, mask = _slot(spec, name), np.zeros(size, bool)
    if slot.header:
        mask[slot.column] = True
        return mask
    for row in range((size - scalars.HEADER) // scalars.ROW):
        group, kind = divmod(row, rows_each(spec.trust is not None))
        untrusted, undecayed = divmod(kind, 2)
        if number:  # A group's own weight decay or trust coefficient is for all of its leaves.
            belongs = group == number
        else:
            inherits = group == 0 or name not in spec.groups[group - 1].names
            left_out = (slot.decayed_only and undecayed) or (slot.trusted_only and untrusted)
            belongs = inherits and not left_out
        mask[scalars.float_index(row, slot.column)] = belongs
    return mask


def replace(
    spec: Spec,
    floats: jax.Array,
    values: Mapping[str, Any],
    groups: Mapping[str, Mapping[str, Any]],
) -> jax.Array:
    """`floats`, [..., size], with other numbers, checked: `TrainState.replace_hyperparams`.

    Args:
        spec: of the state.
        floats: its float scalars.
        values: hyperparameter → number.
        groups: group → hyperparameter → number.

    Raises:
        TypeError: if a value is not a number, or groups is no mapping of mappings.
        ValueError: if there is no such hyperparameter or group, it follows a schedule, or the
            number is not allowed.
    """
    _check_mapping("groups", groups, '{"group": {"scale": 2.0}}')
    numbers = {group.name: i for i, group in enumerate(spec.groups)}
    own: list[Values] = [{} for _ in spec.groups]
    for name, new in groups.items():
        if name not in numbers:
            known = ", ".join(map(repr, numbers)) or "none"
            raise ValueError(f"groups: there is no group {name!r}; the groups are: {known}")
        _check_mapping(f"groups: {name!r}", new, '{"scale": 2.0}')
        group = spec.groups[numbers[name]]
        own[numbers[name]] = _replacements(
            f"the group {name!r}", group.names, dict(group.schedules), new, f"groups: {name!r}: "
        )
    common = _replacements(spec.kind, spec.names, dict(spec.schedules), values, "")
    return jnp.asarray(write(spec, floats, common, own))


def _check_mapping(argument: str, value: Any, example: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{argument}: expected a mapping such as {example}, got {value!r}")


def _replacements(
    owner: str,
    names: Sequence[str],
    schedules: Mapping[str, Schedule],
    values: Mapping[str, Any],
    prefix: str,
) -> Values:
    checked = {}
    for name, value in values.items():
        argument = prefix + name
        if name not in names:
            raise ValueError(
                f"{argument}: {owner} has no such hyperparameter, it has {', '.join(names)}"
            )
        if name in schedules:
            raise ValueError(
                f"{argument}: it follows a schedule; make the optimizer with a number instead"
            )
        if callable(value):
            raise TypeError(
                f"{argument}: replace_hyperparams takes numbers; a schedule is given when the "
                "optimizer is made"
            )
        checked[name] = check_number(name, value, argument)
    return checked


def follow_schedules(spec: Spec, floats: jax.Array, count: jax.Array) -> jax.Array:
    """`floats` with the schedules' values for this call; as they are where nothing is scheduled.

    Args:
        spec: has the schedules.
        floats: the state's float scalars.
        count: int32 scalar, the updates made before this one: 0 at first, as in optax.

    Raises:
        TypeError, ValueError: if what a schedule returns is no number that the hyperparameter can
            be; names it.
    """
    common = {name: _at(schedule, name, name, count) for name, schedule in spec.schedules}
    groups = [
        {
            name: _at(schedule, name, f"groups: {group.name!r}: {name}", count)
            for name, schedule in group.schedules
        }
        for group in spec.groups
    ]
    return jnp.asarray(write(spec, floats, common, groups))


def _at(schedule: Schedule, name: str, argument: str, count: jax.Array) -> float | jax.Array:
    # optax's own schedules mix int32 counts and floats, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        value = schedule(count)
    shape = np.shape(value)
    if shape != ():
        raise ValueError(f"{argument}: the schedule returned shape {shape}, wanted a scalar")
    return check_number(name, value, f"{argument}, from its schedule")


def read(spec: Spec, floats: jax.Array) -> dict[str, jax.Array]:
    """Every hyperparameter's value, as the last call used it: scalars of the floats' dtype.

    Returns:
        The optimizer's by name, and a group's own as "group/name".
    """
    values = {name: _read(spec, floats, name, 0) for name in spec.names}
    for number, group in enumerate(spec.groups, 1):
        for name in group.names:
            values[f"{group.name}/{name}"] = _read(spec, floats, name, number)
    return values


def location(spec: Spec, name: str, number: int) -> tuple[int, bool]:
    """Where a hyperparameter of group `number` (0: the optimizer's own) is read from.

    Returns:
        The index into the float scalars, and whether 1 − value is stored there.
    """
    slot, row = _slot(spec, name), number * rows_each(spec.trust is not None)
    index = slot.column if slot.header else scalars.float_index(row, slot.column)
    return index, slot.complement


def _read(spec: Spec, floats: jax.Array, name: str, number: int) -> jax.Array:
    index, complement = location(spec, name, number)
    value = floats[..., index]
    return 1 - value if complement else value
