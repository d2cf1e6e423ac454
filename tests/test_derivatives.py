"""Derivatives through whole steps on the xla backend: by hand, and as finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrenaissance as jr

NORMS = ["grad_norm", "param_norm", "update_norm", "leaves"]


def make(params, optimizer=jr.sgd, learning_rate=1.0, stacked=None, **options):
    optimizer = optimizer(learning_rate, backend="xla", **options)
    return jr.TrainState.create(params, optimizer, stacked=stacked)


def assert_derivatives(fn, *at, wanted, rtol=1e-6, atol=1e-7, modes=(jax.jacfwd, jax.jacrev)):
    """Of a scalar or an array by each scalar argument, compiled."""
    argnums = tuple(range(len(at)))
    for derivative in modes:
        got = jax.jit(derivative(fn, argnums))(*at)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def differences(fn, *at, step=1e-5):
    """The derivatives by each argument, from values on both sides of it."""
    fn = jax.jit(fn)

    def moved(i, by):
        return fn(*(x + by if k == i else x for k, x in enumerate(at)))

    return [(moved(i, step) - moved(i, -step)) / (2 * step) for i in range(len(at))]


# By hand: gradients (3x, 4), of norm 5 at x = 1, beside a leaf that has none.


@pytest.mark.parametrize(
    ("max_norm", "wanted"),
    [
        # -(3x, 4) / sqrt(9x² + 16): -(3/5 - 27/125, -36/125).
        (1.0, [-0.384, 0.288]),
        (10.0, [-3.0, 0.0]),
        (None, [-3.0, 0.0]),
    ],
)
def test_through_the_clipping_factor(max_norm, wanted):
    state = make({"w": jnp.zeros(2), "still": jnp.ones(3)}, max_norm=max_norm, metrics="grad_norm")

    def step(x):
        grads = {"w": jnp.stack([3 * x, 4.0]), "still": jnp.zeros(3) * x}
        return state.apply_gradients(grads)

    assert_derivatives(lambda x: step(x).params["w"], 1.0, wanted=[wanted])
    assert_derivatives(lambda x: step(x).params["still"], 1.0, wanted=[[0, 0, 0]])
    assert_derivatives(lambda x: step(x).metrics["grad_norm"], 1.0, wanted=[9 / 5])


def test_by_the_bound_itself():
    def step(max_norm):
        state = make({"w": jnp.zeros(2)}, max_norm=max_norm)
        return state.apply_gradients({"w": jnp.asarray([3.0, 4.0])}).params["w"]

    assert_derivatives(step, 1.0, wanted=[[-0.6, -0.8]])
    assert_derivatives(step, 10.0, wanted=[[0, 0]])


def test_through_every_norm_of_the_metrics():
    names = "grad_norm", "clip_factor", "param_norm", "update_norm", "leaf_grad_norm"
    params = {"rows": jnp.zeros((2, 2)), "still": jnp.zeros((2, 3)), "w": jnp.zeros(1)}

    def measure(x):
        # The first row of three has no gradient, nor has a whole leaf.
        state = make(
            jax.tree.map(lambda p: p + x, params),
            stacked={"rows": 1, "still": 1},
            learning_rate=0.5,
            max_norm=2.0,
            metrics=NORMS,
        )
        rows = jnp.stack([jnp.zeros(2), jnp.stack([3 * x, 4.0])])
        grads = {"rows": rows, "still": jnp.zeros((2, 3)), "w": jnp.full(1, 12.0)}
        values = state.apply_gradients(grads).metrics
        return {name: values[name] for name in names}

    for derivative in jax.jacfwd, jax.jacrev:
        got = jax.jit(derivative(measure))(1.0)
        np.testing.assert_allclose(got["grad_norm"], 9 / 13, rtol=1e-6)
        np.testing.assert_allclose(got["clip_factor"], -2 / 13**2 * 9 / 13, rtol=1e-6)
        # Eleven parameters that are all x; and an update that keeps its length.
        np.testing.assert_allclose(got["param_norm"], np.sqrt(11), rtol=1e-6)
        np.testing.assert_allclose(got["update_norm"], 0, atol=1e-6)
        np.testing.assert_allclose(got["leaf_grad_norm"], [9 / 5, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("optimizer", [jr.sgd, jr.adam, jr.lars, jr.lamb])
def test_gradients_that_are_all_zero_have_derivatives(optimizer):
    state = make({"w": jnp.ones(3)}, optimizer, max_norm=1.0, metrics=["update_norm", "leaves"])

    def step(x):
        new = state.apply_gradients({"w": jnp.zeros(3) * x})
        names = "grad_norm", "update_norm", "leaf_grad_norm"
        return jnp.concatenate([new.params["w"], *(new.metrics[n].reshape(-1) for n in names)])

    assert_derivatives(step, 1.0, wanted=[np.zeros(6)])


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_the_norm_of_very_large_and_small_gradients(scale):
    state = make({"w": jnp.zeros(2)}, metrics="grad_norm")

    def norm(x):
        return state.apply_gradients({"w": jnp.asarray([3.0, 4.0]) * scale * x}).metrics[
            "grad_norm"
        ]

    assert_derivatives(norm, 1.0, wanted=[5 * scale], atol=0)


# In float64, as finite differences, by the learning rate and by a number in the gradients.

LARS = functools.partial(
    jr.lars, trust_coefficient=0.5, weight_decay_mask=True, trust_ratio_mask=True
)
LAMB = functools.partial(jr.lamb, mask=True, trust_ratio_mask=True)
OPTIONS = {
    "clipped twice": {"max_norm": 1.0, "max_value": 0.55, "momentum": 0.9},
    "adamw": {"optimizer": jr.adamw, "max_norm": 0.5, "weight_decay": 0.1, "mask": True},
    "adam without b1": {"optimizer": jr.adam, "b1": 0.0},
    "cycles": {
        "accumulate": jr.Accumulate(2),
        "loss_scale": jr.DynamicLossScale(2.0**10, growth_interval=1),
        "max_norm": 0.5,
        "ema_decay": 0.5,
    },
    "all else": {
        "ema_decay": 0.75,
        "ema_debias": True,
        "nesterov": True,
        "momentum": 0.5,
        "metrics": NORMS,
        "groups": [jr.Group("b", scale=0.5)],
        "max_norm": 0.5,
    },
    "lars": {"optimizer": LARS, "weight_decay": 0.1, "max_norm": 2.0},
    "lars as optax": {"optimizer": LARS, "weight_decay": 0.1, "eps": 0.1, "optax_form": True},
    "lamb": {"optimizer": LAMB, "weight_decay": 0.1, "max_norm": 2.0, "metrics": "update_norm"},
}


def grads_of(state, x):
    """Of a loss that curves, with a leaf that it does not depend on."""

    def loss(p):
        value = jnp.sum(jnp.cosh(p["w"] * x)) + jnp.sum(jnp.square(p["b"] - x)) * jnp.sum(p["w"])
        return state.scale_loss(value)

    return jax.grad(loss)(state.compute_params)


def summary(state):
    """A number that depends on all that a state has of use."""
    values = state.metrics
    norms = [v for name, v in values.items() if name.endswith(("_norm", "clip_factor"))]
    trees = [state.params] + ([state.ema_params] if state.ema else [])
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves([trees, norms]))


def params64():
    return {"w": jnp.asarray([0.5, -0.25]), "b": jnp.asarray([1.0, 2.0, 3.0]), "still": jnp.ones(2)}


@pytest.mark.parametrize("name", OPTIONS)
def test_of_several_steps(name):
    def run(learning_rate, x):
        state = make(params64(), learning_rate=learning_rate, **OPTIONS[name])
        body = lambda state, _: (state.apply_gradients(grads_of(state, x)), None)  # noqa: E731
        return summary(jax.lax.scan(body, state, length=4)[0])

    with jax.enable_x64(True):
        at = 0.0625, 1.25
        wanted = differences(run, *at)
        assert min(map(abs, wanted)) > 1e-3
        modes = (jax.jacfwd, jax.jacrev) if name == "all else" else (jax.jacrev,)
        assert_derivatives(run, *at, wanted=wanted, modes=modes)


def test_of_two_clipped_steps_by_the_learning_rate():
    # Both steps have length η: w = 5 - η, then 5 - 2η, in the direction of w.
    def run(learning_rate):
        state = make({"w": jnp.asarray([3.0, 4.0])}, learning_rate=learning_rate, max_norm=1.0)
        for _ in range(2):
            state = state.apply_gradients(state.compute_params)
        return state.params["w"]

    assert_derivatives(run, 0.5, wanted=[[-1.2, -1.6]])


def test_through_sums_of_micro_batches():
    def run(learning_rate, x):
        state = make(params64(), learning_rate=learning_rate, max_norm=0.5, metrics="update_norm")

        def body(sums, y):
            return state.accumulate(sums, grads_of(state, x * y)), None

        sums, _ = jax.lax.scan(body, state.zero_gradients(), jnp.asarray([0.5, 1.0, 1.5]))
        return summary(state.apply_gradients(sums))

    with jax.enable_x64(True):
        wanted = differences(run, 0.25, 1.25)
        assert_derivatives(run, 0.25, 1.25, wanted=wanted, modes=[jax.jacrev])


@pytest.mark.parametrize("optimizer", [jr.adam, LARS], ids=["adam", "lars"])
def test_a_skipped_call_adds_nothing(optimizer):
    def run(added, learning_rate, x):
        state = make(
            params64(),
            optimizer,
            learning_rate,
            max_norm=0.5,
            ema_decay=0.5,
            loss_scale=jr.DynamicLossScale(2.0**10),
            metrics=["update_norm", "leaves"],
        )

        def body(state, more):
            grads = grads_of(state, x)
            return state.apply_gradients(grads | {"w": grads["w"].at[0].add(more)}), None

        return summary(jax.lax.scan(body, state, jnp.asarray(added))[0])

    with jax.enable_x64(True):
        at = 0.0625, 1.25
        wanted = differences(lambda *at: run([0.0, 0.0], *at), *at)
        skipping = lambda *at: run([0.0, np.nan, 0.0], *at)  # noqa: E731
        assert_derivatives(skipping, *at, wanted=wanted, modes=[jax.jacrev])
