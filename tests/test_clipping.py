"""Clipping by norm and by value, and the norms that a step measures."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from states import make_step, random_like

import jaxrenaissance as jr


def make(params, *, learning_rate=1.0, optimizer=jr.sgd, trainable=None, stacked=None, **options):
    return jr.TrainState.create(
        params, optimizer(learning_rate, **options), trainable=trainable, stacked=stacked
    )


def norm_of(grads):
    return np.sqrt(
        sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(grads))
    )


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_max_norm_is_clip_by_global_norm_of_optax(optimizer, backend):
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.ones((7, 9)), "bias": jnp.zeros(9), "scale": jnp.ones(33)}
    if optimizer == "momentum":
        ours, theirs = {"optimizer": jr.sgd, "momentum": 0.9}, optax.sgd(0.01, 0.9)
    else:
        ours = {"optimizer": jr.adamw, "weight_decay": 0.1, "mask": True, "eps": 1e-3}
        theirs = optax.adamw(0.01, weight_decay=0.1, eps=1e-3)
    theirs = optax.chain(optax.clip_by_global_norm(8.0), theirs)
    state = make(params, learning_rate=0.01, max_norm=8.0, backend=backend, **ours)
    step = make_step()
    wanted, opt_state = params, theirs.init(params)
    update = jax.jit(theirs.update)
    clipped = 0
    for i in range(20):
        grads = random_like(params, rng, 0.2 + 0.1 * i)
        state = step(state, grads)
        updates, opt_state = update(grads, opt_state, wanted)
        wanted = optax.apply_updates(wanted, updates)
        norm = norm_of(grads)
        np.testing.assert_allclose(state.metrics["grad_norm"], norm, rtol=1e-6)
        np.testing.assert_allclose(state.metrics["clip_factor"], min(1, 8 / norm), rtol=1e-6)
        clipped += norm > 8
    for path, x in state.params.items():
        np.testing.assert_allclose(x, wanted[path], rtol=1e-5, atol=1e-6)
    assert 0 < clipped < 20


def test_max_value_comes_after_max_norm(backend):
    state = make({"w": jnp.zeros(3)}, max_norm=1.0, max_value=0.7, backend=backend)
    state = make_step()(state, {"w": jnp.asarray([3.0, -4.0, 0.0])})
    np.testing.assert_allclose(state.params["w"], [-0.6, 0.7, 0.0], rtol=1e-6)
    np.testing.assert_allclose(state.metrics["grad_norm"], 5.0, rtol=1e-6)
    np.testing.assert_allclose(state.metrics["clip_factor"], 0.2, rtol=1e-6)


def test_max_value_is_clip_of_optax_and_comes_before_l2_decay(backend):
    params = {"w": jnp.asarray([10.0, -10.0, 10.0, 0.0])}
    grads = {"w": jnp.asarray([0.1, -3.0, 0.5, 3.0])}
    state = make(params, max_value=0.5, weight_decay=0.1, decoupled=False, mask=True)
    state = make_step()(state, grads)
    theirs = optax.chain(optax.clip(0.5), optax.add_decayed_weights(0.1), optax.sgd(1.0))
    updates, _ = theirs.update(grads, theirs.init(params), params)
    np.testing.assert_allclose(
        state.params["w"], optax.apply_updates(params, updates)["w"], rtol=1e-6
    )


def test_max_value_bounds_the_unscaled_gradient(backend):
    state = make(
        {"w": jnp.zeros(4)}, max_value=0.5, loss_scale=jr.StaticLossScale(64), backend=backend
    )
    state = make_step()(state, {"w": jnp.asarray([16.0, -32.0, 320.0, -320.0])})
    np.testing.assert_array_equal(state.params["w"], [-0.25, 0.5, -0.5, 0.5])


def test_a_gradient_at_the_bound_is_not_clipped(backend):
    state = make({"w": jnp.zeros(2)}, max_norm=5.0, max_value=4.0, backend=backend)
    state = make_step()(state, {"w": jnp.asarray([3.0, 4.0])})
    assert float(state.metrics["clip_factor"]) == 1.0
    np.testing.assert_array_equal(state.params["w"], [-3.0, -4.0])


def test_zero_gradients_have_norm_zero_and_are_not_clipped(backend):
    state = make({"w": jnp.ones(3)}, max_norm=1.0, metrics="leaves", backend=backend)
    state = make_step()(state, {"w": jnp.zeros(3)})
    assert float(state.metrics["grad_norm"]) == 0.0
    assert float(state.metrics["clip_factor"]) == 1.0
    np.testing.assert_array_equal(state.metrics["leaf_grad_norm"], [0.0])
    np.testing.assert_array_equal(state.params["w"], 1.0)


def test_clipping_and_the_norm_are_of_unscaled_gradients(backend):
    rng = np.random.default_rng(1)
    params = {"a": jnp.zeros((5, 31)), "b": jnp.zeros(33)}
    grads = random_like(params, rng)
    seen = []
    for scale in (1.0, 2.0**12):
        state = make(params, max_norm=2.0, loss_scale=jr.StaticLossScale(scale), backend=backend)
        seen.append(make_step()(state, jax.tree.map(lambda g, s=scale: g * s, grads)))
    plain, scaled = seen
    norm = norm_of(grads)
    for state in seen:
        np.testing.assert_allclose(state.metrics["grad_norm"], norm, rtol=1e-6)
        np.testing.assert_allclose(state.metrics["clip_factor"], 2 / norm, rtol=1e-6)
        np.testing.assert_allclose(norm_of(state.params), 2.0, rtol=1e-5)
    np.testing.assert_allclose(plain.params["b"], scaled.params["b"], rtol=1e-6)


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_clipping_a_gradient_with_one_bad_element_skips_the_step(value, backend):
    params = {"a": jnp.ones((5, 31)), "b": jnp.ones(33)}
    state = make(params, optimizer=jr.adam, max_norm=1.0, max_value=0.1, backend=backend)
    step = make_step()
    state = step(state, params)
    new = step(state, params | {"b": params["b"].at[32].set(value)})
    assert bool(new.has_nan)
    for got, wanted in zip(
        jax.tree.leaves((new.weights, new.moments)),
        jax.tree.leaves((state.weights, state.moments)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, wanted)
    # And the next is clipped as if nothing had been.
    after = step(new, params)
    assert int(after.step) == 2
    np.testing.assert_allclose(after.metrics["grad_norm"], np.sqrt(188), rtol=1e-6)
    assert np.isfinite(after.params["b"]).all()


def test_without_the_finite_check_a_nan_reaches_what_max_value_bounds(backend):
    state = make({"w": jnp.zeros(3)}, max_value=0.5, skip_nonfinite=False, backend=backend)
    state = make_step()(state, {"w": jnp.asarray([jnp.nan, jnp.inf, -jnp.inf])})
    np.testing.assert_array_equal(state.params["w"], [jnp.nan, -0.5, 0.5])


# Sizes and ranges.


def test_the_norm_of_a_thousand_bfloat16_leaves(backend):
    rng = np.random.default_rng(2)
    # XLA compiles each leaf's sum by itself, and 1000 of them for a minute.
    shapes = [(int(n),) for n in rng.integers(1, 40, 30 if backend == "xla" else 1000)]
    params = [jnp.zeros(shape) for shape in shapes]
    grads = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    state = make(params, max_norm=1.0, backend=backend)
    state = make_step()(state, grads)
    np.testing.assert_allclose(state.metrics["grad_norm"], norm_of(grads), rtol=2e-7)
    np.testing.assert_allclose(norm_of(state.params), 1.0, rtol=1e-5)


def test_the_norm_of_float16_gradients_whose_squares_overflow(backend):
    state = make({"w": jnp.zeros(2)}, max_norm=1.0, backend=backend)
    state = make_step()(state, {"w": jnp.asarray([300.0, 300.0], jnp.float16)})
    np.testing.assert_allclose(state.metrics["grad_norm"], 300 * np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], -np.sqrt(0.5), rtol=1e-6)
    assert int(state.skipped) == 0


@pytest.mark.parametrize("value", [1e-30, 1e30, 3e38])
def test_the_norm_neither_overflows_nor_vanishes(value, backend):
    params = {"a": jnp.zeros((40, 50)), "b": jnp.zeros(3)}
    grads = {"a": jnp.full((40, 50), value), "b": jnp.asarray([0.0, -value, 0.0])}
    if value > 1e37:  # 2001 of them have a norm that float32 does not hold
        grads["a"] = jnp.zeros((40, 50))
    state = make(params, max_norm=value, metrics="leaves", backend=backend)
    state = make_step()(state, grads)
    assert int(state.step) == 1
    np.testing.assert_allclose(state.metrics["grad_norm"], norm_of(grads), rtol=1e-6)
    np.testing.assert_allclose(
        state.metrics["leaf_grad_norm"], [norm_of(grads["a"]), norm_of(grads["b"])], rtol=1e-6
    )
    np.testing.assert_allclose(norm_of(state.params), np.float32(value), rtol=1e-5)


def test_large_and_small_elements_side_by_side(backend):
    grads = {"w": jnp.asarray([3e30, 1e-30, 4e30, 0.0])}
    state = make({"w": jnp.zeros(4)}, max_norm=1.0, backend=backend)
    state = make_step()(state, grads)
    np.testing.assert_allclose(state.metrics["grad_norm"], 5e30, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], [-0.6, 0, -0.8, 0], rtol=1e-6)


def test_float64_leaves_have_norms_of_float64(backend):
    with jax.enable_x64(True):
        params = {"a": jnp.zeros(3, jnp.float64), "b": jnp.zeros(2, jnp.float32)}
        grads = {"a": jnp.full(3, 1 / 3), "b": jnp.full(2, 0.1, jnp.float32)}
        state = make(params, max_norm=1e-3, metrics="leaves", backend=backend)
        state = make_step()(state, grads)
        assert state.metrics["grad_norm"].dtype == jnp.float64
        np.testing.assert_allclose(state.metrics["grad_norm"], norm_of(grads), rtol=1e-7)
        np.testing.assert_allclose(
            state.metrics["leaf_grad_norm"], [norm_of(grads["a"]), norm_of(grads["b"])], rtol=1e-7
        )
        # The float64 arena is updated by a factor of float64.
        wanted = -np.asarray(grads["a"]) * 1e-3 / norm_of(grads)
        np.testing.assert_allclose(state.params["a"], wanted, rtol=1e-7)


# What else is measured.


def test_norms_by_leaf_are_those_of_their_leaves(backend):
    rng = np.random.default_rng(3)
    params = {
        "a_empty": jnp.zeros((0, 3)),
        "blocks": {"kernel": jnp.zeros((3, 5, 7)), "bias": jnp.zeros((3, 33))},
        "frozen": jnp.zeros(4),
        "m_empty": jnp.zeros(0),
        "scalar": jnp.zeros(()),
        "z": jnp.zeros(31),
        "z_empty": jnp.zeros(0),
    }
    grads = random_like(params, rng)
    grads["frozen"] = jnp.full(4, jnp.nan)
    state = make(
        params,
        metrics=["leaves"],
        loss_scale=jr.StaticLossScale(4),
        trainable=lambda path, leaf: path != "frozen",
        stacked={"blocks/*": 1},
        backend=backend,
    )
    state = make_step()(state, jax.tree.map(lambda g: g * 4, grads))
    assert int(state.step) == 1
    norms = state.metrics["leaf_grad_norm"]
    assert norms.shape == (7,)
    by_path = state.plan.by_path(norms)
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
    }
    del flat["frozen"]
    assert by_path.keys() == flat.keys()
    for path, leaf in flat.items():
        np.testing.assert_allclose(by_path[path], norm_of(leaf), rtol=1e-6, err_msg=path)
    del grads["frozen"]
    np.testing.assert_allclose(state.metrics["grad_norm"], norm_of(grads), rtol=1e-6)


def test_norms_of_parameters_and_update_are_those_before_and_of_the_step(backend):
    rng = np.random.default_rng(4)
    params = random_like({"a": jnp.zeros((5, 31)), "b": jnp.zeros(33)}, rng)
    state = make(
        params,
        optimizer=jr.adamw,
        learning_rate=0.1,
        mask=True,
        metrics=("param_norm", "update_norm"),
        backend=backend,
    )
    step = make_step()
    for value in (1.0, np.nan, 1.0):
        before = state.params
        state = step(state, jax.tree.map(lambda g, v=value: g * v, random_like(params, rng)))
        moved = jax.tree.map(lambda new, old: np.float64(new) - old, state.params, before)
        np.testing.assert_allclose(state.metrics["param_norm"], norm_of(before), rtol=1e-6)
        np.testing.assert_allclose(state.metrics["update_norm"], norm_of(moved), rtol=1e-5)
        assert (float(state.metrics["update_norm"]) == 0) == np.isnan(value)
    assert "grad_norm" not in state.metrics


def test_measured_values_outlive_the_state_that_was_donated(backend):
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    names = ("grad_norm", "param_norm", "update_norm", "leaves")
    state = make(
        params, max_norm=1.0, metrics=names, loss_scale=jr.StaticLossScale(2), backend=backend
    )
    step = make_step(donate_argnums=0)
    state = step(state, params)
    metrics = state.metrics
    step(state, jax.tree.map(lambda x: x * 100, params))
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(7) / 2, rtol=1e-6)
    np.testing.assert_allclose(metrics["clip_factor"], 2 / np.sqrt(7), rtol=1e-6)
    np.testing.assert_allclose(metrics["leaf_grad_norm"], [np.sqrt(3) / 2, 1.0], rtol=1e-6)
    np.testing.assert_allclose(metrics["param_norm"], np.sqrt(7), rtol=1e-6)
    np.testing.assert_allclose(metrics["update_norm"], 1.0, rtol=1e-6)
    assert float(metrics["loss_scale"]) == 2.0


def test_what_is_not_asked_for_is_not_measured(backend):
    state = make({"w": jnp.ones(3)}, backend=backend)
    state = make_step()(state, {"w": jnp.ones(3)})
    measured = {"grad_norm", "clip_factor", "loss_scale", "param_norm", "update_norm"}
    assert not (measured | {"leaf_grad_norm", "max_norm", "max_value"}) & state.metrics.keys()
