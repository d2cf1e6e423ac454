"""A NaN or an infinity anywhere in a gradient: nothing but counters changes, bit for bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import assert_same_bits, native_backends

import jaxrenaissance as jr

PATHS = {
    "plain": {},
    "norms": {"max_norm": 1.0, "ema_decay": 0.9, "metrics": ("leaves", "param_norm")},
    "accumulate": {"accumulate": jr.Accumulate(1), "ema_decay": 0.9, "ema_debias": True},
    "accumulate_norms": {"accumulate": jr.Accumulate(1), "max_norm": 1.0},
}
# More than one chunk of work, and a tail.
SHAPES = {"a": (300, 251), "b": (33,), "c": ()}
VALUES = (np.nan, np.inf, -np.inf)


def positions(size):
    """First, last, one in the middle and the first of the last vector of four."""
    return sorted({0, size // 2, (size - 1) // 4 * 4, size - 1})


def create(name, backend, dtype=np.float32):
    params = {path: np.ones(shape, dtype) for path, shape in SHAPES.items()}
    optimizer = jr.adamw(0.1, weight_decay=0.1, mask=True, backend=backend, **PATHS[name])
    return jr.TrainState.create(params, optimizer)


def ones(dtypes):
    return {path: np.ones(shape, dtypes[path]) for path, shape in SHAPES.items()}


def injected(grads, path, position, value):
    bad = grads[path].copy()
    bad.reshape(-1)[position] = value
    return grads | {path: bad}


def assert_nothing_changed(new, state):
    series = (lambda s: s.weights), (lambda s: s.moments), (lambda s: s.ema)
    for of in series:
        for got, wanted in zip(jax.tree.leaves(of(new)), jax.tree.leaves(of(state)), strict=True):
            assert_same_bits(got, wanted)
    assert int(new.step) == int(state.step)


@native_backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PATHS)
def test_one_bad_element_changes_nothing_but_counters(name, dtype, backend):
    sweep(name, dict.fromkeys(SHAPES, dtype), np.float32, backend)


@pytest.mark.parametrize("name", PATHS)
def test_one_bad_element_of_mixed_dtypes_changes_nothing_but_counters(name, backend):
    dtypes = {"a": "bfloat16", "b": "float16", "c": "float32"}
    sweep(name, dtypes, np.float32, backend)


@pytest.mark.parametrize("name", PATHS)
def test_one_bad_element_of_float64_changes_nothing_but_counters(name, backend):
    with jax.enable_x64(True):
        sweep(name, dict.fromkeys(SHAPES, "float64"), np.float64, backend)


def sweep(name, dtypes, weights, backend):
    step = jax.jit(lambda s, g: s.apply_gradients(g))
    state, grads = create(name, backend, weights), ones(dtypes)
    state = step(state, grads)
    skipped = 0
    for path, shape in SHAPES.items():
        size = int(np.prod(shape))
        for position, value in itertools.product(positions(size), VALUES):
            new = step(state, injected(grads, path, position, value))
            assert bool(new.has_nan), (path, position, value)
            assert_nothing_changed(new, state)
            skipped += 1
            assert int(new.skipped) == skipped
            with pytest.raises(FloatingPointError, match=f"'{path}'"):
                jr.check(new, max_consecutive=0)
            # The counters go on; the rest is as it was.
            state = new
    assert int(state.consecutive_skips) == skipped
    after = step(state, grads)
    assert [int(n) for n in (after.step, after.consecutive_skips)] == [2, 0]
    assert step._cache_size() == 1


@pytest.mark.parametrize("name", PATHS)
def test_the_smallest_and_the_largest_numbers_are_finite(name, backend):
    step = jax.jit(lambda s, g: s.apply_gradients(g))
    state = create(name, backend)
    grads = ones({"a": "float32", "b": "bfloat16", "c": "float16"})
    cases = {"a": (1e-45, -1e-40, 3.4e38, -3.4e38), "b": (1e-40, 3.3e38), "c": (6e-8, 65504.0)}
    updates = 0
    for path, values in cases.items():
        for value in values:
            state = step(state, injected(grads, path, -1, value))
            updates += 1
            assert not bool(state.has_nan), (path, value)
            assert int(state.step) == updates
    assert np.isfinite(state.weights[0]).all()


@pytest.mark.parametrize("name", PATHS)
def test_a_bad_gradient_of_a_leaf_that_is_not_trained_skips_nothing(name, backend):
    params = {"w": jnp.ones(33), "base": jnp.full(4, 0.1, jnp.bfloat16), "ids": jnp.arange(3)}
    optimizer = jr.adamw(0.1, mask=True, weight_decay=0.0, backend=backend, **PATHS[name])
    state = jr.TrainState.create(params, optimizer, trainable="w")
    # Nothing of the frozen leaves in any arena: weights, moments, averages or sums.
    sizes = {x.size for x in jax.tree.leaves((state.weights, state.moments, state.ema))}
    assert sizes == {64}
    grads = {"w": jnp.ones(33), "base": jnp.full(4, jnp.nan), "ids": None}
    new = jax.jit(lambda s, g: s.apply_gradients(g), donate_argnums=0)(state, grads)
    assert int(new.step) == 1
    np.testing.assert_allclose(new.params["w"], 0.9, rtol=1e-5)
    assert_same_bits(new.params["base"], params["base"])
    np.testing.assert_array_equal(new.params["ids"], [0, 1, 2])
    if new.ema:
        assert_same_bits(new.ema_params["base"], params["base"])
