"""The factories: values against float64 and optax, signatures, options and bad numbers."""

import dataclasses
import inspect
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import Oracle
from states import random_like

import jaxrenaissance as jr
from jaxrenaissance import scalars, transform

# Name → (factory, kind of the oracle, its numbers, whether the decay is decoupled).
OPTIMIZERS = {
    "sgd": (jr.sgd, "sgd", {}, True),
    "momentum": (jr.sgd, "momentum", {"momentum": 0.9}, True),
    "nesterov": (jr.sgd, "nesterov", {"momentum": 0.9}, True),
    "sgd_l2": (jr.sgd, "sgd", {}, False),
    "momentum_l2": (jr.sgd, "momentum", {"momentum": 0.8}, False),
    "nesterov_l2": (jr.sgd, "nesterov", {"momentum": 0.8}, False),
    "adam": (jr.adam, "adam", {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "eps_root": 1e-8}, False),
    "adamw": (jr.adamw, "adamw", {"b1": 0.85, "b2": 0.99, "eps": 1e-7}, True),
}


def make(name, learning_rate=1e-2, **options):
    factory, kind, numbers, decoupled = OPTIMIZERS[name]
    if factory is jr.sgd:
        options = {"decoupled": decoupled, "nesterov": kind == "nesterov", **options}
    return factory(learning_rate, **numbers, **options)


def make_oracle(name, leaves, learning_rate=1e-2, **options):
    _, kind, numbers, decoupled = OPTIMIZERS[name]
    numbers = {"learning_rate": learning_rate, **numbers, **options}
    return Oracle(kind, leaves, decoupled=decoupled, **numbers)


def tiny_tree(rng):
    """Leaves of 0 to 33 elements in three dtypes, empty ones first, between and last."""
    shapes = {
        "a_empty": ((0, 3), jnp.float32),
        "conv": {"kernel": ((3, 3, 2, 4), jnp.bfloat16), "bias": ((4,), jnp.float32)},
        "dense": {"kernel": ((5, 31), jnp.float32), "bias": ((31,), jnp.float16)},
        "empty": ((0,), jnp.bfloat16),
        "norm": {"scale": ((33,), jnp.float32), "bias": ((33,), jnp.float32)},
        "nothing": None,
        "scalar": ((), jnp.float32),
        "weights": [((1, 1), jnp.float32), ((3, 1), jnp.float32), ((8, 4), jnp.float32)],
        "z_empty": ((2, 0), jnp.float32),
    }
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x[0]), x[1]),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def weight_leaves(state):
    """The weights at full precision, leaf by leaf in the tree's order."""
    flat = [np.asarray(w, np.float64) for w in state.weights]
    return [
        flat[leaf.arena][leaf.offset : leaf.offset + leaf.size].reshape(leaf.shape)
        for leaf in state.plan.leaves
    ]


def assert_leaves_close(got, wanted, rtol=3e-6, atol=1e-6):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_match_float64_with_tiny_empty_and_mixed_leaves(name, backend):
    rng = np.random.default_rng(0)
    params = tiny_tree(rng)
    state = jr.TrainState.create(
        params, make(name, weight_decay=0.1, mask="weights", backend=backend)
    )
    decayed = [leaf.region in jr.WEIGHTS for leaf in state.plan.leaves]
    assert {True, False} <= set(decayed)
    oracle = make_oracle(name, jax.tree.leaves(params), weight_decay=0.1, decayed=decayed)
    step = jax.jit(lambda s, g: s.apply_gradients(g), donate_argnums=0)
    for _ in range(10):
        grads = random_like(params, rng)
        state = step(state, grads)
        oracle.step(jax.tree.leaves(grads))
        assert_leaves_close(weight_leaves(state), oracle.weights)
    assert step._cache_size() == 1
    dtypes = jax.tree.map(lambda x: x.dtype, state.params)
    assert dtypes == jax.tree.map(lambda x: x.dtype, params)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_empty_leaves_in_every_second_place_leave_none_out(name, backend):
    params = {f"w{i:02d}": jnp.full((0 if i % 2 else 3,), 1.0) for i in range(10)}
    state = jr.TrainState.create(params, make(name, 0.1, backend=backend))
    state = state.apply_gradients(jax.tree.map(jnp.ones_like, params))
    for path, leaf in state.params.items():
        assert leaf.shape == params[path].shape
        assert (np.asarray(leaf) < 1).all()


