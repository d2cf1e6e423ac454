"""TrainState: what it gives back, under which transformations it works, and what it refuses."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from oracle import Oracle

import jaxrenaissance as jr
from jaxrenaissance import scalars


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


# What is in it.


def test_params_come_back_and_moments_start_at_zero(backend):
    params = mlp()
    state = jr.TrainState.create(params, jr.adamw(1e-3, mask="weights", backend=backend))
    assert_trees_equal(state.params, params)
    assert_trees_equal(state.compute_params, params)
    assert_trees_equal(state.trainable_params, params)
    assert [len(m) for m in state.moments] == [2]
    assert all((m == 0).all() for m in jax.tree.leaves(state.moments))
    # weights, two moments, floats and ints, whatever the number of leaves.
    assert len(jax.tree.leaves(state)) == 5
    assert len(jax.tree.leaves(jr.TrainState.create(params, jr.sgd(0.1, backend=backend)))) == 3
    assert [int(n) for n in (state.step, state.calls, state.skipped)] == [0, 0, 0]
    assert state.spec.kind == "adamw"
    assert state.plan.num_parameters == 36


class Block(NamedTuple):
    kernel: object
    bias: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Head:
    w: object
    b: object


def test_trees_of_every_container(backend):
    tied = jnp.ones((2, 2))
    params = {
        "blocks": [Block(jnp.ones((2, 2)), jnp.ones(2)), Block(jnp.full((2, 2), 2.0), None)],
        "head": Head(tied, jnp.asarray(3.0)),
        "tail": (tied, {"bias": jnp.ones(())}),
    }
    state = jr.TrainState.create(params, jr.sgd(1.0, backend=backend))
    assert_trees_equal(state.params, params)
    paths = [leaf.path for leaf in state.plan.leaves]
    assert paths[:3] == ["blocks/0/kernel", "blocks/0/bias", "blocks/1/kernel"]
    state = state.apply_gradients(params)
    assert_trees_equal(state.params, jax.tree.map(jnp.zeros_like, params))


def test_frozen_dict_and_nnx_state_trees(backend):
    flax = pytest.importorskip("flax")
    from flax import nnx

    frozen = flax.core.freeze({"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}})
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for params in (frozen, nnx.state(model, nnx.Param)):
        state = jr.TrainState.create(params, jr.sgd(1.0, backend=backend))
        assert_trees_equal(state.params, params)
        new = state.apply_gradients(ones_like(params)).params
        assert_trees_equal(new, jax.tree.map(lambda x: x - 1, params))
        regions = {leaf.path.split("/")[-1]: leaf.region for leaf in state.plan.leaves}
        assert len(set(regions.values())) == len(regions) or len(regions) == 1


@pytest.mark.parametrize("params", [{}, {"a": None}, jnp.ones(()), {"a": jnp.zeros((0, 3))}])
def test_trees_with_no_leaf_one_leaf_and_none_but_empty_ones(params, backend):
    state = jr.TrainState.create(params, jr.adamw(0.1, mask="weights", backend=backend))
    state = jax.jit(lambda s, g: s.apply_gradients(g))(state, ones_like(params))
    assert int(state.step) == 1
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    if isinstance(params, jax.Array):
        np.testing.assert_allclose(state.params, 0.9, rtol=1e-6)


def test_repr_fits_one_screen_also_of_what_is_traced_or_donated():
    params = {f"layer{i}": {"kernel": jnp.ones((2, 2))} for i in range(300)}
    schedule = optax.cosine_decay_schedule(1e-3, 10)
    stats = jr.Packed({"mean": jnp.ones(3)}, backend="xla")
    state = jr.TrainState.create(
        params, jr.adamw(schedule, mask="weights", backend="xla"), extra=stats
    )
    seen = [repr(state), repr(jax.eval_shape(lambda: state))]
    jax.jit(lambda s: seen.append(repr(s)))(state)
    many = jax.vmap(lambda _: state)(jnp.arange(3))
    seen.append(repr(many))
    jax.jit(lambda s: s, donate_argnums=0)(state)
    seen.append(repr(state))
    for text in seen:
        assert len(text.splitlines()) < 12
        assert max(map(len, text.splitlines())) < 120
    assert "adamw, backend xla, step 0, skipped 0" in seen[0]
    assert "300 leaves, 1,200 parameters, computed in float32" in seen[0]
    assert "traced" in seen[1]
    assert "traced" in seen[2]
    assert "3 members" in seen[3]


# Compute dtypes.


@pytest.mark.parametrize(
    ("compute_dtype", "kernel", "norm", "bias"),
    [
        (None, "float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "float32", "bfloat16"),
        ("float16", "float16", "float32", "float16"),
        (jnp.bfloat16, "bfloat16", "bfloat16", "bfloat16"),
        (np.dtype("float16"), "float16", "float16", "float16"),
        ({"*/kernel": "bfloat16"}, "bfloat16", "float32", "float32"),
        ({jr.Region.W_BN_WEIGHT: jnp.float16, "*": "bfloat16"}, "bfloat16", "float16", "bfloat16"),
    ],
)
def test_compute_params_have_the_compute_dtype(compute_dtype, kernel, norm, bias, backend):
    params = mlp()
    optimizer = jr.adamw(1e-2, mask="weights", backend=backend)
    state = jr.TrainState.create(params, optimizer, compute_dtype=compute_dtype)
    compute = state.compute_params
    assert compute["in"]["kernel"].dtype == kernel
    assert compute["norm"]["scale"].dtype == norm
    assert compute["in"]["bias"].dtype == bias
    assert_trees_equal(compute, jax.tree.map(lambda x, y: x.astype(y.dtype), params, compute))
    assert_trees_equal(state.params, params)
    state, _ = jax.jit(train_step)(state, batch())
    assert int(state.step) == 1


@pytest.mark.parametrize(
    ("compute_dtype", "error", "message"),
    [
        ("int8", ValueError, "compute_dtype: got int8 for the leaf 'norm/bias'"),
        ("nonsense", TypeError, "compute_dtype: expected .* or a mapping .*, got 'nonsense'"),
        ({"*/nothing": "bfloat16"}, ValueError, "compute_dtype: the pattern .* matches no leaf"),
        ({jr.Region.M_FC_BIAS: "bfloat16"}, ValueError, "expected a region of series W"),
        (np.float64, ValueError, "compute_dtype: got float64 for the leaf"),
    ],
)
def test_bad_compute_dtypes_are_refused(compute_dtype, error, message):
    with pytest.raises(error, match=message):
        jr.TrainState.create(mlp(), jr.sgd(0.1, backend="xla"), compute_dtype=compute_dtype)


def test_low_precision_params_are_kept_in_full_precision_between_steps(backend):
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    state = jr.TrainState.create(params, jr.sgd(1e-4, backend=backend))
    for _ in range(50):
        state = state.apply_gradients(params)
    # Each step alone is lost in bfloat16, 1 - 1e-4 = 1.
    assert state.params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(state.params["w"].astype(float), 0.99609375)
    np.testing.assert_allclose(state.weights[0][:16], 0.995, rtol=1e-5)


# Not trained.


def lora():
    return {
        "base": {"kernel": jnp.arange(6, dtype=jnp.int8).reshape(2, 3), "key": jax.random.key(3)},
        "half": jnp.full(3, 0.1, jnp.bfloat16),
        "lora": {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 3))},
    }


@pytest.mark.parametrize(
    "trainable",
    [
        "lora/*",
        ["lora/a", "*/b"],
        lambda path, leaf: path.startswith("lora") and leaf.dtype == jnp.float32,
        {"base": False, "half": False, "lora": True},
    ],
)
def test_leaves_not_trained_keep_their_bits_and_have_no_state(trainable, backend):
    params = lora()
    state = jr.TrainState.create(params, jr.adam(0.1, backend=backend), trainable=trainable)
    assert state.plan.num_parameters == 5
    assert len(state.frozen) == 3
    assert_trees_equal(state.params["lora"], params["lora"])
    assert state.params["base"]["key"] == params["base"]["key"]

    def loss(trained):
        merged = state.merge(trained)
        w = merged["base"]["kernel"] + merged["lora"]["a"] @ merged["lora"]["b"]
        return jnp.sum(w * merged["half"].astype(jnp.float32))

    trained = state.trainable_params
    assert trained["base"] == {"kernel": None, "key": None}
    grads = jax.grad(loss)(trained)
    new = jax.jit(lambda s, g: s.apply_gradients(g), donate_argnums=0)(state, grads)
    # Donated, and still there: the state had copies.
    np.testing.assert_array_equal(params["base"]["kernel"], np.arange(6).reshape(2, 3))
    after = new.params
    np.testing.assert_array_equal(after["base"]["kernel"], params["base"]["kernel"])
    np.testing.assert_array_equal(after["half"], params["half"])
    assert after["base"]["kernel"].dtype == jnp.int8
    assert jax.random.key_data(after["base"]["key"]).tolist() == [0, 3]
    np.testing.assert_allclose(after["lora"]["a"], 0.9, rtol=1e-6)


def test_gradients_of_leaves_not_trained_are_ignored_whatever_they_are(backend):
    params = lora()
    state = jr.TrainState.create(params, jr.sgd(1.0, backend=backend), trainable="lora/*")
    nan = {"kernel": np.zeros((2, 3), jax.dtypes.float0), "key": "nothing"}
    grads = [
        {"base": nan, "half": jnp.full(3, jnp.nan), "lora": params["lora"]},
        {"base": {"kernel": (), "key": 0}, "half": {"sub": [1, 2]}, "lora": params["lora"]},
        {"base": {"kernel": None, "key": None}, "half": None, "lora": params["lora"]},
    ]
    for tree in grads:
        new = state.apply_gradients(tree)
        np.testing.assert_array_equal(new.params["lora"]["b"], 0.0)
    with pytest.raises(ValueError, match="'lora/b' is missing"):
        state.apply_gradients({**grads[2], "lora": {"a": params["lora"]["a"]}})
    with pytest.raises(ValueError, match="not trained must be there, with None or anything"):
        state.apply_gradients({"lora": params["lora"]})
    with pytest.raises(ValueError, match="grads: 'lora/b' is None, wanted an array"):
        state.apply_gradients({**grads[2], "lora": {"a": params["lora"]["a"], "b": None}})


def test_gradients_of_a_frozen_base_are_not_computed(backend):
    params = {"base": jnp.ones((64, 64)), "head": {"kernel": jnp.ones((64, 1))}}
    state = jr.TrainState.create(params, jr.sgd(0.1, backend=backend), trainable="head/*")

    def loss(p, x):
        return jnp.sum(x @ p["base"] @ p["head"]["kernel"])

    def step(state, x):
        return state.apply_gradients(jax.grad(loss)(state.compute_params, x))

    text = jax.jit(step).lower(state, jnp.ones((8, 64))).compile().as_text()
    assert "f32[64,64]" in text
    # x @ base and its use by the head's gradient; nothing of shape (64, 64) is made.
    made = [line for line in text.splitlines() if "= f32[64,64]" in line]
    moved = (" parameter(", " copy(", " get-tuple-element(")
    assert all(any(op in line for op in moved) for line in made), made


# How it updates.


@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_a_train_step_is_that_of_float64(skip_nonfinite, backend):
    params = mlp()
    optimizer = jr.adamw(
        1e-2, weight_decay=0.1, mask="weights", skip_nonfinite=skip_nonfinite, backend=backend
    )
    state = jr.TrainState.create(params, optimizer)
    decayed = [leaf.region in jr.WEIGHTS for leaf in state.plan.leaves]
    oracle = Oracle(
        "adamw", jax.tree.leaves(params), learning_rate=1e-2, weight_decay=0.1, decayed=decayed
    )
    step = jax.jit(train_step, donate_argnums=0)
    for i in range(20):
        grads = jax.grad(loss_fn)(state.compute_params, batch(i))
        state, _ = step(state, batch(i))
        oracle.step(jax.tree.leaves(grads))
    for a, b in zip(jax.tree.leaves(state.params), oracle.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert int(state.step) == 20


def test_apply_gradients_takes_its_argument_by_position_and_name(backend):
    state = jr.TrainState.create(mlp(), jr.adam(0.1, backend=backend))
    grads = ones_like(mlp())
    assert_buffers_equal(state.apply_gradients(grads), state.apply_gradients(grads=grads))
    with pytest.raises(TypeError):
        state.apply_gradients()


def test_mixed_gradient_dtypes_make_one_step_with_one_bias_correction(backend):
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2)), "c": jnp.ones(())}
    state = jr.TrainState.create(params, jr.adam(0.1, b1=0.5, backend=backend))
    dtypes = {"a": jnp.bfloat16, "b": jnp.float32, "c": jnp.float16}
    oracle = Oracle("adam", jax.tree.leaves(params), learning_rate=0.1, b1=0.5)
    for value in (1.0, 0.25, -2.0):
        grads = {path: jnp.full(x.shape, value, dtypes[path]) for path, x in params.items()}
        state = state.apply_gradients(grads)
        oracle.step(jax.tree.leaves(grads))
    for a, b in zip(jax.tree.leaves(state.params), oracle.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)
    assert int(state.step) == 3


@pytest.mark.parametrize(
    ("dtype", "value", "bad"),
    [
        (jnp.bfloat16, jnp.nan, True),
        (jnp.float32, -jnp.inf, True),
        (jnp.float16, jnp.inf, True),
        (jnp.float32, 1e-40, False),
        (jnp.bfloat16, 1e-40, False),
        (jnp.float32, 3e38, False),
    ],
)
def test_one_nonfinite_element_in_the_last_tail_skips_the_step(dtype, value, bad, backend):
    params = {"a": jnp.ones((40, 100)), "z": jnp.ones(33)}
    optimizer = jr.adamw(0.1, weight_decay=0.1, mask=True, backend=backend)
    state = jr.TrainState.create(params, optimizer).apply_gradients(params)
    grads = {"a": jnp.ones((40, 100)), "z": jnp.ones(33, dtype).at[32].set(value)}
    new = jax.jit(lambda s, g: s.apply_gradients(g))(state, grads)
    assert bool(new.metrics["has_nan"]) == bad
    assert [int(n) for n in (new.step, new.calls)] == [1 if bad else 2, 2]
    assert [int(n) for n in (new.skipped, new.consecutive_skips)] == [int(bad), int(bad)]
    if bad:
        assert_buffers_equal((new.weights, new.moments), (state.weights, state.moments))
    else:
        assert not (new.params["a"] == state.params["a"]).any()


def test_a_skipped_first_step_leaves_t_at_one_for_the_next(backend):
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    state = jr.TrainState.create(params, jr.adam(0.1, backend=backend))
    state = state.apply_gradients({**params, "a": jnp.asarray([1, jnp.nan, 1])})
    assert bool(state.metrics["has_nan"])
    state = state.apply_gradients(params)
    assert not bool(state.metrics["has_nan"])
    assert int(state.consecutive_skips) == 0
    # The first update of Adam is lr, whatever the gradient.
    jax.tree.map(lambda x: np.testing.assert_allclose(x, 0.9, rtol=1e-6), state.params)


def test_without_skip_nonfinite_a_nan_reaches_the_weights_that_it_belongs_to(backend):
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    state = jr.TrainState.create(params, jr.sgd(0.5, skip_nonfinite=False, backend=backend))
    state = state.apply_gradients({**params, "a": jnp.asarray([1, jnp.nan, 1])})
    np.testing.assert_array_equal(state.params["a"], [0.5, np.nan, 0.5])
    np.testing.assert_array_equal(state.params["b"], 0.5)
    assert int(state.step) == 1
    assert int(state.skipped) == 0


def test_a_nan_among_the_weights_is_not_hidden(backend):
    params = {"a": jnp.asarray([1.0, jnp.nan, 1.0])}
    state = jr.TrainState.create(params, jr.adam(0.1, backend=backend))
    state = state.apply_gradients({"a": jnp.ones(3)})
    np.testing.assert_array_equal(np.isnan(state.params["a"]), [False, True, False])


def test_check_names_the_call_and_the_first_bad_leaf(backend):
    params = {"z": {"kernel": jnp.ones((2, 2))}, "a": {"kernel": jnp.ones((2, 2))}}
    params["bias"] = jnp.ones(2)
    state = jr.TrainState.create(params, jr.sgd(0.1, backend=backend))
    state = state.apply_gradients(params)
    bad = {**params, "z": {"kernel": jnp.full((2, 2), jnp.nan)}}
    for _ in range(2):
        state = state.apply_gradients(bad)
    jr.check(state)
    jr.check(state, max_consecutive=2)
    with pytest.raises(FloatingPointError, match=r"last 2 calls.*In call 2 .*'z/kernel'"):
        jr.check(state, max_consecutive=1)
    state = state.apply_gradients(params)
    jr.check(state, max_consecutive=0)
    with pytest.raises(TypeError, match="check: the state is traced"):
        jax.jit(jr.check)(state)


def test_check_refuses_what_it_cannot_check():
    state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(0.1, skip_nonfinite=False))
    with pytest.raises(ValueError, match=r"check: .* skip_nonfinite=False, so no call looks for"):
        jr.check(state)
    with pytest.raises(TypeError, match="check: expected a TrainState, got a dict"):
        jr.check({"w": 1})


def test_check_looks_at_both_arenas_and_at_every_member(backend):
    with jax.enable_x64(True):
        params = {"a64": jnp.ones(3, jnp.float64), "b32": jnp.ones(2, jnp.float32)}
        state = jr.TrainState.create(params, jr.sgd(0.1, backend=backend))
        bad = {**params, "a64": params["a64"].at[2].set(jnp.nan)}
        with pytest.raises(FloatingPointError, match="'a64'"):
            jr.check(state.apply_gradients(bad), max_consecutive=0)
        bad = {**bad, "b32": params["b32"].at[0].set(jnp.inf)}
        with pytest.raises(FloatingPointError, match="'b32'"):
            jr.check(state.apply_gradients(bad), max_consecutive=0)

    def member(g):
        state = jr.TrainState.create({"a": jnp.ones(2)}, jr.sgd(0.1, backend=backend))
        return state.apply_gradients({"a": g})

    states = jax.vmap(member)(jnp.asarray([[1, 1], [jnp.nan, 1], [1, 1]]))
    with pytest.raises(FloatingPointError, match=r"member 1: the last 1 calls.*'a'"):
        jr.check(states, max_consecutive=0)


# Schedules and hyperparameters.


def test_schedules_see_the_updates_made_before_and_are_not_advanced_by_a_skip(backend):
    optimizer = jr.adamw(
        lambda count: 0.5**count,
        weight_decay=optax.linear_schedule(0.1, 0.0, 10),
        mask="weights",
        backend=backend,
    )
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    state = jr.TrainState.create(params, optimizer)
    oracle = Oracle(
        "adamw",
        jax.tree.leaves(params),
        decayed=[False, True],
        learning_rate=lambda count: 0.5**count,
        weight_decay=lambda count: 0.1 - 0.01 * count,
    )
    step = jax.jit(lambda s, g: s.apply_gradients(g), donate_argnums=0)
    seen = []
    for value in (1.0, jnp.nan, 2.0, -3.0):
        grads = jax.tree.map(lambda x, value=value: x * value, params)
        state = step(state, grads)
        seen.append([float(state.metrics[k]) for k in ("learning_rate", "weight_decay")])
        oracle.step(jax.tree.leaves(grads))
    np.testing.assert_allclose(seen, [[1, 0.1], [0.5, 0.09], [0.5, 0.09], [0.25, 0.08]], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(state.params), oracle.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-6)
    assert step._cache_size() == 1


def test_a_schedule_that_returns_no_scalar_is_refused():
    state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(lambda _: jnp.ones(2), backend="xla"))
    with pytest.raises(ValueError, match=r"learning_rate: the schedule returned shape \(2,\)"):
        state.apply_gradients({"w": jnp.ones(2)})


def test_metrics_are_the_values_as_used_and_outlive_a_donated_state(backend):
    optimizer = jr.adamw(
        0.1, b1=0.8, b2=0.99999, eps=1e-6, weight_decay=0.2, mask="weights", backend=backend
    )
    state = jr.TrainState.create({"w": jnp.ones((2, 2))}, optimizer)
    step = jax.jit(lambda s: s.apply_gradients(s.compute_params), donate_argnums=0)
    state = step(state)
    metrics = state.metrics
    weights = state.params
    step(state)
    wanted = {
        "learning_rate": 0.1,
        "b1": 0.8,
        "b2": 0.99999,
        "eps": 1e-6,
        "eps_root": 0.0,
        "weight_decay": 0.2,
        "step": 1,
        "calls": 1,
        "skipped": 0,
        "consecutive_skips": 0,
        "has_nan": False,
    }
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        assert metrics[name].shape == ()
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6)
    np.testing.assert_allclose(weights["w"], 1 - 0.1 * (1 + 0.2), rtol=1e-6)


def test_replace_hyperparams_changes_the_numbers_and_compiles_nothing(backend):
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    state = jr.TrainState.create(
        params, jr.sgd(0.5, momentum=0.9, weight_decay=0.1, mask="weights", backend=backend)
    )
    step = jax.jit(lambda s: s.apply_gradients(jax.tree.map(jnp.zeros_like, params)))
    step(state)
    new = state.replace_hyperparams(learning_rate=1.0, weight_decay=0.25, momentum=jnp.float32(0))
    new = step(new)
    assert step._cache_size() == 1
    np.testing.assert_array_equal(new.params["kernel"], 0.75)
    np.testing.assert_array_equal(new.params["bias"], 1.0)
    assert float(state.metrics["momentum"]) == np.float32(0.9)
    assert float(new.metrics["momentum"]) == 0.0


def test_replace_hyperparams_says_where_schedules_go():
    state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(0.1))
    with pytest.raises(TypeError, match="learning_rate: replace_hyperparams takes numbers"):
        state.replace_hyperparams(learning_rate=optax.constant_schedule(1.0))


def test_replace_hyperparams_refuses_what_it_cannot_set():
    params = {"w": jnp.ones(2)}
    schedule = optax.constant_schedule(0.1)
    state = jr.TrainState.create(params, jr.adamw(schedule, mask="weights", backend="xla"))
    with pytest.raises(ValueError, match="learning_rate: it follows a schedule"):
        state.replace_hyperparams(learning_rate=0.1)
    with pytest.raises(ValueError, match=r"momentum: adamw has no such hyperparameter.*b1"):
        state.replace_hyperparams(momentum=0.1)
    with pytest.raises(ValueError, match="b1: expected a number in"):
        state.replace_hyperparams(b1=1.0)
    with pytest.raises(TypeError, match="eps: expected a number"):
        state.replace_hyperparams(eps="small")
    assert float(state.replace_hyperparams(b2=0.5).metrics["b2"]) == 0.5


def test_numbers_may_be_device_scalars_and_traced_values(backend):
    params = {"w": jnp.ones((1, 1))}

    def run(lr, momentum):
        state = jr.TrainState.create(params, jr.sgd(lr, momentum, backend=backend))
        return state.apply_gradients(params).apply_gradients(params).params["w"][0, 0]

    wanted = run(0.25, 0.5)
    assert wanted == 1 - 0.25 - 0.25 * 1.5
    device = jnp.float32(0.25)
    state = jr.TrainState.create(params, jr.sgd(device, backend=backend))
    jax.jit(lambda s: s.apply_gradients(params), donate_argnums=0)(state)
    assert float(device) == 0.25
    assert run(device, jnp.float32(0.5)) == wanted
    assert jax.jit(run)(0.25, 0.5) == wanted
    assert run(np.float64(0.25), np.float32(0.5)) == wanted


# Replacing.


def test_replace_params_keeps_moments_and_counters(backend):
    params = mlp()
    state = jr.TrainState.create(params, jr.adam(0.1, backend=backend)).apply_gradients(params)
    new = state.replace(params=mlp(1))
    assert_trees_equal(new.params, mlp(1))
    assert_buffers_equal((new.moments, new.ints), (state.moments, state.ints))
    assert int(new.step) == 1
    with pytest.raises(ValueError, match=r"params: 'in/bias' has shape \(6,\), wanted \(5,\)"):
        state.replace(params=mlp(1, width=6))
    with pytest.raises(TypeError):
        state.replace(weights=())


def test_replace_params_replaces_leaves_that_are_not_trained_or_keeps_them(backend):
    params = lora()
    state = jr.TrainState.create(params, jr.sgd(0.1, backend=backend), trainable="lora/*")
    new = state.replace(params={**params, "half": jnp.ones(3, jnp.bfloat16)})
    np.testing.assert_array_equal(new.params["half"], jnp.ones(3))
    kept = new.replace(params=new.trainable_params)
    np.testing.assert_array_equal(kept.params["half"], jnp.ones(3))
    with pytest.raises(ValueError, match=r"params: 'half' has shape \(2,\).*wanted \(3,\)"):
        state.replace(params={**params, "half": jnp.ones(2, jnp.bfloat16)})


def test_frozen_leaves_read_from_a_state_survive_its_donation(backend):
    params = {"base": jnp.full(3, 2.0), "head": jnp.ones(2)}
    state = jr.TrainState.create(params, jr.sgd(0.1, backend=backend), trainable="head")
    read = [state.params, state.compute_params, state.merge(state.trainable_params)]
    jax.jit(lambda s: s.apply_gradients(s.compute_params), donate_argnums=0)(state)
    for tree in read:
        np.testing.assert_array_equal(tree["base"], 2.0)


def test_a_state_of_several_members_says_so(backend):
    optimizer = jr.sgd(0.1, backend=backend)
    state = jax.vmap(lambda w: jr.TrainState.create({"w": w}, optimizer))(jnp.ones((3, 2)))
    for call in (
        lambda: state.apply_gradients({"w": jnp.ones(2)}),
        lambda: state.replace(params={"w": jnp.ones(2)}),
    ):
        with pytest.raises(ValueError, match=r"holds \(3,\) members, made by jax\.vmap"):
            call()


def test_a_subnormal_stays_in_our_own_arithmetic(backend):
    # XLA's CPU threads flush subnormals; a step of ours beside must not change what they do.
    params = {"s": jnp.float32(1e-20), "big": jnp.zeros(1 << 22)}
    state = jr.TrainState.create(params, jr.sgd(0.0, backend=backend))

    @jax.jit
    def after_unpack(state):
        p = state.compute_params
        return p["s"] * jnp.exp(p["s"] * 0 - 46.0)

    results = {float(after_unpack(state)) for _ in range(50)}
    assert len(results) == 1


def test_steps_under_debug_infs(backend):
    with jax.debug_infs(True):
        state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(0.1, backend=backend))
        state = state.apply_gradients({"w": jnp.ones(2)})
    assert int(state.step) == 1


def test_extra_keeps_shapes_and_dtypes():
    extra = {"n": jnp.zeros(3, jnp.bfloat16)}
    for skip_nonfinite in (True, False):
        optimizer = jr.sgd(0.1, skip_nonfinite=skip_nonfinite)
        state = jr.TrainState.create({"w": jnp.ones(2)}, optimizer, extra=extra)
        with pytest.raises(ValueError, match=r"extra: 'n' has shape .* dtype float32, wanted"):
            state.apply_gradients({"w": jnp.ones(2)}, extra={"n": jnp.zeros(3)})


@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_a_skipped_step_keeps_extra(backend, skip_nonfinite):
    optimizer = jr.sgd(0.1, skip_nonfinite=skip_nonfinite, backend=backend)
    stats = {"mean": jr.Packed({"m": jnp.zeros(3)}, backend=backend), "n": jnp.zeros(2)}
    state = jr.TrainState.create({"w": jnp.ones(2)}, optimizer, extra=stats)

    @jax.jit(donate_argnums=0)
    def step(state, grad):
        extra = {"mean": state.extra["mean"].replace({"m": grad[:1] + jnp.zeros(3)}), "n": grad}
        return state.apply_gradients({"w": grad}, extra=extra)

    state = step(state, jnp.array([2.0, 3.0]))
    state = step(state, jnp.array([5.0, jnp.nan]))
    assert bool(state.has_nan) == skip_nonfinite
    kept = (2.0, [2.0, 3.0]) if skip_nonfinite else (5.0, [5.0, np.nan])
    np.testing.assert_array_equal(state.extra["mean"].tree["m"], kept[0])
    np.testing.assert_array_equal(state.extra["n"], kept[1])
    if skip_nonfinite:
        with pytest.raises(ValueError, match=r"^extra: expected a tree like state\.extra"):
            state.apply_gradients({"w": jnp.ones(2)}, extra={"n": jnp.ones(2)})


def test_extra_carries_batch_statistics_through_the_step(backend):
    stats = {"mean": jnp.zeros(3), "var": jnp.ones(3)}
    state = jr.TrainState.create(
        mlp(), jr.sgd(0.1, backend=backend), extra=jr.Packed(stats, backend=backend)
    )

    @jax.jit(donate_argnums=0)
    def step(state, x):
        new = {"mean": x.mean(0), "var": state.extra.tree["var"] * 2}
        state = state.apply_gradients(jax.grad(loss_fn)(state.compute_params, x))
        return state.replace(extra=state.extra.replace(new))

    for _ in range(2):
        state = step(state, batch())
    assert step._cache_size() == 1
    np.testing.assert_array_equal(state.extra.tree["var"], 4.0)
    np.testing.assert_allclose(state.extra.tree["mean"], batch().mean(0), rtol=1e-5)
    assert jr.TrainState.create({}, jr.sgd(0.1), extra={"n": 3}).extra["n"] == 3


# Making.


def test_init_makes_the_same_state_as_create(backend):
    optimizer = jr.adamw(1e-3, mask="weights", backend=backend)

    def make():
        keys = jax.random.split(jax.random.key(0))
        kernel = jax.random.normal(keys[0], (3, 4))
        return {"kernel": kernel, "bias": jax.random.normal(keys[1], (4,))}

    created = jr.TrainState.create(make(), optimizer, compute_dtype="bfloat16")
    made = jr.TrainState.init(make, optimizer, compute_dtype="bfloat16")
    assert jax.tree.structure(created) == jax.tree.structure(made)
    assert_buffers_equal(created, made)
    with_extra = jr.TrainState.init(lambda: (make(), {"n": jnp.ones(2)}), optimizer, has_extra=True)
    np.testing.assert_array_equal(with_extra.extra["n"], 1.0)
    with pytest.raises(ValueError, match="has_extra: fn must return a pair"):
        jr.TrainState.init(make, optimizer, has_extra=True)


def test_init_has_no_second_copy_of_the_weights():
    optimizer = jr.adamw(1e-3, mask="weights", backend="xla")
    before = {id(x) for x in jax.live_arrays()}
    state = jr.TrainState.init(lambda: {"kernel": jnp.ones((100, 100))}, optimizer)
    made = [x for x in jax.live_arrays() if id(x) not in before and x.size >= 10_000]
    assert len(made) == 3
    assert len(jax.tree.leaves(state)) == 5


def test_eval_shape_of_create_takes_shapes():
    shapes = jax.eval_shape(mlp)
    optimizer = jr.adamw(1e-3, mask="weights", backend="xla")
    state = jax.eval_shape(lambda p: jr.TrainState.create(p, optimizer), shapes)
    assert state.weights[0].shape == (state.plan.arenas[0].size,)
    assert jax.tree.structure(state) == jax.tree.structure(jr.TrainState.create(mlp(), optimizer))


# Donation, compiling, transformations.


def test_without_donation_the_state_stays(backend):
    params = {"w": jnp.arange(32.0)}
    state = jr.TrainState.create(params, jr.adam(0.1, backend=backend), extra={"a": jnp.ones(3)})
    first = jax.tree.map(np.array, state)
    jax.jit(lambda s: s.apply_gradients(params))(state)
    assert_buffers_equal(state, first)


@pytest.mark.parametrize("disable_jit", [False, True])
def test_arrays_of_the_user_survive_donation(disable_jit, backend):
    # One leaf fills its arena exactly, so that the arena could be the leaf's own buffer.
    params = {"w": jnp.arange(32.0), "base": jnp.arange(8, dtype=jnp.int8)}
    extra = {"a": jnp.ones(3)}
    lr = jnp.float32(0.5)
    step = jax.jit(lambda s: s.apply_gradients(s.compute_params), donate_argnums=0)
    with jax.disable_jit(disable_jit):
        optimizer = jr.adam(lr, backend=backend)
        state = jr.TrainState.create(params, optimizer, extra=extra, trainable="w")
        read = {"params": state.params["w"], "compute": state.compute_params["w"]}
        read |= {"metric": state.metrics["learning_rate"]}
    read_values = jax.tree.map(np.array, read)
    new = step(state)
    assert state.weights[0].is_deleted()
    with jax.disable_jit(disable_jit):
        new = new.replace(params=params, extra=extra).replace_hyperparams(learning_rate=lr)
    step(new)
    assert_buffers_equal(read, read_values)
    np.testing.assert_array_equal(params["w"], np.arange(32.0))
    np.testing.assert_array_equal(params["base"], np.arange(8))
    np.testing.assert_array_equal(extra["a"], 1.0)
    assert float(lr) == 0.5


def test_buffers_of_a_donated_state_are_used_again(backend):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-3, mask="weights", backend=backend))
    step = jax.jit(train_step, donate_argnums=0)
    state, _ = step(state, batch())
    before = [x.unsafe_buffer_pointer() for x in (*state.weights, *state.moments[0])]
    state, _ = step(state, batch())
    after = [x.unsafe_buffer_pointer() for x in (*state.weights, *state.moments[0])]
    assert sorted(before) == sorted(after)


def test_a_donated_step_of_a_nonlinear_model_copies_no_arena(backend):
    if backend == "xla":
        pytest.skip("plain jax.numpy slices and joins arenas")
    params = {f"layer{i}": mlp(i, width=17) for i in range(3)}
    schedule = optax.cosine_decay_schedule(1e-3, 10)
    optimizer = jr.adamw(schedule, mask="weights", backend=backend)
    state = jr.TrainState.create(params, optimizer, compute_dtype="bfloat16")

    def step(state, x):
        def loss(params):
            return sum(loss_fn(layer, x) for layer in params.values())

        return state.apply_gradients(jax.grad(loss)(state.compute_params))

    compiled = jax.jit(step, donate_argnums=0).lower(state, batch()).compile().as_text()
    size = state.plan.arenas[0].size
    assert f"f32[{size}]" in compiled
    copies = [line for line in compiled.splitlines() if " copy(" in line and f"[{size}]" in line]
    assert copies == []


def test_the_second_call_and_an_equal_optimizer_compile_nothing(backend):
    compiled = []

    def listen(event, _, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def run(lr):
        schedule = optax.cosine_decay_schedule(0.1, 100)
        optimizer = jr.adamw(lr, weight_decay=schedule, mask="weights", backend=backend)
        state = jr.TrainState.create(params, optimizer)
        for _ in range(2):
            state, _ = step(state, x)
        return state

    params, x, step = mlp(), batch(), jax.jit(train_step, donate_argnums=0)
    jax.block_until_ready(run(0.1))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready([run(0.1), run(0.2)])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def reference_run(backend, steps=3):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-2, mask="weights", backend=backend))
    step = jax.jit(train_step)
    for i in range(steps):
        state, _ = step(state, batch(i))
    return state


# A loop that XLA compiles as one program may round otherwise on the xla backend.
def tolerance(backend):
    return {"rtol": 1e-5, "atol": 1e-6} if backend == "xla" else {"rtol": 2e-6, "atol": 1e-7}


def test_under_scan(backend):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-2, mask="weights", backend=backend))
    xs = jnp.stack([batch(i) for i in range(3)])
    state, losses = jax.jit(lambda s: jax.lax.scan(train_step, s, xs))(state)
    assert losses.shape == (3,)
    assert_buffers_equal(state, reference_run(backend), **tolerance(backend))


def test_under_cond(backend):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-2, mask="weights", backend=backend))

    @jax.jit
    def maybe(state, x, go):
        return jax.lax.cond(go, lambda s: train_step(s, x)[0], lambda s: s, state)

    for i in range(3):
        state = maybe(state, batch(i), True)
        state = maybe(state, batch(i), False)
    assert maybe._cache_size() == 1
    assert_buffers_equal(state, reference_run(backend), **tolerance(backend))


def test_under_checkpoint(backend):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-2, mask="weights", backend=backend))

    @jax.jit
    @jax.checkpoint
    def step(state, x):
        grads = jax.grad(jax.checkpoint(loss_fn))(state.compute_params, x)
        return state.apply_gradients(grads)

    for i in range(3):
        state = step(state, batch(i))
    assert_buffers_equal(state, reference_run(backend), **tolerance(backend))


def test_without_jit(backend):
    state = jr.TrainState.create(mlp(), jr.adamw(1e-2, mask="weights", backend=backend))
    for i in range(3):
        state, _ = train_step(state, batch(i))
    assert_buffers_equal(state, reference_run(backend), **tolerance(backend))


def test_with_jit_disabled(backend):
    with jax.disable_jit():
        state = jr.TrainState.create(mlp(), jr.adamw(1e-2, mask="weights", backend=backend))
        for i in range(3):
            state, _ = train_step(state, batch(i))
        assert state.params["in"]["kernel"].shape == (3, 5)
    assert_buffers_equal(state, reference_run(backend), **tolerance(backend))


def test_under_strict_promotion(backend):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
    with jax.numpy_dtype_promotion("strict"):
        optimizer = jr.adamw(schedule, weight_decay=0.1, mask="weights", backend=backend)
        state = jr.TrainState.create(mlp(), optimizer, extra={"n": jnp.ones(2)})
        state, _ = jax.jit(train_step)(state, batch())
        state = state.replace_hyperparams(b1=0.5, b2=jnp.float32(0.9))
        state = state.replace(params=mlp(1))
        assert set(state.metrics) >= {"learning_rate", "b1"}
        tx = jr.sgd(schedule, momentum=0.9, weight_decay=0.1, mask=True, backend=backend)
        tx.update(mlp(), tx.init(mlp()), mlp())


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_vmap_over_seeds_is_a_loop_and_a_nan_skips_its_member_alone(kind, backend):
    optimizer = (
        jr.sgd(0.1, 0.9, backend=backend)
        if kind == "sgd"
        else jr.adamw(1e-2, weight_decay=0.1, mask="weights", backend=backend)
    )
    trees = [mlp(seed) for seed in range(3)]
    grads = [[mlp(10 * i + seed) for seed in range(3)] for i in range(3)]
    grads[1][2]["norm"]["scale"] = grads[1][2]["norm"]["scale"].at[4].set(jnp.nan)

    def stack(items):
        return jax.tree.map(lambda *xs: jnp.stack(xs), *items)

    states = jax.vmap(lambda p: jr.TrainState.create(p, optimizer))(stack(trees))
    step = jax.jit(jax.vmap(lambda s, g: s.apply_gradients(g)), donate_argnums=0)
    one_step = jax.jit(lambda s, g: s.apply_gradients(g))
    single = [jr.TrainState.create(p, optimizer) for p in trees]
    for g in grads:
        states = step(states, stack(g))
        single = [one_step(s, own) for s, own in zip(single, g, strict=True)]
    assert step._cache_size() == 1
    exact = {} if backend != "xla" else {"rtol": 1e-6, "atol": 1e-7}
    assert_buffers_equal(states, stack(single), **exact)
    np.testing.assert_array_equal(states.step, [3, 3, 2])
    np.testing.assert_array_equal(states.metrics["skipped"], [0, 0, 1])
    many = jax.vmap(lambda s: s.params)(states)
    np.testing.assert_allclose(many["in"]["bias"][1], single[1].params["in"]["bias"], rtol=1e-6)
    with pytest.raises(ValueError, match=r"several members.*jax\.vmap"):
        _ = states.params


def test_vmap_over_numbers_nested_is_a_loop(backend):
    params = mlp()

    def run(lr, weight_decay):
        optimizer = jr.adamw(lr, weight_decay=weight_decay, mask="weights", backend=backend)
        state = jr.TrainState.create(params, optimizer)
        for i in range(2):
            state, _ = train_step(state, batch(i))
        return state

    rates, decays = jnp.asarray([1e-3, 1e-2]), jnp.asarray([0.0, 0.1, 0.5])
    nested = jax.vmap(jax.vmap(run, (None, 0)), (0, None))
    states = jax.jit(nested)(rates, decays)
    assert states.weights[0].shape == (2, 3, states.plan.arenas[0].size)
    for i in range(2):
        for j in range(3):
            member = jax.tree.map(lambda x, i=i, j=j: x[i, j], states)
            alone = jax.jit(run)(float(rates[i]), float(decays[j]))
            # Adam's first steps turn the last digits of a small gradient into a change of 1e-6.
            assert_buffers_equal(member.params, alone.params, rtol=1e-5, atol=2e-5)
    # What jit gave back trains on, and so does what vmap alone gives.
    step = jax.vmap(jax.vmap(train_step, (0, None)), (0, None))
    again, _ = jax.jit(step)(states, batch())
    assert (again.step == 3).all()
    created = jax.vmap(lambda lr: jr.TrainState.create(params, jr.adamw(lr, mask="weights")))(rates)
    np.testing.assert_allclose(created.metrics["learning_rate"], rates)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_a_replicated_state_is_the_step_over_the_whole_batch(check_vma, backend):
    devices = jax.devices("cpu") if backend == "cpu" else jax.devices()
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4 * mesh.size, 3)), jnp.float32)
    optimizer = jr.adamw(1e-2, weight_decay=0.1, mask="weights", backend=backend)
    state = jr.TrainState.create(mlp(), optimizer)

    def local_step(state, x):
        params = state.compute_params
        if check_vma:
            params = jax.lax.pcast(params, "data", to="varying")
        grads = jax.lax.pmean(jax.grad(loss_fn)(params, x), "data")
        return state.apply_gradients(grads)

    replicated, sharded = PartitionSpec(), PartitionSpec("data")
    step = jax.jit(
        jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(replicated, sharded),
            out_specs=replicated,
            check_vma=check_vma,
        )
    )
    wanted = state
    for _ in range(2):
        state, (wanted, _) = step(state, x), jax.jit(train_step)(wanted, x)
    assert_buffers_equal(state.params, wanted.params, rtol=1e-5, atol=1e-6)


def test_states_made_inside_shard_map_train_on_in_a_scan(backend):
    # PureJaxRL's shape on several devices: seeds over devices, each a whole training run.
    devices = jax.devices("cpu") if backend == "cpu" else jax.devices()
    mesh = jax.make_mesh((len(devices),), ("seeds",), (AxisType.Auto,), devices=devices)
    optimizer = jr.adamw(1e-2, mask="weights", backend=backend)

    def train(scale):
        params = jax.tree.map(lambda x: x * scale, mlp())
        state = jr.TrainState.create(params, optimizer)
        xs = jnp.stack([batch(i) for i in range(3)])
        return jax.lax.scan(train_step, state, xs)[0].params

    spec = PartitionSpec("seeds")
    scales = jnp.linspace(0.5, 1.0, 2 * mesh.size)
    many = jax.jit(jax.shard_map(jax.vmap(train), mesh=mesh, in_specs=spec, out_specs=spec))(scales)
    wanted = jax.jit(train)(scales[-1])
    assert_buffers_equal(jax.tree.map(lambda x: x[-1], many), wanted, rtol=1e-5, atol=1e-6)


LEAF = st.tuples(
    st.lists(st.sampled_from([0, 1, 2, 3, 7, 31, 32, 33]), max_size=3).map(tuple),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
TREE = st.recursive(
    LEAF | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kernel", "bias", "scale", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    tree=TREE,
    kind=st.sampled_from(["sgd", "nesterov", "adam", "adamw"]),
    bad=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_random_trees_step_as_in_float64(tree, kind, bad, seed):
    rng = np.random.default_rng(seed)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, tuple))
    params = treedef.unflatten([jnp.asarray(rng.normal(size=x[0]), x[1]) for x in leaves])
    optimizer = {
        "sgd": jr.sgd(0.1, weight_decay=0.1, mask="weights"),
        "nesterov": jr.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1, mask="weights"),
        "adam": jr.adam(0.1, eps=1e-4, weight_decay=0.1, mask="weights"),
        "adamw": jr.adamw(0.1, eps=1e-4, weight_decay=0.1, mask="weights"),
    }[kind]
    state = jr.TrainState.create(params, optimizer)
    numbers = {"learning_rate": 0.1, "eps": 1e-4, "weight_decay": 0.1}
    decayed = [leaf.region in jr.WEIGHTS for leaf in state.plan.leaves]
    oracle = Oracle(kind, jax.tree.leaves(params), decayed=decayed, **numbers)
    for i in range(2):
        grads = [jnp.asarray(rng.normal(size=x[0]), x[2]) for x in leaves]
        filled = [k for k, g in enumerate(grads) if g.size]
        if bad and i == 0 and filled:
            grads[filled[-1]] = grads[filled[-1]].at[(-1,) * grads[filled[-1]].ndim].set(jnp.nan)
        state = state.apply_gradients(treedef.unflatten(grads))
        oracle.step(grads)
    assert int(state.step) == oracle.count
    flat = [np.asarray(w) for w in state.weights]
    for leaf, wanted in zip(state.plan.leaves, oracle.weights, strict=True):
        got = flat[leaf.arena][leaf.offset : leaf.offset + leaf.size].reshape(leaf.shape)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_float64_leaves_stay_float64_in_states_and_arithmetic(backend):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {
            "a": jnp.asarray(rng.normal(size=(5, 7))),
            "b": jnp.asarray(rng.normal(size=7), jnp.float32),
            "c": jnp.asarray(rng.normal(size=3)),
        }
        optimizer = jr.adamw(1e-2, b2=0.99999, weight_decay=0.1, mask=True, backend=backend)
        state = jr.TrainState.create(params, optimizer)
        assert [w.dtype for w in state.weights] == [jnp.float32, jnp.float64]
        assert state.floats.dtype == jnp.float64
        numbers = {"learning_rate": 1e-2, "b2": 0.99999, "weight_decay": 0.1}
        oracle = Oracle("adamw", jax.tree.leaves(params), **numbers)
        step = jax.jit(lambda s, g: s.apply_gradients(g), donate_argnums=0)
        for _ in range(5):
            grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
            state = step(state, grads)
            oracle.step(jax.tree.leaves(grads))
        new = state.params
        assert new["a"].dtype == jnp.float64
        for path, wanted in zip(params, oracle.weights, strict=True):
            rtol = 1e-5 if path == "b" else 1e-12
            np.testing.assert_allclose(new[path], wanted, rtol=rtol, atol=rtol / 10)
        assert step._cache_size() == 1


def test_float32_models_under_x64_stay_float32(backend):
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float32), mlp())
        schedule = optax.cosine_decay_schedule(1e-2, 10)
        state = jr.TrainState.create(params, jr.adamw(schedule, mask="weights", backend=backend))
        state, _ = jax.jit(train_step)(state, batch())
        assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}
        assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}


# Bad input.


def test_leaves_an_arena_cannot_hold_are_refused_by_path():
    for leaf, dtype in [
        (jnp.ones(2, jnp.int32), "int32"),
        (jnp.ones(2, bool), "bool"),
        (jnp.ones(2, jnp.complex64), "complex64"),
        (jax.random.key(0), "key"),
    ]:
        with pytest.raises(ValueError, match=f"'m/n' has dtype {dtype}.*trainable="):
            jr.TrainState.create({"m": {"n": leaf, "w": jnp.ones(2)}}, jr.sgd(0.1))
    params = {"w": jnp.ones(2), "activation": jax.nn.relu}
    with pytest.raises(ValueError, match="'activation'"):
        jr.TrainState.create(params, jr.sgd(0.1))
    with pytest.raises(ValueError, match=r"params: the leaf 'activation' is a .*partition"):
        jr.TrainState.create(params, jr.sgd(0.1), trainable="w")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.pop("norm"), "'norm/bias' is missing; 'norm/scale' is missing"),
        (lambda g: g.update(more=jnp.ones(2)), "'more' is not a leaf of the parameters"),
        (lambda g: g["in"].update(bias=jnp.ones(4)), r"'in/bias' has shape \(4,\), wanted \(5,\)"),
        (lambda g: g["in"].update(bias=jnp.ones(5, int)), "'in/bias' has dtype int32, wanted floa"),
        (lambda g: g["in"].update(bias=None), "'in/bias' is missing"),
        (lambda g: g["in"].update(bias=0.0), "'in/bias' is 0.0, wanted an array"),
        (lambda g: g.update(norm=(1, 2)), "'norm/bias' is missing"),
    ],
)
def test_gradients_that_do_not_match_are_named_by_path(change, message):
    state = jr.TrainState.create(mlp(), jr.sgd(0.1, backend="xla"))
    grads = mlp()
    change(grads)
    with pytest.raises(ValueError, match=f"grads: .*{message}"):
        jax.jit(lambda s: s.apply_gradients(grads))(state)


def test_many_faults_are_abbreviated():
    params = {f"w{i}": jnp.ones(2) for i in range(20)}
    state = jr.TrainState.create(params, jr.sgd(0.1, backend="xla"))
    with pytest.raises(ValueError, match="and 15 more") as caught:
        state.apply_gradients(jax.tree.map(lambda x: x[:1], params))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("transformation", "advice"),
    [
        (optax.adamw(1e-3), ["jr.adam or jr.adamw", "weight_decay="]),
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
            [
                "optax.clip_by_global_norm: the same transformation on the gradients, before",
                "jr.sgd",
            ],
        ),
        (optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-3)), ["weight_decay="]),
        (optax.adam(optax.cosine_decay_schedule(1e-3, 10)), ["learning_rate=, which takes"]),
        (optax.apply_if_finite(optax.sgd(0.1), 5), ["skip_nonfinite=True"]),
        (optax.masked(optax.sgd(0.1), {"w": True}), ["trainable="]),
        (optax.inject_hyperparams(optax.sgd)(0.1), ["replace_hyperparams"]),
        (optax.lion(1e-3), ["optax.scale_by_lion: the same transformation"]),
        (
            optax.chain(optax.clip_by_global_norm(1.0), jr.adamw(1e-3, mask=True)),
            ["clip_by_global"],
        ),
    ],
)
def test_an_optax_chain_is_refused_with_what_to_use_instead(transformation, advice):
    with pytest.raises(TypeError, match="optimizer: TrainState updates in place") as caught:
        jr.TrainState.create({"w": jnp.ones(2)}, transformation)
    for text in advice:
        assert text in str(caught.value)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"optimizer: expected one made by jr.adamw"):
        jr.TrainState.create({"w": jnp.ones(2)}, "adamw")
    with pytest.raises(TypeError, match=r"optimizer: expected one made by jr.adamw"):
        jr.TrainState.init(lambda: {"w": jnp.ones(2)}, None)


def test_sharded_arrays_are_refused_with_advice_and_replicated_ones_train():
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    if mesh.size < 2:
        pytest.skip("JAX has one device here")
    optimizer = jr.sgd(0.5, backend="xla")
    params = {"w": jnp.ones((mesh.size, 2)), "b": jnp.ones(2)}
    sharded = {**params, "w": jax.device_put(params["w"], NamedSharding(mesh, PartitionSpec("x")))}
    with pytest.raises(ValueError, match=r"params: the leaf 'w' is sharded.*PartitionSpec\(\)"):
        jr.TrainState.create(sharded, optimizer)
    state = jr.TrainState.create(params, optimizer)
    with pytest.raises(ValueError, match="params: the leaf 'w' is sharded"):
        state.replace(params=sharded)
    replicated = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    state = jr.TrainState.create(replicated, optimizer).apply_gradients(replicated)
    np.testing.assert_array_equal(state.params["w"], 0.5)


def test_differentiating_for_the_state_is_an_error_that_says_what_to_do(backend):
    if backend == "xla":
        pytest.skip("the xla backend is differentiable on purpose")
    state = jr.TrainState.create(mlp(), jr.sgd(0.1, backend=backend))

    def loss(state):
        return loss_fn(state.compute_params, batch())

    with pytest.raises(TypeError, match=r"cannot be differentiated.*state\.compute_params"):
        jax.grad(loss, allow_int=True)(state)


def test_the_xla_backend_is_differentiable_through_an_update():
    params = {"w": jnp.ones((2, 2))}

    def after(lr):
        state = jr.TrainState.create(params, jr.sgd(lr, backend="xla"))
        return state.apply_gradients(params).params["w"].sum()

    assert float(jax.grad(after)(0.1)) == -4.0


def test_last_bad_counters_start_out_empty():
    state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(0.1, backend="xla"))
    assert state.ints[scalars.LAST_BAD_LEAF] == -1
    assert state.ints[scalars.FIRST_BAD] == scalars.NO_LEAF
