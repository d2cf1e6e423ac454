"""Spec: what an optimizer is without its numbers; a static part of a state, so it compares.

A schedule is code. Two schedules that were built alike compare equal, so that making the same
optimizer again compiles nothing.
"""

import functools
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax.core
import numpy as np

from .plan import PlanConfig

METRICS = ("grad_norm", "leaves", "param_norm", "update_norm")
"""What `metrics=` of an optimizer can ask for."""


class Schedule:
    """A function from the number of updates made so far to a value; equal where the code is.

    Equal are functions of the same code whose closures, defaults and the constants they read from
    their module are equal in turn; anything else compares by its own `==`, or else by identity.

    Args:
        function: count (int32 scalar) → value, as in optax.
        name: the argument that it was given for.

    Raises:
        ValueError: if it closes over a traced value, which cannot become part of a program.
    """

    __slots__ = ("_hash", "_key", "function")

    def __init__(self, function: Callable[[Any], Any], name: str = "schedule") -> None:
        self.function = function
        try:
            self._key = fingerprint(function)
        except _TracedError:
            raise ValueError(
                f"{name}: the schedule closes over a traced value. A schedule is part of the "
                "compiled program; build it from Python numbers, or pass the traced value itself"
            ) from None
        self._hash = hash(self._key)

    def __call__(self, count: Any) -> Any:
        """The value after `count` updates."""
        return self.function(count)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Schedule, (self.function,)  # the key holds code, which cannot be pickled

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


Schedules = tuple[tuple[str, Schedule], ...]
"""(hyperparameter, schedule) for those that are not numbers."""


@dataclass(frozen=True)
class GroupSpec:
    """A group of leaves without its numbers; which leaves they are stands in the plan.

    Attributes:
        name: its name.
        names: the hyperparameters that it has of its own, "scale" among them.
        schedules: (hyperparameter, schedule) for those that are not numbers.
    """

    name: str
    names: tuple[str, ...]
    schedules: Schedules = ()


@dataclass(frozen=True)
class Spec:
    """An optimizer without its numbers: two of one spec share every compiled program.

    Attributes:
        kind: the factory's name.
        update: the kind of `ops.update` it runs.
        names: its hyperparameters, in the order of the factory's signature; those that were left
            at None, such as max_norm, are not among them.
        schedules: (hyperparameter, schedule) for those that are not numbers.
        groups: the groups of leaves with hyperparameters of their own.
        decoupled: whether weight decay shrinks the weights rather than adding to the gradient.
        skip_nonfinite: whether a call with a non-finite gradient updates nothing.
        backend: "auto", "cpu", "cuda" or "xla".
        ema_debias: whether the average of the weights starts at zero and is divided when read.
        accumulate: whether several calls add up to an update.
        metrics: what is measured for `metrics` alone, sorted: names of `METRICS`.
        trust: whose trust ratios there are: "lars", "lars_optax", "lamb", or None.
    """

    kind: str
    update: str
    names: tuple[str, ...]
    schedules: Schedules = ()
    groups: tuple[GroupSpec, ...] = ()
    decoupled: bool = True
    skip_nonfinite: bool = True
    backend: str = "auto"
    ema_debias: bool = False
    accumulate: bool = False
    metrics: tuple[str, ...] = ()
    trust: str | None = None

    @property
    def ema(self) -> bool:
        """Whether an average of the weights is kept."""
        return "ema_decay" in self.names

    @property
    def loss_scale(self) -> bool:
        """Whether the loss is scaled."""
        return "loss_scale" in self.names

    @property
    def norms(self) -> bool:
        """Whether a call computes the gradients' norms."""
        measured = not {"grad_norm", "leaves"}.isdisjoint(self.metrics)
        return "max_norm" in self.names or measured or self.trust_rule != 0

    @property
    def trust_rule(self) -> int:
        """The ratios that come of the gradients' norms, as `ops.finish` numbers them; 0: none."""
        return {"lars": 1, "lars_optax": 2}.get(self.trust or "", 0)

    @property
    def config(self) -> PlanConfig:
        """The series that a state of this optimizer holds."""
        return PlanConfig.for_kind(self.update, ema=self.ema, accumulator=self.accumulate)


class _TracedError(Exception):
    pass


class Identity:
    """Compares by identity, and keeps the object alive so that its address stays its own."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(value: Any) -> Hashable:
    """A key that is equal for values that behave alike, as far as that can be told.

    Functions by code, closure, defaults and the module constants they read; numbers, strings,
    NumPy arrays and plain containers by content; the rest by their own `==` or by identity.
    """
    return _fingerprint(value, ())


def _fingerprint(value: Any, parents: tuple[int, ...]) -> Hashable:
    if isinstance(value, jax.core.Tracer):
        raise _TracedError
    if id(value) in parents:  # A function that refers to itself.
        return ("parent", parents.index(id(value)))
    inner = functools.partial(_fingerprint, parents=(*parents, id(value)))
    kind = type(value)
    if kind is float:
        return (float, value.hex())  # Tells 0.0 from -0.0, and nan equals itself.
    if value is None or kind in (bool, int, str, bytes):
        return (kind, value)
    if isinstance(value, tuple | list) and kind in (tuple, list):
        return (kind, *map(inner, value))
    if isinstance(value, dict) and kind is dict:
        return (kind, *((inner(k), inner(v)) for k, v in value.items()))
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return (kind, value.dtype, value.shape, value.tobytes())
    if isinstance(value, types.FunctionType):
        return _function(value, inner)
    if isinstance(value, types.MethodType):
        return (kind, inner(value.__func__), inner(value.__self__))
    if isinstance(value, functools.partial):
        return (kind, inner(value.func), inner(value.args), inner(value.keywords))
    if kind.__eq__ is not object.__eq__ and _hashable(value):
        return (kind, value)
    return Identity(value)


def _function(function: types.FunctionType, inner: Callable[[Any], Hashable]) -> Hashable:
    read = sorted(_names(function.__code__) & function.__globals__.keys())
    return (
        function.__code__,
        inner(function.__defaults__),
        inner(function.__kwdefaults__),
        tuple(_cell(cell, inner) for cell in function.__closure__ or ()),
        tuple((name, _constant(function.__globals__[name], inner)) for name in read),
    )


def _cell(cell: types.CellType, inner: Callable[[Any], Hashable]) -> Hashable:
    try:
        return inner(cell.cell_contents)
    except ValueError:  # Not filled yet.
        return ("empty",)


def _constant(value: Any, inner: Callable[[Any], Hashable]) -> Hashable:
    # What a module defines stays the same object; following it would walk through whole libraries.
    if callable(value) or isinstance(value, types.ModuleType):
        return Identity(value)
    return inner(value)


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
