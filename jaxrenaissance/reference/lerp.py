"""lerp in jax.numpy."""

import jax
import jax.numpy as jnp

from ..arena_layout import ArenaLayout
from .groups import runs
from .packing import to_arena


def lerp(
    taus: jax.Array, *operands: jax.Array, layout: ArenaLayout, targets: int, source: str
) -> list[jax.Array]:
    """The targets, moved towards the source. ``operands`` are the targets, then the source."""
    arenas, rest = operands[:targets], operands[targets:]
    stretches = runs(layout)
    if not stretches:
        return list(arenas)
    to = None if source == "zero" else to_arena(rest, layout, source == "arena")

    def moved(arena: jax.Array, low: int, high: int, group: int) -> jax.Array:
        a, tau = arena[low:high], taus[group]
        b = jnp.zeros_like(a) if to is None else to[low:high]
        return jnp.where(tau == 0, a, towards(a, b, tau))

    return [jnp.concatenate([moved(arena, *run) for run in stretches]) for arena in arenas]


def towards(a: jax.Array, b: jax.Array, t: jax.Array) -> jax.Array:
    """a + t (b - a), and exactly b at 1, also where a is not finite."""
    return jnp.where(t == 1, b, a + t * (b - a))
