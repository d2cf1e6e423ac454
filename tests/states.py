"""Small models and steps that the tests of states share."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np


def mlp(seed=0, width=5):
    rng = np.random.default_rng(seed)

    def layer(rows, columns):
        return {
            "kernel": jnp.asarray(rng.normal(size=(rows, columns)), jnp.float32),
            "bias": jnp.zeros(columns),
        }

    norm = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
    return {"in": layer(3, width), "norm": norm, "out": layer(width, 1)}


def loss_fn(params, x):
    h = x @ params["in"]["kernel"] + params["in"]["bias"]
    h = jnp.tanh(h) * params["norm"]["scale"] + params["norm"]["bias"]
    return jnp.mean((h @ params["out"]["kernel"] + params["out"]["bias"]) ** 2)


def batch(seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(8, 3)), jnp.float32)


def train_step(state, x):
    loss, grads = jax.value_and_grad(loss_fn)(state.compute_params, x)
    return state.apply_gradients(grads), loss


def make_step(**options):
    """A jitted `apply_gradients`, whose cache is its own."""
    return jax.jit(lambda state, grads: state.apply_gradients(grads), **options)


@contextlib.contextmanager
def count_compilations():
    """A list that grows by one with every program that is compiled."""
    names = []

    def listen(event, seconds, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def random_like(tree, rng, scale=1.0):
    return jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=x.shape), x.dtype), tree)


def ones_like(params):
    return jax.tree.map(jnp.ones_like, params)


def assert_trees_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_buffers_equal(got, wanted, rtol=0.0, atol=0.0):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def lora():
    return {
        "base": {"kernel": jnp.arange(6, dtype=jnp.int8).reshape(2, 3), "key": jax.random.key(3)},
        "half": jnp.full(3, 0.1, jnp.bfloat16),
        "lora": {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 3))},
    }


# A loop that XLA compiles as one program may round otherwise on the xla backend.
def tolerance(backend):
    return {"rtol": 1e-5, "atol": 1e-6} if backend == "xla" else {"rtol": 2e-6, "atol": 1e-7}


def by_path(state, arenas):
    """What some arenas hold of each trained leaf, from the segments."""
    found = {leaf.path: np.zeros(leaf.size) for leaf in state.plan.leaves}
    for layout, arena in zip(state.plan.arenas, arenas, strict=True):
        for start, size, leaf, offset, _ in layout.segments:
            path = state.plan.leaves[layout.leaves[leaf]].path
            found[path][offset : offset + size] = arena[start : start + size]
    return {leaf.path: found[leaf.path].reshape(leaf.shape) for leaf in state.plan.leaves}


HOW = ("outside", "jit", "scan", "vmap")
"""Ways to call a function of a state that gives back one like it."""


def applied(fn, state, how):
    """`fn(state)`, called in one of these ways."""
    if how == "outside":
        return fn(state)
    if how == "jit":
        return jax.jit(fn)(state)
    if how == "scan":
        return jax.jit(lambda s: jax.lax.scan(lambda s, _: (fn(s), None), s, length=1)[0])(state)
    two = jax.tree.map(lambda x: jnp.stack([2 * x, x]), state)
    return jax.tree.map(lambda x: x[1], jax.jit(jax.vmap(fn))(two))
