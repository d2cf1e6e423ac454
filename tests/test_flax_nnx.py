"""NNXState: the fast form of an NNX model, against nnx.Optimizer with optax on a copy of it."""

import gc
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from states import count_compilations

import jaxrenaissance as jr
import jaxrenaissance.flax

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)


class Special(nnx.Param):
    """A subclass of Variable."""


class Model(nnx.Module):
    """What a real model has: statistics, random streams, counts, a list and a tied layer."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.tied = self.layers[0]
        self.scale = Special(jnp.ones(4), note="kept")
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        x = self.dropout(self.norm(self.first(x)))
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return self.tied(x) * self.scale[...]


class Plain(nnx.Module):
    """A model with parameters alone."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


def train_step(state, x):
    model = state.model()
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    return state.apply_gradients(grads), loss


def flat(model):
    """Path → value of every variable."""
    values = {path: x.get_value() for path, x in nnx.to_flat_state(nnx.state(model))}
    is_key = {p: jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for p, x in values.items()}
    return {p: jax.random.key_data(x) if is_key[p] else x for p, x in values.items()}


def assert_models_close(got, wanted, **tolerance):
    got, wanted = flat(got), flat(wanted)
    assert got.keys() == wanted.keys()
    for path, value in wanted.items():
        assert got[path].dtype == value.dtype
        np.testing.assert_allclose(got[path], value, err_msg=str(path), **tolerance)


@pytest.fixture(scope="module")
def model():
    return Model(nnx.Rngs(0))


def test_trains_as_nnx_with_optax(model, backend):
    optimizer = jr.adamw(0.1, weight_decay=0.1, mask=True, backend=backend)
    state = jr.flax.NNXState.create(model, optimizer, wrt=nnx.Param)
    reference = nnx.clone(model)
    theirs = nnx.Optimizer(reference, optax.adamw(0.1, weight_decay=0.1), wrt=nnx.Param)

    @nnx.jit
    def their_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss

    step = jax.jit(train_step, donate_argnums=0)
    for i in range(3):
        with count_compilations() as compiled:
            state, loss = step(state, X)
        assert i == 0 or not compiled
        np.testing.assert_allclose(loss, their_step(reference, theirs, X), rtol=1e-4)
    assert_models_close(state.model(), reference, rtol=1e-3, atol=1e-4)
    assert int(state.step) == int(state.model().calls[...]) == 3


def test_goes_on_from_a_loop_with_optax():
    model = Plain(nnx.Rngs(0))
    tx = optax.adamw(0.1, weight_decay=0.1)
    theirs = nnx.Optimizer(model, tx, wrt=nnx.Param)
    theirs.update(model, gradients(model, 0.5))
    optimizer = jr.adamw(0.1, weight_decay=0.1, mask=True)
    state = jr.flax.NNXState.create(model, optimizer, opt_state=theirs.opt_state)
    assert int(state.step) == 1
    new = state.apply_gradients(gradients(model, -2.0))
    theirs.update(model, gradients(model, -2.0))
    assert_models_close(new.model(), model, rtol=1e-5, atol=1e-6)


def test_is_a_few_buffers(model):
    state = jr.flax.NNXState.create(model, jr.adamw(0.1, mask=True))
    # Weights, two moments, two of scalars; statistics; key and count of the dropout, calls.
    assert len(jax.tree.leaves(state)) == 5 + 1 + 3


def test_many_layers_are_as_few_buffers():
    def buffers(layers):
        model = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(layers)])
        return len(jax.tree.leaves(jr.flax.NNXState.create(Holder(model), SGD)))

    assert buffers(1) == buffers(20) == 3


class Holder(nnx.Module):
    """Something in a module."""

    def __init__(self, held):
        self.held = held


SGD = jr.sgd(1.0)


def counting(model, value):
    """The model with another value of its statistics, as a forward pass leaves it."""
    model.norm.mean[...] = jnp.full(4, value)
    model.calls[...] += 1
    return model


def gradients(model, value=0.5):
    return jax.tree.map(lambda x: jnp.full_like(x, value), nnx.state(model, nnx.Param))


@pytest.fixture(scope="module")
def state(model):
    return jr.flax.NNXState.create(model, jr.sgd(0.5))


# Equal states that know nothing of modules which other tests took from the first.
@pytest.fixture
def fresh(state):
    return jax.tree.map(lambda x: x, state)


def test_a_module_is_like_the_one_that_was_given(fresh, model):
    made = fresh.model()
    assert_models_close(made, model)
    assert made.layers[0] is made.tied
    assert type(made.scale) is Special
    assert made.scale.get_metadata()["note"] == "kept"
    assert isinstance(made.norm.mean, nnx.BatchStat)


