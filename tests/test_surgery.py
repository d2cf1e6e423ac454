"""map_params and reset_moments: what changes, and that all else stays bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from states import (
    HOW,
    applied,
    assert_buffers_equal,
    assert_trees_equal,
    by_path,
    lora,
    mlp,
    ones_like,
)

import jaxrenaissance as jr

MATCHES = [
    ("norm/*", {"norm/bias", "norm/scale"}),
    (["*/kernel", "norm/scale"], {"in/kernel", "out/kernel", "norm/scale"}),
    (jr.Region.W_BN_WEIGHT, {"norm/scale"}),
    ([jr.Region.W_FC_WEIGHT, "in/bias"], {"in/kernel", "out/kernel", "in/bias"}),
    (lambda path, leaf: path.startswith("in") and leaf.shape == (5,), {"in/bias"}),
]


def stepped(backend, **options):
    """A state whose leaves all have moments that are not zero."""
    optimizer = jr.adamw(0.1, mask="weights", backend=backend, **options)
    return jr.TrainState.create(mlp(), optimizer).apply_gradients(ones_like(mlp()))


@pytest.mark.parametrize("how", HOW)
def test_map_params_changes_every_trained_leaf_and_nothing_else(how, backend):
    state = stepped(backend, ema_decay=0.9)
    new = applied(lambda s: s.map_params(lambda x: jnp.clip(2 * x, -1, 1)), state, how)
    wanted = jax.tree.map(lambda x: np.clip(2 * np.asarray(x), -1, 1), state.params)
    assert_trees_equal(new.params, wanted)
    assert_buffers_equal(
        (new.moments, new.ema, new.floats, new.ints),
        (state.moments, state.ema, state.floats, state.ints),
    )


@pytest.mark.parametrize(("match", "paths"), MATCHES)
def test_map_params_and_reset_moments_of_what_matches(match, paths, backend):
    state = stepped(backend)
    mapped = by_path(state, state.map_params(jnp.zeros_like, match).weights)
    old = by_path(state, state.weights)
    assert {path for path in old if not (mapped[path] == old[path]).all()} <= paths
    assert all((mapped[path] == 0).all() for path in paths)
    reset = state.reset_moments(match)
    for k in range(2):
        before, after = (by_path(state, [m[k] for m in s.moments]) for s in (state, reset))
        for path, moment in after.items():
            np.testing.assert_array_equal(moment, 0 if path in paths else before[path])
            assert (before[path] != 0).all()


@pytest.mark.parametrize("how", HOW)
def test_reset_moments_forgets_all_of_them_and_keeps_the_counters(how, backend):
    state = stepped(backend)
    new = applied(lambda s: s.reset_moments(), state, how)
    assert all((m == 0).all() for m in jax.tree.leaves(new.moments))
    assert_buffers_equal(
        (new.weights, new.floats, new.ints), (state.weights, state.floats, state.ints)
    )


def test_reset_moments_removes_a_nan(backend):
    optimizer = jr.sgd(0.1, 0.9, skip_nonfinite=False, backend=backend)
    state = jr.TrainState.create({"a": jnp.ones(3), "b": jnp.ones(2)}, optimizer)
    state = state.apply_gradients({"a": jnp.full(3, jnp.nan), "b": jnp.ones(2)})
    state = state.reset_moments("a").replace(params={"a": jnp.ones(3), "b": jnp.ones(2)})
    state = state.apply_gradients({"a": jnp.ones(3), "b": jnp.ones(2)})
    np.testing.assert_allclose(state.params["a"], 0.9, rtol=1e-6)
    np.testing.assert_allclose(state.params["b"], 1 - 0.1 * 1.9, rtol=1e-6)


def test_an_optimizer_without_moments_has_none_to_reset(backend):
    state = jr.TrainState.create(mlp(), jr.sgd(0.1, backend=backend))
    assert_buffers_equal(state.reset_moments(), state)
    with pytest.raises(ValueError, match="match: the pattern 'nothing' matches no trained leaf"):
        state.reset_moments("nothing")


def test_slices_of_a_stacked_leaf_are_reset_together(backend):
    params = {"blocks": {"kernel": jnp.ones((3, 5, 7))}, "head": jnp.ones(2)}
    optimizer = jr.sgd(0.1, 0.9, backend=backend)
    state = jr.TrainState.create(params, optimizer, stacked={"blocks/*": 1})
    new = state.apply_gradients(params).reset_moments("blocks/*")
    moments = by_path(new, [m[0] for m in new.moments])
    np.testing.assert_array_equal(moments["blocks/kernel"], 0)
    np.testing.assert_array_equal(moments["head"], 1)


def test_map_params_rounds_nothing_and_leaves_what_is_not_trained(backend):
    params = {**lora(), "lora": jax.tree.map(lambda x: x.astype(jnp.bfloat16), lora()["lora"])}
    state = jr.TrainState.create(params, jr.sgd(1e-4, backend=backend), trainable="lora/*")
    state = state.apply_gradients(params)
    seen = []

    def fn(x):
        seen.append(x.dtype)
        return x

    new = state.map_params(fn)
    assert seen == [jnp.float32, jnp.float32]
    assert_buffers_equal(new.weights, state.weights)
    np.testing.assert_array_equal(new.params["half"], params["half"])


@pytest.mark.parametrize(
    ("fn", "match", "error", "message"),
    [
        (lambda x: x[:1], "in/bias", ValueError, r"fn: 'in/bias' has shape \(1,\), wanted \(5,\)"),
        (
            lambda x: x.astype(int),
            None,
            ValueError,
            "fn: 'in/bias' has dtype int32, wanted",
        ),
        (lambda x: 0.0, "in/bias", ValueError, "fn: 'in/bias' is 0.0, wanted an array"),
        (lambda x: x, "in", ValueError, "match: the pattern 'in' matches no trained leaf"),
        (lambda x: x, jr.Region.M_FC_BIAS, ValueError, "match: expected a region of series W"),
        (lambda x: x, 3, TypeError, "match: expected a pattern, a Region, a list"),
    ],
)
def test_bad_arguments_of_map_params_are_named(fn, match, error, message):
    state = jr.TrainState.create(mlp(), jr.sgd(0.1, backend="xla"))
    with pytest.raises(error, match=message):
        state.map_params(fn, match)


def test_states_of_several_members_say_so(backend):
    optimizer = jr.sgd(0.1, 0.9, ema_decay=0.9, backend=backend)
    state = jax.vmap(lambda w: jr.TrainState.create({"w": w}, optimizer))(jnp.ones((3, 2)))
    for name, call in {
        "map_params": lambda: state.map_params(lambda x: x),
        "reset_moments": lambda: state.reset_moments(),
        "replan": lambda: state.replan({"w": jnp.ones(2)}),
        "ema_params": lambda: state.ema_params,
        "with_ema": lambda: state.with_ema(),
        "zero_gradients": lambda: state.zero_gradients(),
        "lerp": lambda: jr.lerp(state, {"w": jnp.ones(2)}, 0.5),
    }.items():
        with pytest.raises(ValueError, match=rf"{name}: the state holds \(3,\) members"):
            call()