@pytest.mark.parametrize(
    ("mask", "decayed"),
    [
        (None, {"kernel"}),
        ("weights", {"kernel"}),
        (True, {"kernel", "bias", "scale"}),
        (False, set()),
        ({"kernel": False, "bias": True, "scale": False}, {"bias"}),
        (lambda params: jax.tree.map(lambda x: x.ndim == 1, params), {"bias", "scale"}),
    ],
)
def test_mask_decides_which_leaves_decay(mask, decayed):
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3), "scale": jnp.ones(3)}
    optimizer = jr.sgd(0.5, weight_decay=0.5, mask=mask, backend="xla")
    state = jr.TrainState.create(params, optimizer)
    state = state.apply_gradients(jax.tree.map(jnp.zeros_like, params))
    assert {path for path, x in state.params.items() if (x == 0.75).all()} == decayed
    assert {path for path, x in state.params.items() if (x == 1).all()} == params.keys() - decayed


def test_one_log_message_says_that_decay_leaves_biases_alone(caplog):
    transform._note_default_mask.cache_clear()
    with caplog.at_level(logging.DEBUG, "jaxrenaissance"):
        jr.adamw(1e-3, weight_decay=0.0)
        jr.adamw(1e-3, mask="weights")
        jr.adamw(1e-3, mask=True)
        jr.sgd(1e-3)
        assert not caplog.records
        jr.adamw(1e-3)
        jr.adamw(1e-3, weight_decay=optax.constant_schedule(0.1))
        jr.sgd(1e-3, weight_decay=0.1)
    assert len(caplog.records) == 1
    assert 'mask="weights"' in caplog.text


def test_one_log_message_says_that_trust_ratios_leave_biases_alone(caplog):
    transform._note_default_mask.cache_clear()
    masks = {"weight_decay_mask": "weights", "trust_ratio_mask": "weights"}
    with caplog.at_level(logging.DEBUG, "jaxrenaissance"):
        jr.lars(0.1, weight_decay=0.1, **masks)
        jr.lamb(0.1, weight_decay=0.1, mask=True, trust_ratio_mask=False)
        assert not caplog.records
        jr.lars(0.1)
        jr.lamb(0.1)
        assert len(caplog.records) == 1
        assert 'trust_ratio_mask="weights"' in caplog.text
        jr.lars(0.1, weight_decay=0.1)
    assert len(caplog.records) == 2
    assert 'weight_decay_mask="weights"' in caplog.text


def one_step(optimizer, w=1.0, g=1.0, step=0):
    """The state of a model of one element after a step, with `step` updates before it."""
    state = jr.TrainState.create({"w": jnp.full((1, 1), w)}, optimizer)
    state = dataclasses.replace(state, ints=state.ints.at[scalars.STEP].set(step))
    return state.apply_gradients({"w": jnp.full((1, 1), g)})


@pytest.mark.parametrize("b2", [0.999, 0.9999, 0.99999])
@pytest.mark.parametrize("t", [1, 1_000_000])
def test_bias_correction_at_the_first_and_the_millionth_step(b2, t, backend):
    # From v = 0, one step from t - 1: the update is lr m̂ / √v̂ in closed form.
    state = one_step(
        jr.adam(1.0, b1=0.0, b2=b2, eps=0.0, backend=backend), w=0.0, g=2.0, step=t - 1
    )
    v_hat = (1 - b2) * 4 / -np.expm1(t * np.log1p(b2 - 1))
    np.testing.assert_allclose(float(state.params["w"][0, 0]), -2 / np.sqrt(v_hat), rtol=1e-6)
    np.testing.assert_allclose(float(state.moments[0][1][0]), 4 * (1 - b2), rtol=2e-7)


def test_steps_past_two_to_the_24_are_counted(backend):
    state = one_step(jr.adam(1e-3, backend=backend), step=2**24)
    assert int(state.step) == 2**24 + 1


