"""What a step tells of itself: every number as it was used, norms and counters."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from . import hyperparams, scalars
from .plan import MemoryPlan
from .spec import Spec
from .step import Arenas, Buffers


def read(spec: Spec, plan: MemoryPlan, buffers: Buffers) -> dict[str, jax.Array]:
    """See `TrainState.metrics`."""
    floats, ints = buffers.floats, buffers.ints
    measured = {
        "grad_norm": (spec.norms, scalars.GRAD_NORM),
        "clip_factor": ("max_norm" in spec.names, scalars.CLIP),
        "param_norm": ("param_norm" in spec.metrics, scalars.PARAM_NORM),
        "update_norm": ("update_norm" in spec.metrics, scalars.UPDATE_NORM),
    }
    values = hyperparams.read(spec, floats)
    values |= {name: floats[..., slot] for name, (wanted, slot) in measured.items() if wanted}
    if "leaves" in spec.metrics:
        values["leaf_grad_norm"] = _by_leaf(plan, floats, buffers.norms)
    counters = {
        "step": scalars.STEP,
        "calls": scalars.CALLS,
        "skipped": scalars.SKIPPED,
        "consecutive_skips": scalars.CONSECUTIVE_SKIPS,
    }
    values |= {name: ints[..., slot] for name, slot in counters.items()}
    return values | {"has_nan": ints[..., scalars.HAS_NAN] != 0}


def trust_ratios(plan: MemoryPlan, by_segment: Arenas) -> dict[str, Any]:
    """See `TrainState.trust_ratios`."""
    found = {}
    for layout, ratios in zip(plan.arenas, by_segment, strict=True):
        if not isinstance(ratios, jax.core.Tracer):
            ratios = np.asarray(ratios)  # One transfer, and no dispatch for each leaf.
        counts = np.bincount(layout.segments[:, 2], minlength=len(layout.leaves)).tolist()
        first = 0
        for i, count in zip(layout.leaves, counts, strict=True):
            leaf = plan.leaves[i]
            own = ratios[..., first : first + count]
            shape = (*own.shape[:-1], *leaf.shape[: leaf.stacked])
            found[leaf.path] = own.reshape(shape) if count else np.ones(shape, own.dtype)
            first += count
    return {leaf.path: found[leaf.path] for leaf in plan.leaves}


@jax.jit(static_argnums=0, inline=True)
def _by_leaf(plan: MemoryPlan, floats: jax.Array, by_segment: Arenas) -> jax.Array:
    """[..., leaves]: the norm of each leaf, in the tree's order, from those of its segments."""
    leaf = [np.array(a.leaves, np.int64)[a.segments[:, 2]] for a in plan.arenas]
    index = np.concatenate([*leaf, np.zeros(0, np.int64)])
    zeros = jnp.zeros((*floats.shape[:-1], len(plan.leaves)), floats.dtype)
    norms = jnp.concatenate([zeros[..., :0], *by_segment], axis=-1)
    # By the largest of a leaf, so that no square overflows and none is lost. It cancels, and has no
    # part in a derivative; nor has the root at 0.
    largest = zeros.at[..., index].max(jax.lax.stop_gradient(norms))
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    squares = zeros.at[..., index].add(jnp.square(norms / scale[..., index]))
    roots = jnp.sqrt(jnp.where(largest == 0, 1, squares))
    return jnp.where(largest == 0, 0, roots) * scale
