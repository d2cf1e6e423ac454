"""jaxrenaissance.flax.TrainState, against Flax's own with optax."""

import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, serialization, struct
from flax import linen as nn
from flax.training import train_state
from scripts import ROOT
from states import assert_trees_equal, count_compilations, ones_like

import jaxrenaissance as jr
import jaxrenaissance.flax

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)


class Net(nn.Module):
    """A layer, a norm with running statistics, a layer."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(4, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(1)(nn.tanh(x))


MODEL = Net()
VARIABLES = jax.jit(lambda: MODEL.init(jax.random.key(0), X, train=False))()
PARAMS, STATS = VARIABLES["params"], VARIABLES["batch_stats"]
SGD = jr.sgd(0.5)


class Theirs(train_state.TrainState):
    """As Flax's documentation has it."""

    batch_stats: Any
    key: jax.Array


class Ours(jr.flax.TrainState):
    """The same declarations."""

    batch_stats: Any
    key: jax.Array


def train_step(state, x):
    def loss_fn(params):
        out, updated = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            x,
            mutable=["batch_stats"],
        )
        return jnp.mean((out - 1) ** 2), updated["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


def made(cls, tx, **options):
    return cls.create(
        apply_fn=MODEL.apply,
        params=PARAMS,
        tx=tx,
        batch_stats=STATS,
        key=jax.random.key(1),
        **options,
    )


def plain(tx=SGD, **options):
    return jr.flax.TrainState.create(apply_fn=MODEL.apply, params=PARAMS, tx=tx, **options)


def assert_close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def followed():
    """Flax's state after 3 steps with optax."""
    state, step = made(Theirs, optax.adamw(0.1, weight_decay=0.1)), jax.jit(train_step)
    for _ in range(3):
        state, _ = step(state, X)
    return state


def test_trains_as_flax_with_optax(backend, followed):
    tx = jr.adamw(0.1, weight_decay=0.1, mask=True, backend=backend)
    state, step = made(Ours, tx), jax.jit(train_step, donate_argnums=0)
    for i in range(3):
        with count_compilations() as compiled:
            state, _ = step(state, X)
        assert i == 0 or not compiled
    assert type(state) is Ours
    assert int(state.step) == 3
    assert_close(state.params, followed.params)
    assert_close(state.batch_stats, followed.batch_stats)


def test_is_a_few_buffers():
    # Weights, two moments, two of scalars, statistics, the key.
    state = made(Ours, jr.adam(0.1))
    assert len(jax.tree.leaves(state)) == 7
    assert [field.name for field in dataclasses.fields(Ours)] == ["core", "apply_fn", "key"]


def test_the_functions_own_names():
    state = plain(jr.adam(0.1))
    assert state.apply_fn == MODEL.apply
    assert_trees_equal(state.params, PARAMS)
    assert state.batch_stats is None
    assert state.opt_state.count.dtype == jnp.int32
    assert [len(state.opt_state.mu), len(state.opt_state.nu)] == [1, 1]
    with pytest.raises(AttributeError, match=r"replace_hyperparams"):
        _ = state.tx
    with pytest.raises(AttributeError, match="'TrainState' object has no attribute 'nothing'"):
        _ = state.nothing


def test_optimizers_of_other_numbers_share_a_compiled_step():
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for rate in (0.25, 0.5):
        new = step(plain(jr.sgd(rate)), ones_like(PARAMS))
        assert new.params["Dense_1"]["bias"].tolist() == [-rate]
    assert step._cache_size() == 1


def test_an_average_skips_and_a_loss_scale_are_there_by_name():
    tx = jr.sgd(
        0.5,
        ema_decay=0.75,
        loss_scale=jr.StaticLossScale(4.0),
        metrics=("grad_norm",),
    )
    state = plain(tx, batch_stats=STATS, ema_extra=True)
    assert float(state.scale_loss(jnp.float32(3))) == 12
    stats = ones_like(STATS)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 4.0), PARAMS)
    state = state.apply_gradients(grads=grads, batch_stats=stats)
    size = sum(x.size for x in jax.tree.leaves(PARAMS))
    np.testing.assert_allclose(state.metrics["grad_norm"], size**0.5, rtol=1e-6)
    assert state.params["Dense_1"]["bias"].tolist() == [-0.5]
    averaged = state.with_ema()
    assert type(averaged) is jr.flax.TrainState
    assert averaged.params["Dense_1"]["bias"].tolist() == [-0.125]
    assert state.ema_params["Dense_1"]["bias"].tolist() == [-0.125]
    assert averaged.batch_stats["BatchNorm_0"]["mean"].tolist() == [0.25] * 4
    assert int(state.skipped) == 0
    jr.check(state)


