"""Norms in the metrics: of which leaves, scaled how, and kept for how long."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrenaissance as jr

ALL = ["grad_norm", "leaves", "param_norm", "update_norm"]


def norm(*arrays):
    """In float64."""
    return np.sqrt(sum(np.sum(np.square(np.asarray(x).astype(np.float64))) for x in arrays))


def test_each_leaf_has_its_norm_by_its_path(backend):
    rng = np.random.default_rng(0)
    shapes = {"z": (40, 50), "empty": (0, 3), "stacked": (3, 5, 7), "a": (), "b": (33,)}
    params = {path: jnp.asarray(rng.normal(size=s), jnp.float32) for path, s in shapes.items()}
    grads = {path: jnp.asarray(rng.normal(size=s), jnp.bfloat16) for path, s in shapes.items()}
    optimizer = jr.sgd(
        0.5, loss_scale=jr.StaticLossScale(4), max_norm=1.0, metrics=ALL, backend=backend
    )
    state = jr.TrainState.create(params, optimizer, stacked={"stacked": 1})
    new = jax.jit(lambda s, g: s.apply_gradients(g))(state, grads)
    metrics = new.metrics
    found = new.plan.by_path(metrics["leaf_grad_norm"])
    assert found.keys() == shapes.keys()
    for path, g in grads.items():
        np.testing.assert_allclose(found[path], norm(g) / 4, rtol=1e-6)
    total = norm(*grads.values()) / 4
    np.testing.assert_allclose(metrics["grad_norm"], total, rtol=1e-6)
    np.testing.assert_allclose(metrics["clip_factor"], 1 / total, rtol=1e-6)
    np.testing.assert_allclose(metrics["param_norm"], norm(*params.values()), rtol=1e-6)
    np.testing.assert_allclose(metrics["update_norm"], 0.5, rtol=1e-5)  # lr times max_norm


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_slices_are_combined_without_overflow_and_underflow(size, backend):
    params = {"blocks": jnp.ones((4, 3)), "b": jnp.ones(2)}
    optimizer = jr.sgd(0.0, metrics="leaves", backend=backend)
    state = jr.TrainState.create(params, optimizer, stacked={"blocks": 1})
    grads = {"blocks": jnp.full((4, 3), size), "b": jnp.zeros(2)}
    state = state.apply_gradients(grads)
    found = state.plan.by_path(state.metrics["leaf_grad_norm"])
    np.testing.assert_allclose(found["blocks"], np.sqrt(12) * size, rtol=1e-6)
    assert found["b"] == 0


def test_a_skipped_call_shows_its_norms_and_updates_nothing(backend):
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    state = jr.TrainState.create(params, jr.sgd(0.5, metrics=ALL, backend=backend))
    state = state.apply_gradients({"a": jnp.full(2, jnp.nan), "b": jnp.ones(3)})
    found = state.plan.by_path(state.metrics["leaf_grad_norm"])
    assert np.isnan(found["a"])
    np.testing.assert_allclose(found["b"], np.sqrt(3), rtol=1e-6)
    assert np.isnan(state.metrics["grad_norm"])
    assert float(state.metrics["update_norm"]) == 0
    np.testing.assert_allclose(state.metrics["param_norm"], np.sqrt(5), rtol=1e-6)


def test_with_accumulation_norms_are_those_of_the_last_whole_cycle(backend):
    optimizer = jr.sgd(1.0, accumulate=jr.Accumulate(2), metrics=ALL, backend=backend)
    state = jr.TrainState.create({"a": jnp.zeros(4)}, optimizer)
    seen = []
    for value in (1.0, 3.0, 100.0, 200.0):
        state = state.apply_gradients({"a": jnp.full(4, value)})
        metrics = state.metrics
        names = ("grad_norm", "leaf_grad_norm", "update_norm")
        seen.append([float(metrics[name].sum()) for name in names])
    np.testing.assert_allclose(seen, [[0, 0, 0], [4, 4, 4], [4, 4, 0], [300, 300, 300]], rtol=1e-6)


def test_both_arenas_are_one_norm(backend):
    with jax.enable_x64(True):
        params = {"a": jnp.full(2, 3.0, jnp.float64), "b": jnp.full(3, 2.0, jnp.float32)}
        state = jr.TrainState.create(params, jr.sgd(1.0, metrics=ALL, backend=backend))
        state = state.apply_gradients(params)
        for name in ("grad_norm", "param_norm", "update_norm"):
            np.testing.assert_allclose(state.metrics[name], np.sqrt(30), rtol=1e-12)
        found = state.plan.by_path(state.metrics["leaf_grad_norm"])
        np.testing.assert_allclose([found["a"], found["b"]], np.sqrt([18, 12]), rtol=1e-12)


def test_members_have_norms_of_their_own(backend):
    optimizer = jr.sgd(1.0, max_norm=1.0, metrics=ALL, backend=backend)

    def run(g):
        return jr.TrainState.create({"a": jnp.zeros(4)}, optimizer).apply_gradients({"a": g})

    states = jax.vmap(run)(jnp.asarray([[0.5], [2.0]]) * jnp.ones(4))
    metrics = states.metrics
    np.testing.assert_allclose(metrics["grad_norm"], [1, 4], rtol=1e-6)
    np.testing.assert_allclose(metrics["leaf_grad_norm"], [[1], [4]], rtol=1e-6)
    np.testing.assert_allclose(metrics["clip_factor"], [1, 0.25], rtol=1e-6)
    np.testing.assert_allclose(metrics["update_norm"], [1, 1], rtol=1e-6)
    np.testing.assert_allclose(states.plan.by_path(metrics["leaf_grad_norm"])["a"], [1, 4])


def test_a_tree_without_leaves_has_norms_of_zero(backend):
    optimizer = jr.sgd(1.0, max_norm=1.0, metrics=ALL, backend=backend)
    for params in ({}, {"a": jnp.zeros((0, 2))}):
        state = jr.TrainState.create(params, optimizer).apply_gradients(params)
        assert int(state.step) == 1
        assert [float(state.metrics[x]) for x in ("grad_norm", "update_norm")] == [0, 0]
        assert state.metrics["leaf_grad_norm"].shape == (len(params),)
