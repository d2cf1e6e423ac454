"""Derivatives of the ops, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import (
    assert_close,
    make_floats,
    native_backends,
    random_leaves,
    random_states,
    to_arena,
    to_leaves,
)
from ops_steps import LAYOUT

from jaxrenaissance import ops, scalars
from jaxrenaissance.workspaces import workspace_size


def differentiable_calls(backend):
    floats = jnp.asarray(make_floats())
    arena = jnp.asarray(random_states(LAYOUT, "sgd", np.random.default_rng(0))[0])
    ints = jnp.asarray(scalars.initial_ints())
    leaves = [jnp.asarray(x) for x in random_leaves(LAYOUT, np.random.default_rng(0))]
    words = jnp.zeros(workspace_size(LAYOUT), jnp.int32)
    segments, taus = [len(LAYOUT.segments)], jnp.ones(2)
    return {
        "unpack": lambda x: ops.unpack(LAYOUT, arena * x, [np.float32] * 4, backend=backend)[0],
        "pack": lambda x: ops.pack(
            LAYOUT, [y * x.astype(y.dtype) for y in leaves], backend=backend
        ),
        "pack_piece": lambda x: ops.pack_piece(
            LAYOUT, [y * x.astype(y.dtype) for y in leaves], jnp.int32(0), shards=1, backend=backend
        ),
        "statistics": lambda x: x * ops.statistics(LAYOUT, ints, arena * x, backend=backend)[0],
        "prologue": lambda x: ops.prologue(floats * x, ints, backend=backend)[0],
        "update_sgd": lambda x: ops.update(
            "sgd", LAYOUT, floats, arena * x, (), leaves, backend=backend
        )[0],
        "norms": lambda x: x * ops.norms(LAYOUT, ints, arena * x, flag=True, backend=backend)[0],
        "accumulate": lambda x: ops.accumulate(
            LAYOUT, ints, arena * x, leaves, flag=True, norms=False, backend=backend
        )[1],
        "finish": lambda x: ops.finish(
            floats * x, ints, [words], segments, gradients=1, backend=backend
        )[0],
        "finish_update": lambda x: ops.finish_update(
            floats * x, [words], segments, backend=backend
        ),
        "update_norms_sgd": lambda x: (
            x * ops.update_norms("sgd", LAYOUT, floats, arena * x, (), leaves, backend=backend)[0]
        ),
        "lerp": lambda x: ops.lerp(LAYOUT, taus * x, [arena], None, backend=backend)[0],
    }


DIFFERENTIATED = (
    "unpack",
    "pack",
    "pack_piece",
    "statistics",
    "norms",
    "accumulate",
    "prologue",
    "finish",
    "update_norms_sgd",
    "finish_update",
    "update_sgd",
    "lerp",
)


@native_backends
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_differentiating_is_an_error_that_says_what_to_do(name, backend):
    fn = lambda x: jnp.sum(differentiable_calls(backend)[name](x))  # noqa: E731
    message = rf"jaxrenaissance's {name} cannot be differentiated.*state\.compute_params"
    for derivative in (
        jax.grad(fn),
        jax.jit(jax.grad(fn)),
        lambda x: jax.jvp(fn, (x,), (x,)),
        jax.grad(jax.checkpoint(fn)),
    ):
        with pytest.raises(TypeError, match=message):
            derivative(jnp.float32(1.0))


def test_the_xla_backend_is_differentiable():
    floats, factor = make_floats(factor=0.5), 0.5
    rng = np.random.default_rng(0)
    weights, m = random_states(LAYOUT, "momentum", rng)
    gradient, cotangent = rng.normal(size=(2, LAYOUT.size)).astype(np.float32)

    def fn(weights, gradient):
        w, _, _ = ops.update("momentum", LAYOUT, floats, weights, (m,), gradient, backend="xla")
        leaves = ops.unpack(LAYOUT, w, [np.float32] * 4, backend="xla")
        return jnp.vdot(ops.pack(LAYOUT, leaves, backend="xla"), cotangent)

    dw, dg = jax.jit(jax.grad(fn, (0, 1)))(jnp.asarray(weights), jnp.asarray(gradient))
    ones = [np.ones(shape) for shape in LAYOUT.shapes]
    keep = [x * (1 - 0.1 * 0.3 if i in (0, 3) else 1) for i, x in enumerate(ones)]
    rate = [x * -factor * (0.1 if i in (0, 3) else 0.07) for i, x in enumerate(ones)]
    assert_close(dw, cotangent * to_arena(LAYOUT, keep))
    assert_close(dg, cotangent * to_arena(LAYOUT, rate))


def test_average_bound_sum_and_lerp_are_differentiable_on_the_xla_backend():
    rng = np.random.default_rng(1)
    floats = make_floats([{"lr": 0.5}] * 2, one_minus_ema=0.25, max_value=1.0, loss_scale=2.0)
    weights, ema, accumulator, target = rng.normal(size=(4, LAYOUT.size)).astype(np.float32)
    gradient, cotangent = rng.normal(size=(2, LAYOUT.size)).astype(np.float32)
    taus = jnp.full(2, 0.5)

    def fn(gradient, max_norm):
        ints = jnp.asarray(scalars.initial_ints()).at[scalars.MICRO].set(1)
        ints, total, words = ops.accumulate(
            LAYOUT, ints, jnp.asarray(accumulator), gradient, flag=True, norms=True, backend="xla"
        )
        new, ints, *_ = ops.finish(
            jnp.asarray(floats).at[scalars.MAX_NORM].set(max_norm),
            ints,
            [words],
            [len(LAYOUT.segments)],
            gradients=1,
            backend="xla",
        )
        _, _, average = ops.update(
            "sgd", LAYOUT, new, jnp.asarray(weights), (), total, ema=jnp.asarray(ema), backend="xla"
        )
        (moved,) = ops.lerp(LAYOUT, taus, [jnp.asarray(target)], average, backend="xla")
        return jnp.vdot(moved, cotangent)

    # Two micro-batches and a scale of 2: a factor of 1/4, and less where the norm is bounded.
    total = gradient + accumulator
    counted = to_arena(LAYOUT, to_leaves(LAYOUT, total))  # What the norm is of: no padding.
    norm = np.linalg.norm(counted)
    for max_norm, factor in (np.inf, 0.25), (norm / 8, 0.125):
        dg = jax.jit(jax.grad(fn))(jnp.asarray(gradient), np.float32(max_norm))
        # Through the lerp, the average, the rate, the factor; clamped elements have none.
        wanted = cotangent * 0.5 * 0.25 * -0.5 * factor * (np.abs(total * factor) < 1)
        if max_norm < np.inf:  # And the factor is as 1 / norm, whose derivative is -total / norm^3.
            wanted = wanted - np.vdot(wanted, total) * counted / norm**2
        assert_close(dg, wanted)
