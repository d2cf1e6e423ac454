"""norms in jax.numpy."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..arena_layout import ArenaLayout
from ..workspaces import norm_dtype
from .packing import blocks, to_leaves
from .statistics import lower_first_bad


def norms(
    ints: jax.Array,
    *operands: jax.Array,
    layout: ArenaLayout,
    first_leaf: int,
    flag: bool,
    weights: int,
    from_arena: bool,
) -> list[jax.Array]:
    """The counters, with FIRST_BAD lowered where `flag`, and the norms of the segments.

    ``operands`` are the weights, where these have a part in it, then the gradients.
    """
    leaves = to_leaves(operands[min(weights, 1) :], layout, from_arena)
    if flag:
        ints = lower_first_bad(ints, [~jnp.isfinite(x) for x in leaves], first_leaf)
    results = [ints, norms_of(layout, leaves)]
    if weights:
        others = to_leaves(operands[:1], layout, True)
        results.append(norms_of(layout, others))
        if weights == 2:
            results.append(_cosines(layout, leaves, others, *results[1:]))
    return results


def norms_of(layout: ArenaLayout, leaves: Sequence[jax.Array]) -> jax.Array:
    """The norm of every segment."""
    of_blocks = [norm(x) for x in _slices(layout, leaves)]
    return jnp.concatenate([*of_blocks, jnp.zeros(0, norm_dtype())])


def _cosines(
    layout: ArenaLayout,
    leaves: Sequence[jax.Array],
    others: Sequence[jax.Array],
    norms: jax.Array,
    norms_of_others: jax.Array,
) -> jax.Array:
    """Of every segment: products of unit vectors neither overflow nor get lost in underflow."""
    products, first = [], 0
    for x, y in zip(_slices(layout, leaves), _slices(layout, others), strict=True):
        own = slice(first, first + len(x))
        products.append(jnp.sum(unit(x, norms[own]) * unit(y, norms_of_others[own]), axis=-1))
        first = own.stop
    return jnp.concatenate([*products, jnp.zeros(0, norm_dtype())])


def _slices(layout: ArenaLayout, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """[slices, size] of every block."""
    return [block.of(leaves[block.leaf]).astype(norm_dtype()) for block in blocks(layout)]


@jax.custom_jvp
def norm(x: jax.Array) -> jax.Array:
    """The norm over the last axis: no square overflows, none is lost in underflow."""
    # XLA may divide by multiplying with the reciprocal, which is not to be subnormal.
    tiny = jnp.finfo(x.dtype).tiny
    scale = jnp.clip(jnp.max(jnp.abs(x), axis=-1, initial=0), tiny, 1 / tiny)
    return scale * jnp.sqrt(jnp.sum(jnp.square(x / scale[..., None]), axis=-1))


@norm.defjvp
def _norm_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    value = norm(x)
    return value, jnp.sum(unit(x, value) * dx, axis=-1)


def unit(x: jax.Array, norm: jax.Array) -> jax.Array:
    """x / norm, the norm's derivative: 0 where all is zero.

    A norm that is not finite belongs to a call that is skipped: a NaN would outlast being
    multiplied by that call's 0.
    """
    regular = ((norm > 0) & jnp.isfinite(norm))[..., None]
    return jnp.where(regular, x, 0) / jnp.where(regular, norm[..., None], 1)