def test_a_skipped_step_keeps_its_statistics_back():
    state = made(Ours, SGD)
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), PARAMS)
    new = state.apply_gradients(grads=grads, batch_stats=ones_like(STATS), key=jax.random.key(2))
    assert_trees_equal(new.params, PARAMS)
    assert_trees_equal(new.batch_stats, STATS)
    assert (int(new.step), int(new.skipped)) == (0, 1)
    assert new.key == jax.random.key(2)


def test_replace_packs_again():
    state = made(Ours, jr.sgd(0.5, momentum=0.5))
    moved = state.apply_gradients(grads=ones_like(PARAMS))
    new = moved.replace(
        params=ones_like(PARAMS),
        batch_stats=ones_like(STATS),
        step=7,
        key=jax.random.key(5),
    )
    assert_trees_equal(new.params, ones_like(PARAMS))
    assert_trees_equal(new.batch_stats, ones_like(STATS))
    assert (int(new.step), new.key) == (7, jax.random.key(5))
    assert_trees_equal(new.opt_state.mu, moved.opt_state.mu)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    # The momentum is 1 after one gradient of ones; it is 1.5 after the second.
    again = state.replace(opt_state=moved.opt_state).apply_gradients(grads=ones_like(PARAMS))
    assert int(again.step) == 2
    assert again.params["Dense_1"]["bias"].tolist() == [-0.75]


def test_replace_of_several_members():
    state = jax.vmap(lambda rate: plain(jr.sgd(rate, momentum=0.5)))(jnp.asarray([0.25, 0.5]))
    one_step = jax.jit(jax.vmap(lambda state: state.apply_gradients(grads=ones_like(PARAMS))))
    moved = one_step(state)
    assert moved.replace(step=7).step.tolist() == [7, 7]
    new = moved.replace(step=jnp.asarray([3, 4]))
    assert new.step.tolist() == [3, 4]
    assert new.core.calls.tolist() == [1, 1]
    again = state.replace(opt_state=moved.opt_state)
    assert again.step.tolist() == [1, 1]
    # The momentum is 1.5 after the second gradient of ones.
    bias = jax.vmap(lambda state: state.params)(one_step(again))["Dense_1"]["bias"]
    assert bias.tolist() == [[-0.375], [-0.75]]


def test_goes_on_from_a_loop_with_optax(followed):
    tx = jr.adamw(0.1, weight_decay=0.1, mask=True)
    state = Ours.create(
        apply_fn=MODEL.apply,
        params=followed.params,
        tx=tx,
        batch_stats=followed.batch_stats,
        key=followed.key,
        opt_state=followed.opt_state,
        compute_dtype=jnp.float32,
    )
    assert int(state.step) == 3
    new, _ = jax.jit(train_step)(state, X)
    wanted, _ = jax.jit(train_step)(followed, X)
    assert_close(new.params, wanted.params)
    assert_close(new.batch_stats, wanted.batch_stats)


def test_what_replace_cannot_take():
    state = plain()
    with pytest.raises(ValueError, match="batch_stats: the state has none"):
        state.replace(batch_stats=STATS)
    with pytest.raises(ValueError, match=r"the moments are mu float32\[64\], wanted none"):
        state.replace(opt_state=jr.sgd(1.0, momentum=0.5).init({"w": jnp.ones(64)}))
    adam = plain(jr.adam(0.1))
    with pytest.raises(ValueError, match="the moments are none, wanted mu float32"):
        adam.replace(opt_state=state.opt_state)
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), adam.opt_state)
    with pytest.raises(ValueError, match=r"the moments are mu bfloat16.*, wanted mu float32"):
        adam.replace(opt_state=halved)
    with pytest.raises(TypeError, match=r"opt_state: expected a State .*, got a tuple.*create"):
        adam.replace(opt_state=optax.adam(0.1).init(PARAMS))
    with pytest.raises(TypeError, match="step: expected an integer, got dtype float32"):
        state.replace(step=0.5)
    with pytest.raises(ValueError, match=r"step: has shape \(2,\), wanted \(\)"):
        state.replace(step=jnp.arange(2))
    with pytest.raises(TypeError, match="nothing"):
        state.replace(nothing=1)
    with pytest.raises(ValueError, match="'Dense_0/kernel' is missing"):
        state.replace(params={})


def test_methods_of_the_core_give_the_subclass_back():
    state = made(Ours, jr.adam(0.5))
    grads = ones_like(PARAMS)
    sums = state.accumulate(state.zero_gradients(), grads)
    for new in (
        state.apply_gradients(grads=sums),
        state.replace_hyperparams(learning_rate=0.1),
        state.map_params(jnp.zeros_like),
        state.reset_moments(),
    ):
        assert type(new) is Ours
        assert new.key == state.key