def test_what_the_model_was_made_of_is_not_touched(fresh, model):
    made = fresh.model()
    made.first.kernel[...] = jnp.zeros((3, 4))
    counting(made, 7.0)
    assert jnp.any(model.first.kernel[...] != 0)
    assert not jnp.any(model.norm.mean[...])
    assert not jnp.any(fresh.model().norm.mean[...])


def test_a_module_outlives_the_donation_of_its_state(model):
    state = jr.flax.NNXState.create(model, SGD)
    made = state.model()
    step = jax.jit(lambda s, g: s.apply_gradients(g), donate_argnums=0)
    step(state, gradients(made))
    assert_models_close(made, model)


def test_takes_over_what_the_forward_pass_changed(fresh):
    made = counting(fresh.model(), 3.0)
    new = fresh.apply_gradients(gradients(made))
    assert new.model().norm.mean[...].tolist() == [3.0] * 4
    assert int(new.model().calls[...]) == 1
    np.testing.assert_array_equal(new.params["scale"], np.full(4, 0.75))


def test_a_skipped_step_keeps_its_statistics_back(fresh):
    made = counting(fresh.model(), 3.0)
    grads = gradients(made)
    grads["scale"].set_value(jnp.asarray([0.0, jnp.nan, 0.0, 0.0]))
    new = fresh.apply_gradients(grads)
    assert int(new.skipped) == 1
    assert_models_close(new.model(), fresh.model())


def test_of_several_modules_one_is_named(fresh):
    first, second = counting(fresh.model(), 1.0), counting(fresh.model(), 2.0)
    grads = gradients(first)
    with pytest.raises(ValueError, match=r"gave several modules.*model=model"):
        fresh.apply_gradients(grads)
    new = fresh.apply_gradients(grads, model=second)
    assert new.model().norm.mean[...].tolist() == [2.0] * 4


def test_a_module_that_nobody_kept_is_an_error(fresh):
    grads = gradients(fresh.model())
    gc.collect()
    with pytest.raises(ValueError, match="nobody has kept"):
        fresh.apply_gradients(grads)


def test_gradients_from_elsewhere_leave_other_variables(fresh, model):
    new = fresh.apply_gradients(gradients(model))
    assert new.model().norm.mean[...].tolist() == [0.0] * 4
    assert int(new.step) == 1


def test_numbers_may_be_set_between_module_and_update(fresh):
    made = counting(fresh.model(), 3.0)
    new = fresh.replace_hyperparams(learning_rate=0.0).apply_gradients(gradients(made))
    assert new.model().norm.mean[...].tolist() == [3.0] * 4
    assert new.params["scale"].tolist() == [1.0] * 4


def test_a_model_of_parameters_alone_needs_no_module():
    state = jr.flax.NNXState.create(Plain(nnx.Rngs(0)), SGD)
    grads = gradients(state.model())
    gc.collect()
    assert int(state.apply_gradients(grads).step) == 1


def test_variables_that_are_missing_or_of_another_shape(fresh):
    made = fresh.model()
    grads = gradients(made)
    made.norm.mean = nnx.BatchStat(jnp.zeros(5))
    with pytest.raises(ValueError, match=r"'norm/mean' has shape \(5,\), wanted \(4,\)"):
        fresh.apply_gradients(grads, model=made)
    del made.norm.mean
    with pytest.raises(ValueError, match="the variable 'norm/mean' is missing"):
        fresh.apply_gradients(grads, model=made)


def test_variables_that_the_forward_pass_added_are_not_kept(fresh):
    made = counting(fresh.model(), 3.0)
    made.seen = nnx.Intermediate(jnp.ones(3))
    new = fresh.apply_gradients(gradients(made))
    assert jax.tree.structure(new) == jax.tree.structure(fresh)


@pytest.mark.parametrize("form", ["state", "pure", "nested", "module"])
def test_forms_of_gradients(form):
    model = Plain(nnx.Rngs(0))
    state = jr.flax.NNXState.create(model, SGD)
    grads = gradients(model)
    if form == "pure":
        grads = nnx.as_pure(grads)
    elif form == "nested":
        grads = nnx.to_pure_dict(grads)
    elif form == "module":
        grads = nnx.merge(nnx.graphdef(model), grads)
    new = state.apply_gradients(grads)
    np.testing.assert_array_equal(new.params["linear"]["bias"], [-0.5, -0.5])


