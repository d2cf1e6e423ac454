"""prologue in jax.numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from .. import scalars as s


def prologue(
    floats: jax.Array, ints: jax.Array, *, num_floats: int, dtype: np.dtype
) -> list[jax.Array]:
    """The counters advanced by one call, and the scalars derived from them."""
    first_bad, calls = ints[s.FIRST_BAD], ints[s.CALLS]
    bad = first_bad != s.NO_LEAF
    skipped = bad.astype(jnp.int32)
    step = ints[s.STEP] + 1 - skipped
    updates = {
        s.STEP: step,
        s.CALLS: calls + 1,
        s.SKIPPED: ints[s.SKIPPED] + skipped,
        s.CONSECUTIVE_SKIPS: jnp.where(bad, ints[s.CONSECUTIVE_SKIPS] + 1, 0),
        s.FIRST_BAD: jnp.int32(s.NO_LEAF),
        s.LAST_BAD_LEAF: jnp.where(bad, first_bad, ints[s.LAST_BAD_LEAF]),
        s.LAST_BAD_CALL: jnp.where(bad, calls, ints[s.LAST_BAD_CALL]),
        s.HAS_NAN: skipped,
    }
    new_ints = ints.at[np.array(list(updates))].set(jnp.stack(list(updates.values())))

    t = jnp.maximum(step, 1).astype(dtype)
    rows = floats.reshape(num_floats // s.ROW, s.ROW)
    groups = rows[1:]

    def correction(one_minus_beta: jax.Array) -> jax.Array:
        # 1 - b^t without float64: b^t = exp(t log1p(-(1 - b))), and expm1 keeps what is near zero.
        # Where there is no b, 1 - b is zero, and so is the correction's exponent.
        none = one_minus_beta == 0
        exponent = jnp.where(none, -1, t * jnp.log1p(-one_minus_beta))
        return jnp.where(none, 1, -1 / jnp.expm1(exponent))

    groups = (
        groups.at[:, s.LR_WD]
        .set(groups[:, s.LEARNING_RATE] * groups[:, s.WEIGHT_DECAY])
        .at[:, s.C1]
        .set(correction(groups[:, s.ONE_MINUS_B1]))
        .at[:, s.C2]
        .set(correction(groups[:, s.ONE_MINUS_B2]))
    )
    header = rows[:1].at[:, s.APPLY].set((~bad).astype(dtype))
    return [jnp.concatenate([header, groups]).reshape(num_floats), new_ints]
