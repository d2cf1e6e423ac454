"""Moving averages of the weights, and of what a state carries beside them.

A debiased average starts at zero and is divided, when it is read, by the weight that it has
gathered: 1 - the product of all decays so far. Any other starts as a copy.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from . import scalars
from .ops.primitive import same_manual_axes
from .spec import Spec
from .step import Arenas


# A copy, since the state whose weights these become holds the averages as well, and a buffer
# cannot be donated twice.
@jax.jit(static_argnums=0, inline=True)
def read(spec: Spec, floats: jax.Array, ema: Arenas, weights: Arenas) -> Arenas:
    """What the averages stand for; before the first update, a debiased one is the weights."""
    return tuple(_read(spec, floats, *pair) for pair in zip(ema, weights, strict=True))


def start_extra(spec: Spec, extra: Any, floats: jax.Array) -> Any:
    """The average of a new `extra`: float leaves in float32 at least, others as they are."""

    def begin(x: jax.Array) -> jax.Array:
        if not _is_float(x):
            return jnp.copy(x)
        x = widened(x)
        return jnp.zeros_like(x) if spec.ema_debias else jnp.copy(x)

    leaves, treedef = jtu.tree_flatten(jtu.tree_map(begin, extra))
    # What follows the scalars varies over the axes of shard_map that they vary over.
    return treedef.unflatten(same_manual_axes([floats, *leaves])[1:])


@jax.jit(inline=True)
def follow_extra(floats: jax.Array, average: Any, extra: Any) -> Any:
    """The average after a call of the step that gave these scalars and this `extra`."""
    apply = floats[scalars.APPLY] != 0

    def advance(a: jax.Array, x: jax.Array) -> jax.Array:
        if not _is_float(x):
            return jnp.where(apply, x, a)
        t, x = floats[scalars.ONE_MINUS_EMA].astype(a.dtype), x.astype(a.dtype)
        return jnp.where(apply, jnp.where(t == 1, x, a + t * (x - a)), a)

    return jtu.tree_map(advance, average, extra)


@jax.jit(static_argnums=0, inline=True)
def read_extra(spec: Spec, floats: jax.Array, average: Any, extra: Any) -> Any:
    """What the average of `extra` stands for, in the dtypes of `extra`."""

    def convert(a: jax.Array, x: jax.Array) -> jax.Array:
        if not _is_float(x):
            return jnp.copy(a)
        return _read(spec, floats, a, x.astype(a.dtype)).astype(x.dtype)

    return jtu.tree_map(convert, average, extra)


def widened(x: jax.Array) -> jax.Array:
    """An array in float32, or in float64 as it is."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def gathered(floats: jax.Array) -> jax.Array:
    """What a debiased average is divided by: 0 before the first update, 1 after many."""
    return floats[scalars.EMA_WEIGHT] + floats[scalars.EMA_WEIGHT_LOW]


def _read(spec: Spec, floats: jax.Array, average: jax.Array, current: jax.Array) -> jax.Array:
    if not spec.ema_debias:
        return jnp.copy(average)
    weight = gathered(floats).astype(average.dtype)
    return jnp.where(weight > 0, average / jnp.where(weight > 0, weight, 1), current)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