def test_gradients_that_do_not_match_name_the_path():
    state = jr.flax.NNXState.create(Plain(nnx.Rngs(0)), SGD)
    with pytest.raises(ValueError, match="'linear/bias' is missing"):
        state.apply_gradients({"linear": {"kernel": jnp.ones((3, 2))}})
    with pytest.raises(TypeError, match="grads: expected what nnx"):
        state.apply_gradients(jnp.ones(3))


def test_parameters_that_wrt_leaves_out_stay_as_they_are():
    class WithBase(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.LoRALinear(3, 2, lora_rank=1, rngs=rngs)
            self.layer.kernel.set_value(self.layer.kernel[...].astype(jnp.bfloat16))

        def __call__(self, x):
            return self.layer(x)

    model = WithBase(nnx.Rngs(0))
    state = jr.flax.NNXState.create(model, jr.adam(0.1), wrt=nnx.LoRAParam)
    assert [leaf.path for leaf in state.plan.leaves] == ["layer/lora/lora_a", "layer/lora/lora_b"]
    made = state.model()
    grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(made, X)
    new = state.apply_gradients(grads)
    before, after = flat(model), flat(new.model())
    changed = {path[-1] for path in before if jnp.any(before[path] != after[path])}
    assert changed == {"lora_b"}  # At first b is zero, so that a has no gradient.
    assert after["layer", "kernel"].dtype == jnp.bfloat16


class Trees(nnx.Module):
    """Variables that hold trees: parameters, statistics, and something that no arena takes."""

    def __init__(self):
        self.pair = nnx.Param({"a": jnp.ones(3), "b": {"c": jnp.full(2, 2.0)}})
        self.list = nnx.Param([jnp.ones(2), jnp.ones(())])
        self.lora = nnx.LoRAParam({"a": jnp.ones(2)})
        self.seen = nnx.BatchStat({"mean": jnp.zeros(2), "calls": jnp.array(0)})
        self.stats = nnx.BatchStat({"mean": jnp.zeros(2), "var": jnp.ones(2)})


@pytest.mark.parametrize("form", ["state", "nested", "module"])
def test_variables_that_hold_trees(form):
    state = jr.flax.NNXState.create(Trees(), SGD, trainable=["pair/*", "lora/a"])
    assert [leaf.path for leaf in state.plan.leaves] == ["lora/a", "pair/a", "pair/b/c"]
    assert [leaf.path for leaf in state.core.extra["floats"].plan.leaves] == [
        "stats/mean",
        "stats/var",
    ]
    made = state.model()
    grads = gradients(made)
    if form == "nested":
        grads = nnx.to_pure_dict(grads)
    elif form == "module":
        grads = nnx.merge(nnx.graphdef(made), grads, nnx.state(made, nnx.Not(nnx.Param)))
    made.seen.set_value({"mean": jnp.full(2, 3.0), "calls": jnp.array(1)})
    made.stats.set_value({"mean": jnp.full(2, 4.0), "var": jnp.full(2, 5.0)})
    new = state.apply_gradients(grads, model=made).model()
    assert isinstance(new.lora, nnx.LoRAParam)
    values = {path: x.get_value() for path, x in nnx.to_flat_state(nnx.state(new))}
    assert jax.tree.map(lambda x: x.tolist(), values) == {
        ("pair",): {"a": [0.5] * 3, "b": {"c": [1.5] * 2}},
        ("list",): [[1.0] * 2, 1.0],
        ("lora",): {"a": [0.5] * 2},
        ("seen",): {"mean": [3.0] * 2, "calls": 1},
        ("stats",): {"mean": [4.0] * 2, "var": [5.0] * 2},
    }


def test_variables_that_hold_trees_and_that_wrt_leaves_out():
    state = jr.flax.NNXState.create(Trees(), SGD, wrt=nnx.LoRAParam)
    assert [leaf.path for leaf in state.plan.leaves] == ["lora/a"]
    made = state.model()
    grads = jax.tree.map(jnp.ones_like, nnx.state(made, nnx.LoRAParam))
    new = state.apply_gradients(grads).model()
    assert new.lora.get_value()["a"].tolist() == [0.0] * 2
    assert new.pair.get_value()["b"]["c"].tolist() == [2.0] * 2


def test_trainable_goes_inside_of_wrt():
    state = jr.flax.NNXState.create(Plain(nnx.Rngs(0)), SGD, trainable="*/kernel")
    assert [leaf.path for leaf in state.plan.leaves] == ["linear/kernel"]
    new = state.apply_gradients(gradients(state.model()))
    assert new.params["linear"]["bias"].tolist() == [0.0, 0.0]


def test_compute_dtype_is_of_the_parameters_in_the_step(model):
    state = jr.flax.NNXState.create(model, SGD, compute_dtype="bfloat16")
    made, full = state.model(), state.model(full_precision=True)
    assert made.first.kernel[...].dtype == jnp.bfloat16
    assert made.norm.scale[...].dtype == made.norm.mean[...].dtype == jnp.float32
    assert_models_close(full, model)


def test_averages_for_evaluation(model):
    optimizer = jr.sgd(0.5, ema_decay=0.75)
    state = jr.flax.NNXState.create(model, optimizer, ema_extra=True)
    made = counting(state.model(), 4.0)
    state = state.apply_gradients(gradients(made))
    averaged = state.with_ema().model()
    # 0.75 · 1 + 0.25 · 0.75, and 0.75 · 0 + 0.25 · 4.
    np.testing.assert_allclose(averaged.scale[...], [0.9375] * 4, rtol=1e-6)
    np.testing.assert_allclose(averaged.norm.mean[...], [1.0] * 4, rtol=1e-6)


def test_sums_of_micro_batches():
    state = jr.flax.NNXState.create(Plain(nnx.Rngs(0)), SGD)
    made = state.model()
    sums = state.accumulate(state.zero_gradients(), gradients(made, 1.0))
    sums = state.accumulate(sums, gradients(made, 3.0))
    assert state.apply_gradients(sums).params["linear"]["bias"].tolist() == [-2.0, -2.0]


def test_seeds_under_vmap_and_a_step_under_scan():
    optimizer = jr.adam(0.1)

    def train(key):
        state = jr.flax.NNXState.create(Plain(nnx.Rngs(key)), optimizer)
        return jax.lax.scan(lambda s, _: train_step(s, X), state, length=3)

    keys = jax.random.split(jax.random.key(0), 2)
    states, losses = jax.jit(jax.vmap(train))(keys)
    alone, loss = jax.jit(train)(keys[1])
    assert losses.shape == (2, 3)
    np.testing.assert_allclose(losses[1], loss, rtol=1e-6)
    np.testing.assert_allclose(states.core.weights[0][1], alone.core.weights[0], rtol=1e-6)


def test_equal_models_share_a_compiled_step():
    step = jax.jit(lambda s, g: s.apply_gradients(g))
    for rate in (1.0, 2.0):
        model = Plain(nnx.Rngs(int(rate)))
        step(jr.flax.NNXState.create(model, jr.sgd(rate)), gradients(model))
    assert step._cache_size() == 1


def test_what_cannot_be_a_state():
    model = Plain(nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"model: expected an nnx.Module, got a dict"):
        jr.flax.NNXState.create({"w": jnp.ones(2)}, SGD)
    with pytest.raises(TypeError, match=r"optimizer: .*optax transformation"):
        jr.flax.NNXState.create(model, optax.adam(0.1))
    with pytest.raises(ValueError, match=r"wrt: .*selects no variable"):
        jr.flax.NNXState.create(model, SGD, wrt=nnx.LoRAParam)


def test_pickles_without_the_modules_that_it_gave(fresh, model):
    made = fresh.model()
    again = pickle.loads(pickle.dumps(fresh))
    assert jax.tree.structure(again) == jax.tree.structure(fresh)
    new = again.apply_gradients(gradients(made))
    assert new.params["scale"].tolist() == [0.75] * 4


def test_a_checkpoint_restores_into_another_model(fresh):
    made = counting(fresh.model(), 3.0)
    saved = fresh.apply_gradients(gradients(made))
    leaves = saved.to_leaves(host=True)
    other = jr.flax.NNXState.create(Model(nnx.Rngs(7)), jr.sgd(0.5))
    assert_models_close(other.restore(leaves).model(), saved.model())
    assert int(other.restore(leaves).step) == 1


def test_a_state_says_what_it_is(fresh):
    assert repr(fresh).startswith("NNXState(\n  sgd")
    assert int(fresh.skipped) == 0
    with pytest.raises(AttributeError, match="'NNXState' object has no attribute 'nothing'"):
        _ = fresh.nothing


def test_strict_promotion_and_without_jit():
    state = jr.flax.NNXState.create(Plain(nnx.Rngs(0)), SGD)
    _, wanted = jax.jit(train_step)(state, X)
    with jax.numpy_dtype_promotion("strict"), jax.disable_jit():
        new, loss = train_step(state, X)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert int(new.step) == 1
