"""How a state starts: from the arguments of `TrainState.create` and `init` to its contents."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from . import averages, frozen_leaves, hyperparams, packed, transform
from .compute_dtypes import ComputeDtype, resolve
from .contents import Contents
from .extra import copy
from .foreign import check_optimizer
from .placement import Placement
from .placing import placement_of
from .plan import MemoryPlan
from .static import Static
from .step import Buffers, scalar_dtype, start
from .transform import Optimizer


def from_params(
    params: Any,
    extra: Any,
    optimizer: Optimizer,
    ema_extra: bool,
    compute_dtype: ComputeDtype,
    over: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Contents:
    """See `TrainState.create`; `over` are the devices, the options those of the plan."""
    check_optimizer(optimizer)
    _check_ema_extra(ema_extra, optimizer)
    params = packed.canonical(params)
    placement = placement_of(params, **over)
    static = _static(params, optimizer, compute_dtype, placement, options)
    frozen_leaves.check_arrays(static.plan, params, "params")
    params = packed.placed(static.plan, params, "params")
    scalars = _initial_scalars(static.plan, optimizer)
    if placement is not None:
        extra, scalars = placement.put((extra, scalars))
    return Contents(static, *_start(static, ema_extra, jtu.tree_leaves(params), extra, *scalars))


def from_function(
    fn: Callable[[], Any],
    optimizer: Optimizer,
    has_extra: bool,
    ema_extra: bool,
    compute_dtype: ComputeDtype,
    over: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Contents:
    """See `TrainState.init`; `over` are the devices, the options those of the plan."""
    check_optimizer(optimizer)
    _check_ema_extra(ema_extra, optimizer)
    shapes = jax.eval_shape(fn)
    if has_extra:
        if not (isinstance(shapes, tuple | list) and len(shapes) == 2):
            raise ValueError("has_extra: fn must return a pair (params, extra)")
        shapes = shapes[0]
    if over["sharding"] == "leaves":  # How they lie is known when they are there.
        made = jax.jit(fn)()
        params, extra = made if has_extra else (made, None)
        return from_params(params, extra, optimizer, ema_extra, compute_dtype, over, options)
    placement = placement_of(shapes, **over)
    static = _static(shapes, optimizer, compute_dtype, placement, options)

    def make(floats: jax.Array, ints: jax.Array) -> Any:
        made = fn()
        params, extra = made if has_extra else (made, None)
        return _start(static, ema_extra, jtu.tree_leaves(params), extra, floats, ints)

    scalars = _initial_scalars(static.plan, optimizer)
    if placement is None:
        return Contents(static, *jax.jit(make)(*scalars))
    buffers, *others = jax.jit(make)(*placement.put(scalars))
    return Contents(static, buffers, *placement.put(others))


def _static(
    tree: Any,
    optimizer: Optimizer,
    compute_dtype: ComputeDtype,
    placement: Placement | None,
    options: Mapping[str, Any],
) -> Static:
    plan = transform.build_plan(tree, optimizer.selection, placement=placement, **options)
    return Static(plan, optimizer.spec, resolve(compute_dtype, plan))


def _initial_scalars(plan: MemoryPlan, optimizer: Optimizer) -> tuple[Any, Any]:
    spec, numbers = optimizer.spec, optimizer.numbers
    floats = hyperparams.initial_floats(spec, numbers, plan.num_groups, scalar_dtype(plan))
    return floats, hyperparams.initial_ints(numbers)


@jax.jit(static_argnums=(0, 1), inline=True)
def _start(
    static: Static,
    ema_extra: bool,
    leaves: list[Any],
    extra: Any,
    floats: jax.Array,
    ints: jax.Array,
) -> tuple[Buffers, tuple[Any, ...], Any, Any]:
    spec, plan = static.spec, static.plan
    trained, frozen = packed.split(plan, leaves)
    weights = packed.pack(plan, trained, backend=spec.backend)
    buffers = start(spec, plan, weights, jnp.copy(floats), jnp.copy(ints))
    extra = copy(extra)
    average = averages.start_extra(spec, extra, buffers.floats) if ema_extra else None
    return buffers, tuple(copy(frozen)), extra, average


def _check_ema_extra(ema_extra: Any, optimizer: Optimizer) -> None:
    if not isinstance(ema_extra, bool):
        raise TypeError(f"ema_extra: expected a bool, got {ema_extra!r}")
    if ema_extra and not optimizer.spec.ema:
        raise ValueError(
            "ema_extra: extra is averaged as the weights are, and the optimizer keeps no average; "
            "make it with ema_decay="
        )
