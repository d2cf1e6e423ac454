"""Hyperparameters that change from step to step: right values, and one program for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_oracle import LossScale, Pipeline
from states import by_path, count_compilations, make_step

import jaxrenaissance as jr

STEPS = 100
PARAMS = {"kernel": (3, 5), "bias": (5,), "head": (5, 1)}

# Lowest and highest value; all are used in between. The scale of the loss is set too, but never
# follows a schedule.
RANGES = {
    "learning_rate": (1e-3, 0.05),
    "b1": (0.5, 0.95),
    "b2": (0.8, 0.999),
    "eps": (0.05, 0.5),
    "eps_root": (0.0, 0.01),
    "weight_decay": (0.0, 0.3),
    "max_norm": (0.5, 4.0),
    "max_value": (0.05, 1.0),
    "ema_decay": (0.0, 0.95),
}
GROUP = {"scale": (0.25, 2.0), "b1": (0.2, 0.8), "weight_decay": (0.1, 0.4)}


def wave(low, high, phase):
    """A function of the count from low to high and back, for the device and for NumPy."""

    def value(count):
        angle = 0.37 * count + phase
        # A triangle, so that device and host need no function of their own libraries.
        return low + (high - low) * abs(angle % 2 - 1)

    return value


def waves(ranges, first):
    return {name: wave(*ends, first + i) for i, (name, ends) in enumerate(ranges.items())}


NUMBERS, OF_GROUP = waves(RANGES, 0), waves(GROUP, 0.5)


def params():
    rng = np.random.default_rng(0)
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in PARAMS.items()}


def gradients():
    rng = np.random.default_rng(1)
    for i in range(STEPS):
        scale = np.float32(0.2 + 0.03 * i)
        yield {p: scale * rng.normal(size=s).astype(np.float32) for p, s in PARAMS.items()}


def in_tree_order(plan, tree):
    return [tree[leaf.path] for leaf in plan.leaves]


def oracle_of(plan, numbers, of_group):
    leaves = in_tree_order(plan, params())
    return Pipeline(
        "adamw",
        leaves,
        decayed=[leaf.path != "bias" for leaf in plan.leaves],
        of_leaf=[of_group if leaf.path == "head" else {} for leaf in plan.leaves],
        loss_scale=LossScale(1.0),
        **numbers,
    )


def assert_is_that_of(oracle, state):
    for arenas, wanted in ((state.weights, oracle.weights), (state.ema, oracle.average)):
        for got, x in zip(by_path(state, arenas).values(), wanted, strict=True):
            np.testing.assert_allclose(got, x, rtol=5e-5, atol=5e-6)


def create(backend, numbers, of_group, **options):
    optimizer = jr.adamw(
        mask="weights", groups=[jr.Group("head", **of_group)], backend=backend, **numbers, **options
    )
    return jr.TrainState.create(params(), optimizer)


def test_every_schedule_follows_the_count_in_one_program(backend):
    state = create(backend, NUMBERS, OF_GROUP)
    oracle = oracle_of(state.plan, NUMBERS, OF_GROUP)
    step, clipped = make_step(donate_argnums=0), 0
    for i, grads in enumerate(gradients()):
        if i == 1:
            before = step._cache_size()
        bad = i % 9 == 4
        if bad:  # the count stays, and with it every value
            grads["bias"][-1] = np.nan
        state = step(state, grads)
        oracle.call(in_tree_order(state.plan, grads))
        clipped += oracle.clip_factor < 1
        if i % 10 == 5 or i == STEPS - 1:
            assert_is_that_of(oracle, state)
            count = int(state.step) - (not bad)
            for name, value in NUMBERS.items():
                np.testing.assert_allclose(
                    state.metrics[name], value(count), rtol=1e-5, atol=1e-5, err_msg=name
                )
            for name, value in OF_GROUP.items():
                np.testing.assert_allclose(
                    state.metrics[f"head/{name}"], value(count), rtol=1e-5, atol=1e-5, err_msg=name
                )
    assert before == step._cache_size() == 1
    assert 0 < clipped < STEPS
    assert int(state.step) == oracle.step == STEPS - oracle.skipped


def as_given(kind, value):
    """A number in one of the forms in which a training loop may have it."""
    if kind == "float":
        return value
    if kind == "numpy":
        return np.float32(value)
    if kind == "uncommitted":
        return jnp.asarray(np.float32(value))
    return jax.device_put(np.float32(value), next(iter(jnp.zeros(()).devices())))


KINDS = ("float", "numpy", "uncommitted", "committed")


@pytest.mark.parametrize("committed_state", [False, True])
def test_every_number_may_be_set_between_steps_and_nothing_compiles(committed_state, backend):
    numbers = {name: value(0) for name, value in NUMBERS.items()}
    of_group = {name: value(0) for name, value in OF_GROUP.items()}
    state = create(backend, numbers, of_group, loss_scale=jr.StaticLossScale(1.0))
    if committed_state:
        state = jax.device_put(state, next(iter(state.ints.devices())))
    oracle = oracle_of(state.plan, numbers, of_group)
    step = make_step(donate_argnums=0)
    all_grads = list(gradients())
    # The first call of any operation compiles it.
    state = state.replace_hyperparams(**numbers, loss_scale=1.0, groups={"head": of_group})
    state = step(state, all_grads[0])
    oracle.call(in_tree_order(state.plan, all_grads[0]))
    given = [
        [
            {name: as_given(KINDS[i % 4], value(i)) for name, value in NUMBERS.items()},
            {name: as_given(KINDS[i % 4], value(i)) for name, value in OF_GROUP.items()},
            as_given(KINDS[i % 4], 2.0 ** (i % 5)),
        ]
        for i in range(STEPS)
    ]
    with count_compilations() as compiled:
        for i in range(1, STEPS):
            own, group, scale = given[i]
            state = state.replace_hyperparams(**own, loss_scale=scale, groups={"head": group})
            scale = 2.0 ** (i % 5)
            grads = {path: g * np.float32(scale) for path, g in all_grads[i].items()}
            state = step(state, grads)
            head = {name: value(i) for name, value in OF_GROUP.items()}
            oracle.set(
                of_leaf=[head if leaf.path == "head" else {} for leaf in state.plan.leaves],
                loss_scale=scale,
                **{name: value(i) for name, value in NUMBERS.items()},
            )
            oracle.call(in_tree_order(state.plan, grads))
    assert compiled == []
    assert step._cache_size() == 1
    assert_is_that_of(oracle, state)
    assert state.ints.committed == state.floats.committed == committed_state


@pytest.mark.parametrize("name", RANGES)
def test_setting_what_follows_a_schedule_raises(name):
    state = create("xla", {"learning_rate": 0.1} | {name: NUMBERS[name]}, {"scale": 1.0})
    with pytest.raises(ValueError, match=f"{name}: it follows a schedule"):
        state.replace_hyperparams(**{name: 0.1})


@pytest.mark.parametrize("name", GROUP)
def test_setting_what_follows_a_schedule_in_a_group_raises(name):
    state = create("xla", {"learning_rate": 0.1}, {name: OF_GROUP[name]})
    with pytest.raises(ValueError, match=rf"{name}.*follows a schedule"):
        state.replace_hyperparams(groups={"head": {name: 0.1}})


def test_setting_a_number_leaves_the_others_and_the_old_state_alone(backend):
    state = create(backend, {"learning_rate": 0.1, "max_norm": 2.0}, {"scale": 0.5, "b1": 0.8})
    before = {name: np.array(x) for name, x in state.metrics.items()}
    new = state.replace_hyperparams(max_norm=3.0, b1=0.5, groups={"head": {"scale": 4.0}})
    changed = {"max_norm": 3.0, "b1": 0.5, "head/scale": 4.0}
    for name, value in new.metrics.items():
        np.testing.assert_allclose(value, changed.get(name, before[name]), rtol=1e-6)
        np.testing.assert_array_equal(state.metrics[name], before[name])
    assert changed.keys() <= new.metrics.keys()


def test_numbers_may_be_set_inside_jit(backend):
    state = create(backend, {"learning_rate": 0.0, "max_norm": 2.0}, {"scale": 1.0})

    @jax.jit
    def step(state, lr, grads):
        return state.replace_hyperparams(learning_rate=lr).apply_gradients(grads)

    grads = next(gradients())
    same = step(state, 0.0, grads)
    np.testing.assert_array_equal(same.params["bias"], state.params["bias"])
    moved = step(state, 0.5, grads)
    assert step._cache_size() == 1
    assert not (np.asarray(moved.params["bias"]) == np.asarray(state.params["bias"])).any()
