"""The numbers of a checkpoint by name: counters, what was measured, hyperparameters."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from . import hyperparams, packed, scalars
from .hyperparams import Numbers
from .plan import MemoryPlan
from .spec import Spec
from .step import scalar_dtype

logger = logging.getLogger("jaxrenaissance")

SECTIONS = ("counters", "scalars", "hyperparams")

_COUNTERS = {
    "step": scalars.STEP,
    "calls": scalars.CALLS,
    "skipped": scalars.SKIPPED,
    "consecutive_skips": scalars.CONSECUTIVE_SKIPS,
    "last_bad_leaf": scalars.LAST_BAD_LEAF,
    "last_bad_call": scalars.LAST_BAD_CALL,
    "has_nan": scalars.HAS_NAN,
    "good_steps": scalars.GOOD_STEPS,
}
_OF_ACCUMULATION = {"micro": scalars.MICRO, "cycle_bad": scalars.CYCLE_BAD}
_BOUNDS = {
    "loss_scale_growth": scalars.GROWTH,
    "loss_scale_backoff": scalars.BACKOFF,
    "loss_scale_minimum": scalars.MIN_SCALE,
    "loss_scale_maximum": scalars.MAX_SCALE,
}
_OF_AVERAGES = {"ema_weight": scalars.EMA_WEIGHT, "ema_weight_low": scalars.EMA_WEIGHT_LOW}
_MEASURED = {
    "grad_norm": scalars.GRAD_NORM,
    "clip_factor": scalars.CLIP,
    "param_norm": scalars.PARAM_NORM,
    "update_norm": scalars.UPDATE_NORM,
}


class Entry(NamedTuple):
    """A number that a checkpoint has a name for.

    Attributes:
        slot: where it lies in the scalars.
        is_counter: whether in `ints` rather than in `floats`.
        chosen: whether the user set it, rather than the run.
        hyperparameter: its name and its group's number, 0 for the optimizer's own; or None.
        complement: whether 1 − value is stored.
    """

    slot: int
    is_counter: bool = False
    chosen: bool = False
    hyperparameter: tuple[str, int] | None = None
    complement: bool = False


Keys = tuple[str, ...]
"""Where a number stands in the nested dicts."""


def entries(spec: Spec) -> dict[Keys, Entry]:
    """What a state of this spec has numbers for: what is scheduled follows from the step."""
    found: dict[Keys, Entry] = {}
    counters = _COUNTERS | (_OF_ACCUMULATION if spec.accumulate else {})
    found |= {("counters", name): Entry(i, is_counter=True) for name, i in counters.items()}
    if spec.accumulate:
        found["counters", "every"] = Entry(scalars.EVERY, is_counter=True, chosen=True)
    if spec.loss_scale:
        interval = Entry(scalars.GROWTH_INTERVAL, is_counter=True, chosen=True)
        found["counters", "growth_interval"] = interval
        found["scalars", "loss_scale"] = Entry(scalars.LOSS_SCALE)
        found |= {("scalars", name): Entry(i, chosen=True) for name, i in _BOUNDS.items()}
    if spec.ema:
        found |= {("scalars", name): Entry(i) for name, i in _OF_AVERAGES.items()}
    found |= {("scalars", name): Entry(i) for name, i in _MEASURED.items()}
    for name, entry in _hyperparameters(spec, 0):
        found["hyperparams", name] = entry
    for number, group in enumerate(spec.groups, 1):
        for name, entry in _hyperparameters(spec, number):
            found["hyperparams", "groups", group.name, name] = entry
    return found


def _hyperparameters(spec: Spec, number: int) -> Iterator[tuple[str, Entry]]:
    owner = spec.groups[number - 1] if number else spec
    scheduled = dict(owner.schedules)
    for name in owner.names:
        if name not in scheduled and name != "loss_scale":  # which is the run's, not the user's
            index, complement = hyperparams.location(spec, name, number)
            entry = Entry(index, False, True, (name, number), complement)
            # 1 - b is what is stored, and what float32 holds to seven digits.
            yield f"one_minus_{name}" if complement else name, entry


def read(spec: Spec, plan: MemoryPlan, floats: Any, ints: Any) -> dict[str, Any]:
    """The numbers in nested dicts, as scalars; NumPy's where the scalars are.

    A leaf goes by its number in the tree's order, not in the arenas'.
    """
    np_or_jnp = np if isinstance(ints, np.ndarray) else jnp
    found: dict[str, Any] = {section: {} for section in SECTIONS}
    for keys, entry in entries(spec).items():
        value = (ints if entry.is_counter else floats)[entry.slot]
        if entry.is_counter and entry.slot == scalars.LAST_BAD_LEAF:
            order = np.array([*packed.arena_order(plan), -1], np.int32)
            value = np_or_jnp.asarray(order)[value]
        inner = found
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = np_or_jnp.asarray(value)
    return found


def restore(
    spec: Spec,
    plan: MemoryPlan,
    values: Mapping[str, Any],
    like: tuple[np.ndarray, np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The scalars of a state, floats and ints, from a checkpoint's numbers.

    Args:
        spec, plan: of the state.
        values: by the path of the number in the checkpoint.
        like: the floats and ints to take those from that the checkpoint has not, or None.

    Raises:
        ValueError: if one is missing; names the paths.
    """
    known = {"/".join(keys): (keys, entry) for keys, entry in entries(spec).items()}
    faults: list[str] = []
    differing: list[str] = []
    absent: list[str] = []
    taken: dict[str, float] = {}
    for path, ((section, *_, name), entry) in known.items():
        own = None if like is None else float(like[entry.is_counter][entry.slot])
        value = values.get(path, None if section == "counters" and name in _COUNTERS else own)
        if path not in values and section == "scalars" and name in _MEASURED:
            continue
        if value is None:
            faults.append(f"{path!r} is missing")
            continue
        if path not in values:
            absent.append(path)
        elif entry.chosen and own is not None and np.float32(own) != np.float32(value):
            differing.append(f"{path} is {float(value):g}, not {own:g}")
        taken[path] = float(value)
    if faults:
        raise ValueError(f"leaves: {packed.listed(faults)}")
    _tell(differing, absent, [path for path in values if path not in known])

    groups: list[dict[str, float]] = [{} for _ in range(1 + len(spec.groups))]
    for path, (_, entry) in known.items():
        if entry.hyperparameter is not None:
            name, number = entry.hyperparameter
            groups[number][name] = 1 - taken[path] if entry.complement else taken[path]
    own, *rest = groups
    numbers = Numbers(own, tuple(rest))
    floats = hyperparams.initial_floats(spec, numbers, plan.num_groups, scalar_dtype(plan))
    floats, ints = np.array(floats), scalars.initial_ints()
    for path, (_, entry) in known.items():
        if path in taken and entry.hyperparameter is None:
            (ints if entry.is_counter else floats)[entry.slot] = taken[path]
    order = [*packed.arena_order(plan), -1]
    last_bad = ints[scalars.LAST_BAD_LEAF]
    ints[scalars.LAST_BAD_LEAF] = order.index(last_bad) if 0 <= last_bad < len(order) - 1 else -1
    return floats, ints


def _tell(differing: list[str], absent: list[str], unused: list[str]) -> None:
    """One warning about numbers that are not what the state to be like would have."""
    told = []
    if differing:
        told.append(
            f"the checkpoint's numbers are kept where `like` has others: {', '.join(differing)} "
            "(state.replace_hyperparams sets hyperparameters; the rest can be changed in the "
            "leaves before)"
        )
    if absent:
        told.append(f"taken from `like`, for the checkpoint has none: {', '.join(absent)}")
    if unused:
        told.append(f"the optimizer of `like` has no place for: {', '.join(unused)}")
    if told:
        logger.warning("from_leaves: %s", "; ".join(told))
