"""Every hyperparameter as a number, a device scalar, traced and scheduled; and set anew."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from states import count_compilations

import jaxrenaissance as jr
from jaxrenaissance import hyperparams, scalars, transform
from jaxrenaissance.plan import MemoryPlan

# Name → (the other arguments it needs, slot, whether the header has it, whether 1 - value is kept).
PARAMETERS = {
    "learning_rate": ({}, scalars.LEARNING_RATE, False, False),
    "weight_decay": ({}, scalars.WEIGHT_DECAY, False, False),
    "momentum": ({}, scalars.MOMENTUM, False, False),
    "b1": ({}, scalars.ONE_MINUS_B1, False, True),
    "b2": ({}, scalars.ONE_MINUS_B2, False, True),
    "eps": ({}, scalars.EPS, False, False),
    "eps_root": ({}, scalars.EPS_ROOT, False, False),
    "trust_coefficient": ({}, scalars.TRUST, False, False),
    "min_norm": ({}, scalars.MIN_NORM, True, False),
    "max_ratio": ({}, scalars.MAX_RATIO, True, False),
    "max_norm": ({}, scalars.MAX_NORM, True, False),
    "max_value": ({}, scalars.MAX_VALUE, True, False),
    "ema_decay": ({}, scalars.ONE_MINUS_EMA, True, True),
    "loss_scale": ({"loss_scale": jr.DynamicLossScale()}, scalars.LOSS_SCALE, True, False),
}
# What a factory takes as a number; the loss scale is an object.
GIVEN = [name for name in PARAMETERS if name != "loss_scale"]
OWN = [name for name in GIVEN if not PARAMETERS[name][2]]
VALUE = 0.9990000128746033  # A float32, so that device scalars say the same.


def make(name, value, **options):
    factory, masks = jr.adamw, {"mask": True}
    if name == "momentum":
        factory = jr.sgd
    elif name in ("trust_coefficient", "min_norm", "max_ratio"):
        factory, masks = jr.lars, {"weight_decay_mask": True, "trust_ratio_mask": True}
    return factory(**{"learning_rate": 0.5, "backend": "xla", **masks, name: value, **options})


def plan_of(optimizer):
    shapes = {"a": jax.ShapeDtypeStruct((3,), jnp.float32), "b": jax.ShapeDtypeStruct((2, 2), "f4")}
    return transform.build_plan(shapes, optimizer.selection)


def floats_of(optimizer, count=0, dtype=np.float32):
    """The scalars as a call after `count` updates uses them."""
    plan = plan_of(optimizer)
    floats = hyperparams.initial_floats(
        optimizer.spec, optimizer.numbers, plan.num_groups, np.dtype(dtype)
    )
    return hyperparams.follow_schedules(optimizer.spec, jnp.asarray(floats), jnp.int32(count))


def stored(name, value):
    return np.float32(1 - value if PARAMETERS[name][3] else value)


def slot_of(name, row=0):
    _, slot, header, _ = PARAMETERS[name]
    return slot if header else scalars.float_index(row, slot)


@pytest.mark.parametrize("name", GIVEN)
def test_a_number_a_device_scalar_a_traced_value_and_a_schedule_are_the_same(name):
    wanted = np.asarray(floats_of(make(name, VALUE)))
    assert wanted[slot_of(name)] == stored(name, VALUE)
    committed = jax.device_put(jnp.float32(VALUE), jax.devices("cpu")[-1])
    for value in (np.float64(VALUE), np.float32(VALUE), jnp.float32(VALUE), committed):
        np.testing.assert_array_equal(floats_of(make(name, value)), wanted)
    for schedule in (lambda count: VALUE, lambda count: jnp.float32(VALUE)):
        np.testing.assert_array_equal(floats_of(make(name, schedule)), wanted)
    traced = jax.jit(lambda value: floats_of(make(name, value)))(jnp.float32(VALUE))
    np.testing.assert_allclose(traced, wanted, rtol=1e-4 if PARAMETERS[name][3] else 0)
    scheduled = make(name, lambda count: jnp.float32(VALUE) + 0 * count)
    at = jax.jit(lambda count: floats_of(scheduled, count))(3)
    np.testing.assert_allclose(at, wanted, rtol=1e-4 if PARAMETERS[name][3] else 0)


@pytest.mark.parametrize("name", GIVEN)
def test_a_schedule_sees_the_updates_made_so_far(name):
    optimizer = make(name, optax.linear_schedule(0.0625, 0.5625, 8))
    for count, value in ((0, 0.0625), (1, 0.125), (4, 0.3125), (8, 0.5625), (100, 0.5625)):
        assert floats_of(optimizer, count)[slot_of(name)] == stored(name, value)


@pytest.mark.parametrize("name", OWN)
def test_a_group_has_a_schedule_and_numbers_of_its_own(name):
    groups = [
        jr.Group("a", **{name: lambda count: 0.5 / 2**count}),
        jr.Group("b", **{name: 0.125}),
    ]
    optimizer = make(name, 0.25, groups=groups)
    for count in (0, 1):
        floats = floats_of(optimizer, count)
        own, a = plan_of(optimizer).num_groups // 3, 0.5 / 2**count
        for row, value in ((0, 0.25), (own, a), (2 * own - 1, a), (2 * own, 0.125)):
            assert floats[slot_of(name, row)] == stored(name, value)
    read = hyperparams.read(optimizer.spec, floats_of(optimizer, 1))
    assert {key: float(value) for key, value in read.items() if key.endswith(name)} == {
        name: 0.25,
        f"a/{name}": 0.25,
        f"b/{name}": 0.125,
    }


def test_the_scale_of_a_group_can_follow_a_schedule():
    optimizer = jr.adamw(0.1, groups=[jr.Group("a", scale=lambda count: 1.0 + count)])
    floats = floats_of(optimizer, 3)
    assert floats[scalars.float_index(2, scalars.LR_SCALE)] == 4.0
    assert floats[scalars.float_index(0, scalars.LR_SCALE)] == 1.0


def test_what_is_not_given_bounds_and_scales_nothing():
    floats = floats_of(jr.adamw(0.1))
    assert floats[scalars.MAX_NORM] == floats[scalars.MAX_VALUE] == np.inf
    assert floats[scalars.LOSS_SCALE] == floats[scalars.GROWTH] == floats[scalars.BACKOFF] == 1
    ints = hyperparams.initial_ints(jr.adamw(0.1).numbers)
    np.testing.assert_array_equal(ints, scalars.initial_ints())


def test_what_bounds_the_norms_and_the_ratios():
    def bounds(optimizer):
        return floats_of(optimizer)[np.array([scalars.MIN_NORM, scalars.MAX_RATIO])].tolist()

    given = {"min_norm": 0.5, "max_ratio": 8.0}
    assert bounds(jr.lars(0.1)) == [np.float32(1e-12), 100]
    assert bounds(jr.lars(0.1, optax_form=True)) == [0, np.inf]
    assert bounds(jr.lars(0.1, **given)) == bounds(jr.lars(0.1, **given, optax_form=True))
    assert bounds(jr.lars(0.1, **given)) == [0.5, 8]
    assert bounds(jr.lars(0.1, max_ratio=np.inf)) == [np.float32(1e-12), np.inf]
    assert bounds(jr.lamb(0.1)) == bounds(jr.lamb(0.1, max_ratio=np.inf)) == [0, np.inf]
    assert bounds(jr.lamb(0.1, max_ratio=10)) == [0, 10]


def test_loss_scale_and_accumulation_become_scalars():
    scaling = jr.DynamicLossScale(
        initial=64, growth_interval=7, growth=4, backoff=0.25, minimum=2, maximum=512
    )
    optimizer = jr.adamw(0.1, loss_scale=scaling, accumulate=jr.Accumulate(3))
    slots = [scalars.LOSS_SCALE, scalars.GROWTH, scalars.BACKOFF]
    slots += [scalars.MIN_SCALE, scalars.MAX_SCALE]
    assert np.asarray(floats_of(optimizer))[slots].tolist() == [64, 4, 0.25, 2, 512]
    ints = hyperparams.initial_ints(optimizer.numbers)
    assert (ints[scalars.EVERY], ints[scalars.GROWTH_INTERVAL]) == (3, 7)
    # A static scale stays, whatever happens: it grows by nothing, and no bound moves it.
    static = floats_of(jr.adamw(0.1, loss_scale=jr.StaticLossScale(0.5)))
    assert np.asarray(static)[slots].tolist() == [0.5, 1, 1, 0, np.inf]


def test_float64_scalars_keep_float64_numbers():
    with jax.enable_x64(True):
        optimizer = jr.adamw(lambda count: 1e-3, b2=0.99999, ema_decay=0.9999)
        floats = floats_of(optimizer, dtype=np.float64)
        assert floats[scalars.ONE_MINUS_EMA] == 1 - 0.9999
        assert floats[slot_of("b2")] == 1 - 0.99999
        assert floats[slot_of("learning_rate")] == 1e-3


# Set from the host.


@pytest.mark.parametrize("name", PARAMETERS)
def test_replace_sets_one_number_and_nothing_else(name):
    needs, _, _, _ = PARAMETERS[name]
    optimizer = make(name, VALUE, **needs)
    spec, before = optimizer.spec, floats_of(optimizer)
    rows = (0,) if PARAMETERS[name][2] else (0, 1) if name != "weight_decay" else (0,)
    wanted = np.array(before)
    for row in rows:
        wanted[slot_of(name, row)] = stored(name, 0.25)
    committed = jax.device_put(jnp.float32(0.25), jax.devices("cpu")[-1])
    for value in (0.25, np.float32(0.25), jnp.float32(0.25), committed):
        after = hyperparams.replace(spec, before, {name: value}, {})
        np.testing.assert_array_equal(after, wanted)
        assert after.devices() == before.devices()
        assert not after.committed
    inside = jax.jit(lambda floats, value: hyperparams.replace(spec, floats, {name: value}, {}))
    np.testing.assert_array_equal(inside(before, 0.25), wanted)
    assert hyperparams.read(spec, after)[name] == 0.25


@pytest.mark.parametrize("name", [*OWN, "scale"])
def test_replace_sets_a_number_of_a_group(name):
    factory_name = "learning_rate" if name == "scale" else name
    optimizer = make(factory_name, 0.5, groups=[jr.Group("a", **{name: 0.25})])
    spec, before = optimizer.spec, floats_of(optimizer)
    after = hyperparams.replace(spec, before, {}, {"a": {name: 0.125}})
    read, was = hyperparams.read(spec, after), hyperparams.read(spec, before)
    assert read.pop(f"a/{name}") == 0.125
    assert was.pop(f"a/{name}") == 0.25
    assert read == was
    # The optimizer's own number is for all that have none of their own.
    if name != "scale":
        others = hyperparams.replace(spec, before, {name: 0.75}, {})
        assert hyperparams.read(spec, others)[f"a/{name}"] == 0.25
        assert hyperparams.read(spec, others)[name] == 0.75


def test_replace_sets_the_scalars_of_every_member():
    optimizer = jr.adamw(0.5, max_norm=1.0)
    members = jnp.stack([floats_of(optimizer)] * 3)
    numbers = {"b1": 0.5, "max_norm": 2.0}
    after = hyperparams.replace(optimizer.spec, members, numbers, {})
    one = hyperparams.replace(optimizer.spec, members[0], numbers, {})
    np.testing.assert_array_equal(after, jnp.stack([one] * 3))
    read = hyperparams.read(optimizer.spec, after)
    assert all(value.shape == (3,) for value in read.values())


@pytest.mark.parametrize("where", ["uncommitted", "committed"])
def test_a_hundred_values_compile_nothing(where):
    optimizer = make(
        "b1",
        0.5,
        max_norm=1.0,
        ema_decay=0.5,
        loss_scale=jr.DynamicLossScale(),
        groups=[jr.Group("a", scale=2.0)],
    )
    device = jax.devices()[0]

    def change(floats, i):
        value = 1 / (i + 2)
        if i % 2:
            value = jnp.float32(value) if where == "uncommitted" else jax.device_put(
                np.float32(value), device
            )  # fmt: skip
        names = [name for name in optimizer.spec.names if name != "learning_rate"]
        numbers = dict.fromkeys(names, value)
        return hyperparams.replace(
            optimizer.spec, floats, numbers | {"learning_rate": value}, {"a": {"scale": value}}
        )

    use = jax.jit(lambda floats: floats + 0)
    floats = use(change(change(use(floats_of(optimizer)), 0), 1))
    with count_compilations() as compiled:
        for i in range(100):
            floats = use(change(floats, i))
    assert not compiled
    assert use._cache_size() == 1


def test_compilations_are_counted():
    with count_compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))
    assert compiled


GROUPED = {"groups": [jr.Group("a", scale=2.0, b1=lambda count: 0.5)]}


@pytest.mark.parametrize(
    ("values", "groups", "error", "message"),
    [
        ({"lr": 1.0}, {}, ValueError, "lr: adamw has no such hyperparameter, it has learning_rate"),
        ({"max_norm": 1.0}, {}, ValueError, "max_norm: adamw has no such hyperparameter"),
        ({"b2": 1.0}, {}, ValueError, r"b2: expected a number in \[0, 1\), got 1.0"),
        ({"b2": jnp.float32(1.0)}, {}, ValueError, r"b2: expected a number in \[0, 1\)"),
        ({"b2": jnp.bfloat16(0.5)}, {}, ValueError, "b2: a bfloat16 was rounded"),
        ({"b2": jnp.ones(2)}, {}, ValueError, "b2: expected a scalar, got shape"),
        ({"b2": "0.5"}, {}, TypeError, "b2: expected a number"),
        ({"b2": None}, {}, TypeError, "b2: expected a number"),
        ({"b2": lambda count: 0.5}, {}, TypeError, "b2: replace_hyperparams takes numbers"),
        ({"eps": 0.5}, {}, ValueError, "eps: it follows a schedule"),
        ({}, {"x": {"scale": 1.0}}, ValueError, "groups: there is no group 'x'; the groups are"),
        ({}, {"a": {"b2": 0.5}}, ValueError, "groups: 'a': b2: the group 'a' has no such"),
        ({}, {"a": {"b1": 0.5}}, ValueError, "groups: 'a': b1: it follows a schedule"),
        ({}, {"a": {"scale": -1}}, ValueError, "groups: 'a': scale: expected a number finite"),
        ({}, {"a": {"learning_rate": 1}}, ValueError, "groups: 'a': learning_rate: the group 'a'"),
        ({}, [jr.Group("a", scale=1)], TypeError, 'groups: expected a mapping such as {"group": {'),
        ({}, {"a": 1.0}, TypeError, 'groups: \'a\': expected a mapping .*"scale": 2.0}, got 1.0'),
        ({}, {"a": ["scale"]}, TypeError, "groups: 'a': expected a mapping such as"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_named(values, groups, error, message):
    optimizer = make("eps", lambda count: 0.5, **GROUPED)
    floats = floats_of(optimizer)
    with pytest.raises(error, match=f"^{message}"):
        hyperparams.replace(optimizer.spec, floats, values, groups)


# What is allowed.

OUT_OF_RANGE = {
    "learning_rate": (-1e-3, np.inf, np.nan),
    "weight_decay": (-0.1, np.inf),
    "momentum": (-0.5, 1.1),
    "b1": (-0.1, 1.0),
    "b2": (1.0, 1.5),
    "eps": (-1e-8, np.inf),
    "eps_root": (-1e-8, -np.inf),
    "trust_coefficient": (0.0, -0.001, np.inf),
    "min_norm": (-1e-12, np.inf),
    "max_ratio": (0.0, -1.0, np.nan),
    "max_norm": (0.0, -1.0, np.nan),
    "max_value": (0.0, -1.0, np.nan),
    "ema_decay": (-0.1, 1.0),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, all in OUT_OF_RANGE.items() for value in all]
)
def test_numbers_out_of_range_are_errors_wherever_they_come_from(name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected a number "):
        make(name, value)
    with pytest.raises(ValueError, match=f"^{name}: expected a number "):
        make(name, jnp.float32(value))
    with pytest.raises(ValueError, match=f"^{name}, from its schedule: expected a number "):
        floats_of(make(name, lambda count: value))


@pytest.mark.parametrize("name", ["max_norm", "max_value", "max_ratio"])
def test_an_infinite_bound_bounds_nothing(name):
    assert floats_of(make(name, np.inf))[slot_of(name)] == np.inf


@pytest.mark.parametrize(
    "name", ["momentum", "b1", "b2", "eps", "eps_root", "min_norm", "ema_decay"]
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits_are_refused_where_they_change_the_meaning(name, dtype):
    message = f"^{name}.*: a {jnp.dtype(dtype).name} was rounded already"
    value = jnp.asarray(0.5, dtype)
    with pytest.raises(ValueError, match=message):
        make(name, value)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda value: floats_of(make(name, value)))(value)
    with pytest.raises(ValueError, match=message):
        floats_of(make(name, lambda count: jnp.asarray(0.5, dtype)))


@pytest.mark.parametrize(
    "name",
    ["learning_rate", "weight_decay", "max_norm", "max_value", "trust_coefficient", "max_ratio"],
)
def test_sixteen_bits_are_taken_where_they_only_lose_digits(name):
    assert floats_of(make(name, jnp.bfloat16(0.5)))[slot_of(name)] == 0.5
    assert floats_of(make(name, lambda count: jnp.bfloat16(0.5)))[slot_of(name)] == 0.5


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda count: jnp.ones(2), ValueError, r": the schedule returned shape \(2,\), wanted a"),
        (lambda count: np.ones((1, 1)), ValueError, r": the schedule returned shape \(1, 1\)"),
        (lambda count: None, TypeError, ", from its schedule: expected a number or a schedule"),
        (lambda count: True, TypeError, ", from its schedule: expected a number or a schedule"),
        (lambda count: count > 3, TypeError, ", from its schedule: expected a real number"),
    ],
)
def test_what_a_schedule_returns_is_checked(name, result, error, message):
    with pytest.raises(error, match=f"^{name}{message}"):
        jax.jit(floats_of, static_argnums=0)(make(name, result), 0)


def test_the_schedule_of_a_group_is_named():
    optimizer = jr.adamw(0.1, groups=[jr.Group("a", b1=lambda count: jnp.ones(2))])
    with pytest.raises(ValueError, match="groups: 'a': b1: the schedule returned shape"):
        floats_of(optimizer)

    def build(value):
        jr.adamw(0.1, groups=[jr.Group("a", b1=lambda count: value * count)])

    with pytest.raises(
        ValueError, match="groups: 'a': b1: the schedule closes over a traced value"
    ):
        jax.jit(build)(1.0)


@pytest.mark.parametrize("name", ["learning_rate", "b2", "eps", "max_norm"])
def test_vmap_over_numbers_is_a_loop(name):
    params = {"w": jnp.ones((2, 3))}
    grads = {"w": jnp.full((2, 3), 3.0)}

    def update(value):
        optimizer = make(name, value)
        return optimizer.update(grads, optimizer.init(params), params)[0]["w"]

    values = jnp.asarray([0.25, 0.5, 0.75], jnp.float32)
    together = jax.jit(jax.vmap(update))(values)
    for got, value in zip(together, values, strict=True):
        np.testing.assert_array_equal(got, jax.jit(update)(value))


def test_optax_contract_clips_as_optax_does():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32), "b": jnp.ones(5)}
    ours = jr.sgd(0.5, momentum=0.9, max_norm=1.5, max_value=0.25, backend="xla")
    theirs = optax.chain(
        optax.clip_by_global_norm(1.5), optax.clip(0.25), optax.sgd(0.5, momentum=0.9)
    )
    state, optax_state = ours.init(params), theirs.init(params)
    for factor in (0.1, 1.0, 10.0):
        grads = jax.tree.map(lambda x, f=factor: f * x, params)
        updates, state = ours.update(grads, state, params)
        wanted, optax_state = theirs.update(grads, optax_state, params)
        for key in params:
            np.testing.assert_allclose(updates[key], wanted[key], rtol=1e-6, atol=1e-7)


def test_inject_hyperparams_traces_the_numbers_of_all_options():
    params = {"w": jnp.full(4, 2.0)}
    groups = [jr.Group("w", scale=0.5)]
    injected = optax.inject_hyperparams(jr.sgd)(0.5, max_norm=1.0, max_value=0.25, groups=groups)
    state = injected.init(params)
    assert {"learning_rate", "max_norm", "max_value"} <= state.hyperparams.keys()
    update = jax.jit(injected.update)
    # The norm is 4: the bound 1 leaves 0.5 of each element, max_value 0.25 of that.
    updates, state = update(params, state, params)
    np.testing.assert_allclose(updates["w"], -0.5 * 0.5 * 0.25, rtol=1e-6)
    state.hyperparams["max_norm"] = jnp.asarray(0.25)
    updates, state = update(params, state, params)
    np.testing.assert_allclose(updates["w"], -0.5 * 0.5 * 0.125, rtol=1e-6)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("ema_decay", 0.9),
        ("loss_scale", jr.StaticLossScale(8)),
        ("accumulate", jr.Accumulate(2)),
        ("metrics", "grad_norm"),
    ],
)
def test_optax_contract_refuses_what_only_works_in_place(option, value):
    params = {"w": jnp.ones(2)}
    state = jr.adamw(0.1, mask="weights").init(params)
    optimizer = jr.adamw(0.1, mask="weights", **{option: value})
    for call in (
        lambda: optimizer.init(params),
        lambda: optimizer.update(params, state, params),
    ):
        with pytest.raises(ValueError, match=f"^{option}: .*jr.TrainState"):
            call()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ema_debias": True}, ValueError, "ema_debias: needs an average of the weights"),
        ({"ema_decay": 0.9, "ema_debias": 1}, TypeError, "ema_debias: expected a bool, got 1"),
        ({"loss_scale": 1024.0}, TypeError, "loss_scale: expected a jr.DynamicLossScale, a jr.Sta"),
        ({"accumulate": 4}, TypeError, "accumulate: expected a jr.Accumulate or None, got 4"),
        ({"metrics": "loss"}, ValueError, "metrics: expected names of grad_norm, leaves, param_no"),
        ({"metrics": ["leaves", 3]}, ValueError, "metrics: expected names of .*got 3"),
        ({"metrics": 3}, TypeError, "metrics: expected a name or a list of names, got 3"),
    ],
)
def test_options_that_make_no_sense_are_named(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        jr.adamw(0.1, **options)


def test_accumulate_takes_a_positive_int():
    assert jr.Accumulate(4) == jr.Accumulate(4)
    for every in (0, -1, 2**31):
        with pytest.raises(ValueError, match="every: expected an int from 1"):
            jr.Accumulate(every)
    for every in (2.0, True, "2"):
        with pytest.raises(TypeError, match="every: expected an int"):
            jr.Accumulate(every)


def test_metrics_are_a_set_of_names():
    spec = jr.adamw(0.1, metrics=["update_norm", "leaves", "leaves"]).spec
    assert spec.metrics == ("leaves", "update_norm")
    assert spec == jr.adamw(0.1, metrics=("leaves", "update_norm")).spec
    assert jr.adamw(0.1, metrics="leaves").spec.norms
    assert jr.adamw(0.1, max_norm=1.0).spec.norms
    assert not jr.adamw(0.1, metrics=["param_norm", "update_norm"]).spec.norms
    # LARS has them anyway; LAMB's are of what the moments give.
    assert jr.lars(0.1).spec.norms
    assert not jr.lamb(0.1).spec.norms


def test_a_spec_says_which_series_a_state_needs():
    plan = MemoryPlan.build({"w": jax.ShapeDtypeStruct((32,), jnp.float32)})
    options = {"ema_decay": 0.9, "accumulate": jr.Accumulate(2)}
    config = jr.adamw(0.1, **options).spec.config
    assert (config.moments, config.ema, config.accumulator) == (2, True, True)
    assert plan.total_bytes(config) == 5 * 128
    assert jr.sgd(0.1).spec.config.series == 1
    moments = [f(0.1).spec.config.moments for f in (jr.lars, jr.lamb, jr.lion)]
    assert moments == [1, 2, 1]
