"""apply_gradients: that it is the optimizer's step, skips what is bad, and checks its argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Oracle
from states import assert_buffers_equal, batch, loss_fn, mlp, ones_like, train_step

import jaxrenaissance as jr


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


def test_steps_under_debug_nans(backend):
    with jax.debug_nans(True):
        state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(0.1, backend=backend))
        state = state.apply_gradients({"w": jnp.ones(2)})
    assert int(state.step) == 1


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

    assert float(jax.jit(jax.grad(after))(0.1)) == -4.0