def test_step_is_counted_past_256_in_a_bfloat16_model(backend):
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    state = jr.TrainState.create(params, jr.adam(1e-3, backend=backend))
    step = jax.jit(lambda s: s.apply_gradients(s.compute_params), donate_argnums=0)
    for _ in range(300):
        state = step(state)
    assert int(state.step) == 300


def test_second_moment_does_not_stall(backend):
    state = jr.TrainState.create({"w": jnp.zeros(4)}, jr.adam(1e-3, backend=backend))

    @jax.jit
    def run(state):
        ones = {"w": jnp.ones(4)}
        return jax.lax.scan(lambda s, _: (s.apply_gradients(ones), None), state, length=3000)[0]

    v = np.asarray(run(state).moments[0][1][:4])
    np.testing.assert_allclose(v, 1 - 0.999**3000, rtol=2e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_learning_rate_and_zero_gradients_give_no_nan(name, backend):
    params = {"w": jnp.ones((3, 3))}
    state = jr.TrainState.create(params, make(name, 0.0, backend=backend))
    for _ in range(3):
        state = state.apply_gradients({"w": jnp.zeros((3, 3))})
    np.testing.assert_array_equal(state.params["w"], 1.0)


def test_adam_without_eps_leaves_elements_without_gradients_alone(backend):
    state = one_step(jr.adam(0.1, eps=0.0, backend=backend), w=1.0, g=0.0)
    assert float(state.params["w"][0, 0]) == 1.0


def test_hyperparameters_of_a_bfloat16_model_are_not_rounded(backend):
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    state = jr.TrainState.create(params, jr.adamw(3e-4, b2=0.99999, backend=backend))
    assert state.floats.dtype == jnp.float32
    row = np.asarray(state.floats)[scalars.HEADER :]
    assert row[scalars.ONE_MINUS_B2] == np.float32(1 - 0.99999)
    assert row[scalars.LEARNING_RATE] == np.float32(3e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["b1", "b2", "eps"])
def test_a_traced_sixteen_bit_number_is_an_error(name, dtype):
    def run(value):
        return jr.adamw(1e-3, **{name: value}).init({"w": jnp.ones(2)})

    with pytest.raises(ValueError, match=f"{name}: a {jnp.dtype(dtype).name} was rounded"):
        jax.jit(run)(jnp.asarray(0.5, dtype))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("learning_rate", 1e39),
        ("learning_rate", np.float32(-1)),
        ("b1", 1.0),
        ("b1", -0.1),
        ("b2", 1.5),
        ("eps", -1e-8),
        ("eps_root", float("-inf")),
        ("weight_decay", -0.1),
        ("momentum", 1.1),
        ("momentum", -0.5),
    ],
)
def test_numbers_out_of_range_name_the_argument(name, value):
    factory = jr.sgd if name == "momentum" else jr.adamw
    arguments = {"learning_rate": 1e-3} | {name: value}
    with pytest.raises(ValueError, match=f"^{name}: expected a number "):
        factory(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"learning_rate": "1e-3"}, TypeError, "learning_rate: expected a number or a schedule"),
        ({"learning_rate": True}, TypeError, "learning_rate: expected a number or a schedule"),
        ({"learning_rate": None}, TypeError, "learning_rate: expected a number or a schedule"),
        ({"b1": "0.9"}, TypeError, "b1: expected a number or a schedule"),
        ({"learning_rate": jnp.ones(3)}, ValueError, "learning_rate: expected a scalar.*vmap"),
        ({"learning_rate": jnp.asarray(1j)}, TypeError, "learning_rate: expected a real number"),
        ({"mask": "all"}, ValueError, 'mask: expected None, "weights"'),
        ({"nesterov": True}, ValueError, "nesterov: Adam with Nesterov momentum is not supported"),
        ({"mu_dtype": jnp.bfloat16}, ValueError, "mu_dtype: .*moments are kept in float32"),
        ({"backend": "gpu"}, ValueError, "backend: got 'gpu', wanted one of auto, cpu, cuda, xla"),
        ({"skip_nonfinite": 1}, TypeError, "skip_nonfinite: expected a bool"),
    ],
)
def test_bad_options_of_adamw_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        jr.adamw(**{"learning_rate": 1e-3, **arguments})


