"""prologue in jax.numpy."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from .. import scalars as s


def prologue(
    floats: jax.Array, ints: jax.Array, *, num_floats: int, dtype: np.dtype
) -> list[jax.Array]:
    """The counters advanced by one call, and the scalars derived from them."""
    return list(advance(floats, ints, None))


def divisor(floats: jax.Array, ints: jax.Array) -> jax.Array:
    """What this call's gradients are divided by: the loss scale, and how many were added up."""
    count = jnp.maximum(ints[s.MICRO] + 1, 1)
    return floats[s.LOSS_SCALE] * count.astype(floats.dtype)


def advance(
    floats: jax.Array, ints: jax.Array, norm: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The scalars after one call. `norm` is that of the gradients as they were given, if known."""
    micro = ints[s.MICRO] + 1
    bad = ints[s.FIRST_BAD] != s.NO_LEAF
    cycle_bad = bad | (ints[s.CYCLE_BAD] != 0)
    complete = micro >= ints[s.EVERY]
    apply, skip = complete & ~cycle_bad, complete & cycle_bad
    skipped = skip.astype(jnp.int32)
    step = ints[s.STEP] + apply.astype(jnp.int32)
    good = ints[s.GOOD_STEPS] + 1
    grow = apply & (good >= ints[s.GROWTH_INTERVAL])
    new_ints = {
        s.STEP: step,
        s.CALLS: ints[s.CALLS] + 1,
        s.SKIPPED: ints[s.SKIPPED] + skipped,
        s.CONSECUTIVE_SKIPS: jnp.where(apply, 0, ints[s.CONSECUTIVE_SKIPS] + skipped),
        s.FIRST_BAD: jnp.int32(s.NO_LEAF),
        s.LAST_BAD_LEAF: jnp.where(bad, ints[s.FIRST_BAD], ints[s.LAST_BAD_LEAF]),
        s.LAST_BAD_CALL: jnp.where(bad, ints[s.CALLS], ints[s.LAST_BAD_CALL]),
        s.HAS_NAN: bad.astype(jnp.int32),
        s.MICRO: jnp.where(complete, 0, micro),
        s.CYCLE_BAD: (cycle_bad & ~complete).astype(jnp.int32),
        s.GOOD_STEPS: jnp.where(skip | grow, 0, jnp.where(apply, good, ints[s.GOOD_STEPS])),
    }

    header = {s.APPLY: apply.astype(floats.dtype)}
    header |= _gradient_factor(floats, divisor(floats, ints), norm, complete)
    scale = floats[s.LOSS_SCALE]
    smaller = jnp.maximum(scale * floats[s.BACKOFF], floats[s.MIN_SCALE])
    larger = jnp.minimum(scale * floats[s.GROWTH], floats[s.MAX_SCALE])
    header[s.LOSS_SCALE] = jnp.where(skip, smaller, jnp.where(grow, larger, scale))
    header |= _ema_weight(floats, apply)

    new_floats = _with(floats, header)
    groups = _derived(floats[s.HEADER :].reshape(-1, s.ROW), jnp.maximum(step, 1))
    return jnp.concatenate([new_floats[: s.HEADER], groups.reshape(-1)]), _with(ints, new_ints)


def _with(array: jax.Array, slots: Mapping[int, jax.Array]) -> jax.Array:
    return array.at[np.array(list(slots))].set(jnp.stack(list(slots.values())))


def _gradient_factor(
    floats: jax.Array, divided_by: jax.Array, norm: jax.Array | None, complete: jax.Array
) -> dict[int, jax.Array]:
    new = {s.GRAD_FACTOR: 1 / divided_by}
    if norm is not None:
        norm = norm / divided_by.astype(norm.dtype)
        max_norm = floats[s.MAX_NORM].astype(norm.dtype)
        # Both replaced, rather than the quotient, of which a derivative may be 0/0 or inf/inf.
        clipped = norm > max_norm
        clip = jnp.where(clipped, max_norm, 1) / jnp.where(clipped, norm, 1)
        clip = clip.astype(floats.dtype)
        new = {
            s.GRAD_FACTOR: clip / divided_by,
            s.GRAD_NORM: norm.astype(floats.dtype),
            s.CLIP: clip,
        }
    return {slot: jnp.where(complete, x, floats[slot]) for slot, x in new.items()}


def _ema_weight(floats: jax.Array, apply: jax.Array) -> dict[int, jax.Array]:
    """c <- c + (1 - d)(1 - c), with the error of each sum kept for the next."""
    high, low = floats[s.EMA_WEIGHT], floats[s.EMA_WEIGHT_LOW]
    more = floats[s.ONE_MINUS_EMA] * ((1 - high) - low) + low
    total = high + more
    without = total - high
    error = (high - (total - without)) + (more - without)
    return {
        s.EMA_WEIGHT: jnp.where(apply, total, high),
        s.EMA_WEIGHT_LOW: jnp.where(apply, error, low),
    }


def _derived(groups: jax.Array, t: jax.Array) -> jax.Array:
    """The groups' rows with what follows from the numbers and the step."""
    rate = groups[:, s.LEARNING_RATE] * groups[:, s.LR_SCALE]
    columns = {
        s.LR: rate,
        s.LR_WD: rate * groups[:, s.WEIGHT_DECAY],
        s.C1: _bias_correction(groups[:, s.ONE_MINUS_B1], t),
        s.C2: _bias_correction(groups[:, s.ONE_MINUS_B2], t),
    }
    return groups.at[:, np.array(list(columns))].set(jnp.stack(list(columns.values()), axis=1))


def _bias_correction(one_minus_beta: jax.Array, t: jax.Array) -> jax.Array:
    # 1 - b^t without float64: b^t = exp(t log1p(-(1 - b))), and expm1 keeps what is near zero.
    # Where there is no b, 1 - b is zero, and so is the correction's exponent. A small b is taken to
    # its power as it is, for log(0) has no derivative.
    none, small = one_minus_beta == 0, one_minus_beta > 0.5
    powers = t.astype(one_minus_beta.dtype) * jnp.log1p(-jnp.where(small, 0.5, one_minus_beta))
    by_power = 1 - jax.lax.pow(
        jnp.where(small, 1 - one_minus_beta, 0), jnp.broadcast_to(t, none.shape)
    )
    rest = jnp.where(small, by_power, -jnp.expm1(jnp.where(none, -1, powers)))
    return jnp.where(none, 1, 1 / rest)
