"""What `repr` of a state shows: one screen, whatever it holds."""

import math
from typing import Any

import jax
import jax.core
import jax.tree_util as jtu
import numpy as np

from . import scalars
from .packed import Packed
from .static import Static


def describe(static: Static, ints: Any, frozen: tuple[Any, ...], extra: Any) -> str:
    """The text, from a state's parts."""
    plan, spec = static.plan, static.spec
    arenas = ", ".join(f"{arena.dtype}[{arena.size}]" for arena in plan.arenas) or "none"
    computed = {d.name for own in static.compute_dtypes for d in own}
    series = [f"{spec.config.moments} moments"]
    series += ["an average"] * spec.ema + ["an accumulator"] * spec.accumulate
    lines = [
        f"{spec.kind}, backend {spec.backend}, {_progress(ints)}",
        f"{len(plan.leaves):,} leaves, {plan.num_parameters:,} parameters, "
        f"computed in {', '.join(sorted(computed)) or 'no dtype'}",
        f"arenas: {arenas}; weights and {', '.join(series)}",
    ]
    if plan.placement is not None:
        axes = " and ".join(map(repr, plan.placement.axes))
        devices = plan.placement.mesh.size
        lines.append(f"{plan.placement.form} over {devices:,} devices, axis {axes}")
    if spec.schedules:
        lines.append("schedules: " + ", ".join(f"{name}={s}" for name, s in spec.schedules))
    if spec.groups:
        lines.append(f"groups: {len(spec.groups):,}")
    if frozen:
        lines.append(f"frozen: {len(frozen):,} leaves")
    if extra is not None:
        lines.append(f"extra: {_summary(extra)}")
    return "TrainState(\n" + "".join(f"  {line}\n" for line in lines) + ")"


def _progress(ints: Any) -> str:
    if isinstance(ints, jax.Array) and not isinstance(ints, jax.core.Tracer):
        if ints.is_deleted():
            return "donated"
        if ints.ndim == 1 and (ints.is_fully_addressable or ints.is_fully_replicated):
            values = np.asarray(ints)
            return f"step {values[scalars.STEP]}, skipped {values[scalars.SKIPPED]}"
    shape = getattr(ints, "shape", None)
    members = math.prod(shape[:-1]) if shape else 1
    return f"{members:,} members" if members > 1 else "traced"


def _summary(tree: Any) -> str:
    if isinstance(tree, Packed):
        return repr(tree)
    leaves = jtu.tree_leaves(tree)
    return f"{type(tree).__name__} of {len(leaves):,} arrays"