def test_bad_options_of_sgd_name_the_argument():
    with pytest.raises(ValueError, match="nesterov: needs a momentum"):
        jr.sgd(0.1, nesterov=True)
    with pytest.raises(TypeError, match="nesterov: expected a bool"):
        jr.sgd(0.1, momentum=0.9, nesterov="yes")
    with pytest.raises(ValueError, match=r"accumulator_dtype: .*moments are kept in float32"):
        jr.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float16)
    with pytest.raises(TypeError, match="decoupled: expected a bool"):
        jr.sgd(0.1, decoupled=None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"nesterov": 1}, TypeError, "nesterov: expected a bool, got 1"),
        ({"optax_form": None}, TypeError, "optax_form: expected a bool, got None"),
        ({"momentum": None}, TypeError, "momentum: expected a number or a schedule"),
        ({"momentum": 1.5}, ValueError, r"momentum: expected a number in \[0, 1\]"),
        ({"trust_coefficient": 0.0}, ValueError, "trust_coefficient: expected a number finite and"),
        ({"min_norm": -1.0}, ValueError, "min_norm: expected a number finite and ≥ 0"),
        ({"max_ratio": 0.0}, ValueError, "max_ratio: expected a number > 0"),
        ({"weight_decay_mask": "all"}, ValueError, 'weight_decay_mask: expected None, "weights"'),
        ({"trust_ratio_mask": "all"}, ValueError, 'trust_ratio_mask: expected None, "weights"'),
    ],
)
def test_bad_options_of_lars_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=f"^{message}"):
        jr.lars(**{"learning_rate": 0.1, **arguments})


def test_bad_options_of_lamb_and_lion_name_the_argument():
    with pytest.raises(ValueError, match=r"^max_ratio: expected a number > 0"):
        jr.lamb(0.1, max_ratio=-1.0)
    with pytest.raises(ValueError, match=r"^trust_ratio_mask: expected None"):
        jr.lamb(0.1, trust_ratio_mask="all")
    with pytest.raises(ValueError, match=r"^mask: expected None"):
        jr.lion(0.1, mask="all")
    with pytest.raises(ValueError, match=r"mu_dtype: .*moments are kept in float32"):
        jr.lion(0.1, mu_dtype=jnp.bfloat16)


@pytest.mark.parametrize("option", ["ema", "clip_norm", "scale_loss"])
def test_options_that_do_not_exist_are_refused(option):
    with pytest.raises(TypeError, match=option):
        jr.adamw(1e-3, **{option: 1.0})


def test_all_factories_have_the_same_options_after_their_own():
    factories = (jr.sgd, jr.adam, jr.adamw, jr.lars, jr.lamb, jr.lion)
    signatures = [inspect.signature(f).parameters for f in factories]
    shared = list(signatures[0])[list(signatures[0]).index("skip_nonfinite") :]
    assert shared[-1] == "metrics"
    for parameters in signatures:
        assert list(parameters)[-len(shared) :] == shared
        for name in shared:
            assert parameters[name].default == signatures[0][name].default
            assert parameters[name].annotation == signatures[0][name].annotation


def test_backend_comes_from_the_argument_then_the_environment_when_the_optimizer_is_made(
    monkeypatch,
):
    monkeypatch.delenv("JAXRENAISSANCE_BACKEND", raising=False)
    assert jr.adamw(1e-3).spec.backend == "auto"
    monkeypatch.setenv("JAXRENAISSANCE_BACKEND", "xla")
    optimizer = jr.adamw(1e-3)
    monkeypatch.setenv("JAXRENAISSANCE_BACKEND", "tpu")
    assert optimizer.spec.backend == "xla"
    assert jr.adamw(1e-3, backend="cpu").spec.backend == "cpu"
    with pytest.raises(ValueError, match="JAXRENAISSANCE_BACKEND: got 'tpu'"):
        jr.adamw(1e-3)
