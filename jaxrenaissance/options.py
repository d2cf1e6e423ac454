"""Options: what every factory takes beside its own hyperparameters, and what becomes of it all."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import backends
from .accumulation import Accumulate
from .groups import Group, check_groups
from .hyperparams import Numbers, Value, check_number
from .loss_scale import DynamicLossScale, LossScale
from .spec import METRICS, GroupSpec, Schedule, Schedules, Spec


class Options(NamedTuple):
    r"""What every factory takes beside its own hyperparameters.

    With :math:`\hat g` a gradient as it is given, s the loss scale (1 without), k the micro-batches
    that were added up (1 without accumulation), and ‖·‖ over all trained leaves, what the
    optimizers call the gradient g is

    .. math::
        c &= \min\left(1, \frac{\text{max\_norm}}{\lVert \hat g / (s k) \rVert}\right) \\
        g &= \text{clamp}\left(\frac{c}{s k} \hat g,\ \pm\text{max\_value}\right)

    and the average of the weights, where there is one, starts as a copy of them (or, debiased, at
    zero) and follows each update:

    .. math::
        e \leftarrow e + (1 - \text{ema\_decay}) (w - e)

    Attributes:
        mask: which leaves have weight decay, as in `adamw`.
        skip_nonfinite: whether a call with a non-finite gradient changes nothing but counters.
        backend: "auto", "cpu", "cuda" or "xla"; None: JAXRENAISSANCE_BACKEND, else "auto".
        max_norm: a bound > 0 of the gradients' global norm, or None.
        max_value: a bound > 0 of each element, after max_norm, or None.
        ema_decay: in [0, 1), or None: no average.
        ema_debias: whether the average starts at zero, and is divided by 1 − ∏ ema_decay when read.
        loss_scale: a `DynamicLossScale` or `StaticLossScale`, or None.
        accumulate: an `Accumulate`, or None.
        groups: leaves with hyperparameters of their own.
        metrics: what is measured for `TrainState.metrics` alone: "grad_norm", "param_norm",
            "update_norm", "leaves" (the gradient's norm of each leaf), or several.
    """

    mask: Any
    skip_nonfinite: bool
    backend: str | None
    max_norm: Value | None
    max_value: Value | None
    ema_decay: Value | None
    ema_debias: bool
    loss_scale: LossScale | None
    accumulate: Accumulate | None
    groups: Sequence[Group]
    metrics: str | Sequence[str]


def resolve(
    kind: str,
    update: str,
    values: Mapping[str, Any],
    options: Options,
    *,
    decoupled: bool,
    trust: str | None,
) -> tuple[Spec, Numbers]:
    """What an optimizer is, and its numbers, from a factory's arguments, checked.

    Args:
        kind: the factory's name.
        update: the kind of `ops.update`.
        values: its own hyperparameters in the signature's order: numbers or schedules.
        options: the rest.
        decoupled: whether weight decay is.
        trust: as in `Spec`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for name, value in (
        ("decoupled", decoupled),
        ("skip_nonfinite", options.skip_nonfinite),
        ("ema_debias", options.ema_debias),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {value!r}")
    if options.ema_debias and options.ema_decay is None:
        raise ValueError("ema_debias: needs an average of the weights, for example ema_decay=0.999")
    _check_loss_scale(options)
    accumulate = options.accumulate
    if accumulate is not None and not isinstance(accumulate, Accumulate):
        raise TypeError(f"accumulate: expected a jr.Accumulate or None, got {accumulate!r}")

    optional = {
        "max_norm": options.max_norm,
        "max_value": options.max_value,
        "ema_decay": options.ema_decay,
    }
    values = {**values, **{name: x for name, x in optional.items() if x is not None}}
    scaled = ("loss_scale",) if options.loss_scale is not None else ()
    schedules, numbers = _split(values)
    groups = [_group(kind, group, values) for group in check_groups(options.groups)]
    spec = Spec(
        kind=kind,
        update=update,
        names=(*values, *scaled),
        schedules=schedules,
        groups=tuple(group for group, _ in groups),
        decoupled=decoupled,
        skip_nonfinite=options.skip_nonfinite,
        backend=backends.resolve(options.backend),
        ema_debias=options.ema_debias,
        accumulate=accumulate is not None,
        metrics=_metrics(options.metrics),
        trust=trust,
    )
    every = 1 if accumulate is None else int(accumulate.every)
    own = tuple(values for _, values in groups)
    return spec, Numbers(numbers, own, options.loss_scale, every)


def _split(values: Mapping[str, Any], prefix: str = "") -> tuple[Schedules, dict[str, Any]]:
    """The schedules among some hyperparameters, and the numbers, checked."""
    schedules = {name: value for name, value in values.items() if callable(value)}
    numbers = {
        name: check_number(name, value, prefix + name)
        for name, value in values.items()
        if name not in schedules
    }
    return tuple((name, Schedule(f, prefix + name)) for name, f in schedules.items()), numbers


def _group(kind: str, group: Group, values: Mapping[str, Any]) -> tuple[GroupSpec, dict[str, Any]]:
    for name in group.values:
        if name != "scale" and name not in values:
            raise ValueError(
                f"groups: {group.name!r} has {name}, and {kind} has no such hyperparameter, it has "
                f"{', '.join(values)}"
            )
    schedules, numbers = _split(group.values, f"groups: {group.name!r}: ")
    return GroupSpec(group.name, tuple(group.values), schedules), numbers


def _check_loss_scale(options: Options) -> None:
    scaling = options.loss_scale
    if scaling is not None and not isinstance(scaling, LossScale):
        raise TypeError(
            "loss_scale: expected a jr.DynamicLossScale, a jr.StaticLossScale or None, got "
            f"{scaling!r}"
        )
    if isinstance(scaling, DynamicLossScale) and not options.skip_nonfinite:
        raise ValueError(
            "loss_scale: a DynamicLossScale backs off where a step is skipped, and with "
            "skip_nonfinite=False none is; leave that True, or use a StaticLossScale"
        )


def _metrics(metrics: Any) -> tuple[str, ...]:
    names = [metrics] if isinstance(metrics, str) else metrics
    if not isinstance(names, list | tuple | set | frozenset):
        raise TypeError(f"metrics: expected a name or a list of names, got {metrics!r}")
    for name in names:
        if name not in METRICS:
            raise ValueError(f"metrics: expected names of {', '.join(METRICS)}; got {name!r}")
    return tuple(sorted(set(names)))
