"""Trust ratios of LARS and LAMB, from norms."""

import jax
import jax.numpy as jnp

from .. import scalars as s

LARS, LARS_AS_OPTAX, LAMB = 1, 2, 3


def trust_ratios(
    rule: int,
    floats: jax.Array,
    groups: jax.Array,
    updates: jax.Array,
    weights: jax.Array,
    cosines: jax.Array | None = None,
) -> jax.Array:
    """The ratio of every segment, in the dtype of the scalars.

    Args:
        rule: how the denominator is made.
        floats: the scalars that the prologue derived.
        groups: of the segments.
        updates: for LAMB the norms of the update itself, else those of the gradients as given.
        weights: the norms of the weights.
        cosines: between gradients and weights, for the rule that wants the norm of their sum.
    """
    dtype = weights.dtype
    header = floats[: s.HEADER].astype(dtype)
    rows = floats[s.HEADER :].reshape(-1, s.ROW)[groups].astype(dtype)
    # What is not finite would reach the derivatives of a call that is skipped, as 0 times NaN.
    applies = header[s.APPLY] != 0
    updates, weights = jnp.where(applies, updates, 0), jnp.where(applies, weights, 0)
    denominator = updates
    if rule != LAMB:
        updates = updates * header[s.GRAD_FACTOR]
        decay = rows[:, s.L2] * weights
        denominator = updates + decay + rows[:, s.EPS]
        if rule == LARS_AS_OPTAX:
            assert cosines is not None
            updates = _norm_of_sum(updates, decay, jnp.where(applies, cosines, 0))
            denominator = updates + rows[:, s.EPS]
    least, most, coefficient = header[s.MIN_NORM], header[s.MAX_RATIO], rows[:, s.TRUST]
    zero = (weights == 0) | (updates == 0) | (weights < least) | (updates < least)
    regular = ~zero & (coefficient != 0)
    ratio = jnp.where(regular, coefficient * weights, 1) / jnp.where(regular, denominator, 1)
    return jnp.where(regular & (ratio > most), most, ratio).astype(floats.dtype)


def _norm_of_sum(a: jax.Array, b: jax.Array, cosines: jax.Array) -> jax.Array:
    """Of two vectors, from their norms and the cosine between them."""
    largest = jnp.maximum(a, b)
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    x, y = a / scale, b / scale
    square = x * x + 2 * x * y * cosines + y * y
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0) * scale
