"""lerp: parameters that follow others slowly, such as a target network's."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from . import ops, packed
from .check import core_of
from .contents import refuse_members
from .hyperparams import Number
from .packed import Packed
from .plan import MemoryPlan
from .step import Arenas
from .train_state import TrainState

Target = TypeVar("Target")


def lerp(target: Target, source: Any, tau: Number) -> Target:
    r"""Moves a target's parameters towards a source's, as the target networks of deep RL do.

    .. math::
        w \leftarrow w + \tau (w_{\text{source}} - w)

    in the arena's dtype, by one launch an arena; with τ = 1 it is a copy, also over a NaN. It works
    inside and outside of jit and under `jax.vmap`, and in place where the target is donated.

    >>> import jax.numpy as jnp
    >>> import jaxrenaissance as jr
    >>> online = jr.TrainState.create({"w": jnp.ones(2)}, jr.adam(1e-3))
    >>> target = jr.Packed({"w": jnp.zeros(2)})
    >>> target = jr.lerp(target, online, 0.25)
    >>> target.tree["w"].tolist()
    [0.25, 0.25]

    Args:
        target: a `TrainState`, also one of `jaxrenaissance.flax`, of which only the trained
            parameters change, or a `Packed`.
        source: any of these or a tree of arrays, with the target's paths and shapes.
            Its arenas are read as they are where it has the target's plan, or else its leaves, in
            full precision.
        tau: τ in [0, 1]: a number, a device scalar or a traced value.

    Returns:
        The target with its new parameters.

    Raises:
        TypeError: if the target is neither, or tau is not a number.
        ValueError: if the source does not match the target, naming the paths, or tau is not in
            [0, 1].
    """
    around: Any = target
    core = core_of(around)
    if core is not around:
        return dataclasses.replace(around, core=lerp(core, source, tau))
    source = core_of(source)
    if isinstance(target, TrainState):
        refuse_members(target.ints, "lerp", "jr.lerp(state, …)")
        arenas, backend = target.weights, target.spec.backend
    elif isinstance(target, Packed):
        arenas, backend = target.arenas, target.backend
    else:
        raise TypeError(f"target: expected a TrainState or a Packed, got a {type(target).__name__}")
    rate, sources = _checked_tau(tau), _sources(target.plan, source, backend)
    new = _lerp(arenas, sources, rate, plan=target.plan, backend=backend)
    if isinstance(target, TrainState):
        return dataclasses.replace(target, weights=new)
    return jtu.tree_unflatten(jtu.tree_structure(target), new)


@functools.partial(jax.jit, static_argnames=("plan", "backend"), inline=True)
def _lerp(
    arenas: Arenas,
    sources: Sequence[Any],
    tau: float | jax.Array,
    *,
    plan: MemoryPlan,
    backend: str,
) -> Arenas:
    def local(arenas: Arenas, sources: Sequence[Any], tau: float | jax.Array) -> Arenas:
        new = []
        for layout, arena, source in zip(plan.arenas, arenas, sources, strict=True):
            taus = jnp.full(plan.num_groups, tau, layout.dtype)
            new += ops.lerp(layout, taus, [arena], source, backend=backend)
        return tuple(new)

    placement = plan.placement
    if placement is None:
        return local(arenas, sources, tau)
    spec = placement.arena_spec
    return placement.over_devices(local, (spec, spec, PartitionSpec()), spec)(arenas, sources, tau)


def _sources(plan: MemoryPlan, source: Any, backend: str) -> Sequence[Any]:
    """For each of the plan's arenas the source: an arena, or leaves in arena order."""
    if isinstance(source, TrainState | Packed):
        state = isinstance(source, TrainState)
        arenas = source.weights if state else source.arenas
        if source.plan == plan:
            return arenas
        dtypes = packed.arena_dtypes(source.plan)
        own = source.spec.backend if state else source.backend
        leaves = packed.unpack(source.plan, arenas, dtypes, backend=own)
        source = packed.merge(source.plan, leaves, source.frozen if state else ())
    source = packed.placed(plan, packed.canonical(source), "source")
    leaves = packed.match(plan, source, "source")
    if plan.placement is not None:
        return packed.pack(plan, leaves, backend=backend)
    return packed.by_arena(plan, leaves)


def _checked_tau(tau: Any) -> float | jax.Array:
    if isinstance(tau, bool | np.bool_) or not isinstance(tau, Number):
        raise TypeError(f"tau: expected a number, got {tau!r}")
    if np.shape(tau) != ():
        raise ValueError(f"tau: expected a scalar, got shape {np.shape(tau)}")
    if isinstance(tau, jax.core.Tracer):
        return tau
    number = float(tau)  # The device that an array is committed to is not to commit the target.
    if not 0 <= number <= 1:
        raise ValueError(f"tau: expected a number in [0, 1], got {tau!r}")
    return number