def test_fields_win_over_names_of_the_core():
    class WithMetrics(jr.flax.TrainState):
        metrics: Any
        skipped: int = struct.field(pytree_node=False, default=3)

    state = WithMetrics.create(apply_fn=None, params=PARAMS, tx=SGD, metrics={"loss": 1.0})
    assert (state.metrics, state.skipped) == ({"loss": 1.0}, 3)
    assert state.replace(metrics=2.0).metrics == 2.0
    assert "loss_scale" not in state.core.metrics


def test_a_default_of_batch_stats_is_no_field():
    class WithDefault(jr.flax.TrainState):
        batch_stats: Any = None

    assert WithDefault.create(apply_fn=None, params=PARAMS, tx=SGD).batch_stats is None
    state = WithDefault.create(apply_fn=None, params=PARAMS, tx=SGD, batch_stats=STATS)
    assert_trees_equal(state.batch_stats, STATS)
    assert len(jax.tree.leaves(state)) == 4


def test_a_subclass_of_a_subclass_and_its_methods():
    class More(Ours):
        note: str = struct.field(pytree_node=False, default="")

        def twice(self):
            return self.replace(note=2 * self.note)

    state = made(More, SGD, note="a").twice()
    assert state.note == "aa"
    assert isinstance(state, jr.flax.TrainState)


def test_names_that_no_field_can_have():
    with pytest.raises(TypeError, match="a field cannot be called 'rules'"):

        class WithRules(jr.flax.TrainState):
            rules: Any


def test_options_of_the_core():
    state = plain(compute_dtype="bfloat16", trainable="Dense_*")
    assert state.compute_params["Dense_0"]["kernel"].dtype == jnp.bfloat16
    assert state.params["Dense_0"]["kernel"].dtype == jnp.float32
    assert {leaf.path.split("/")[0] for leaf in state.plan.leaves} == {"Dense_0", "Dense_1"}
    assert state.trainable_params["BatchNorm_0"] == {"bias": None, "scale": None}


def test_what_cannot_be_created():
    with pytest.raises(TypeError, match=r"for optax\.scale_by_adam: jr\.adam"):
        plain(optax.adam(0.1))
    fp8 = {"params": PARAMS, "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    with pytest.raises(ValueError, match=r"_overwrite_with_gradient.*\(fp8 scales\)"):
        jr.flax.TrainState.create(apply_fn=None, params=fp8, tx=SGD)
    with pytest.raises(TypeError, match="key"):
        Ours.create(apply_fn=None, params=PARAMS, tx=SGD)


def test_frozen_dicts_and_boxed_parameters():
    frozen = core.freeze(PARAMS)
    state = jr.flax.TrainState.create(apply_fn=None, params=frozen, tx=SGD)
    assert isinstance(state.apply_gradients(grads=ones_like(frozen)).params, core.FrozenDict)
    boxed = {"kernel": nn.Partitioned(jnp.ones((2, 2)), (None, "model"))}
    state = jr.flax.TrainState.create(apply_fn=None, params=boxed, tx=SGD)
    assert [leaf.path for leaf in state.plan.leaves] == ["kernel"]
    new = state.apply_gradients(grads=boxed).params["kernel"]
    assert (new.names, new.value.tolist()) == ((None, "model"), [[0.5, 0.5]] * 2)


def test_pickles():
    state = plain()
    again = pickle.loads(pickle.dumps(state.replace(apply_fn=None)))
    assert_trees_equal(again.params, PARAMS)


def test_serialization_of_flax_goes_by_path():
    adam = jr.adam(0.1)
    state = plain(adam, batch_stats=STATS)
    state = state.apply_gradients(grads=ones_like(PARAMS), batch_stats=ones_like(STATS))
    data = serialization.to_bytes(state)
    # Every leaf a weight: other regions, another plan.
    other = plain(adam, batch_stats=STATS, rules=lambda path, leaf: jr.Region.W_FC_WEIGHT)
    read = serialization.from_bytes(other, data)
    assert read.plan == other.plan != state.plan
    assert_trees_equal(read.params, state.params)
    assert_trees_equal(read.batch_stats, ones_like(STATS))
    again = [x.apply_gradients(grads=ones_like(PARAMS)) for x in (read, state)]
    assert_trees_equal(again[0].params, again[1].params)
    assert int(again[0].step) == 2


def test_the_package_imports_without_flax_and_other_extras():
    extras = ("flax", "orbax", "equinox", "tqdm", "matplotlib")
    code = f"import sys; sys.modules |= dict.fromkeys({extras}); import jaxrenaissance"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
