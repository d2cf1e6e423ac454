"""Loss scaling: when the scale changes, what is divided by it, what a skipped step leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from states import make_step

import jaxrenaissance as jr

COUNTERS = ("step", "calls", "skipped", "consecutive_skips")


def make(optimizer=jr.sgd, learning_rate=0.5, params=None, **options):
    params = {"w": jnp.zeros(3)} if params is None else params
    return jr.TrainState.create(params, optimizer(learning_rate, **options))


# 200 steps against integers: everything is a power of two, so every value is exact.

STEPS, LARGEST = 200, 16
RULE = {"initial": 2.0**12, "growth_interval": 5, "minimum": 2.0**9, "maximum": 2.0**15}


class Exponents:
    """A loss scale of 2**scale that trains one weight, in integers.

    A gradient of 2**k overflows float16 where k + scale reaches 16. The weight counts in units of
    2**-30.
    """

    def __init__(self, every):
        self.scale, self.good, self.every = 12, 0, every
        self.step = self.calls = self.skipped = self.consecutive_skips = self.weight = 0
        self.cycle = []

    def call(self, k, injected):
        self.calls += 1
        self.cycle.append(None if injected or k + self.scale >= LARGEST else 2**k)
        if len(self.cycle) < self.every:
            return
        if None in self.cycle:
            self.skipped += 1
            self.consecutive_skips += 1
            self.scale, self.good = max(self.scale - 1, 9), 0
        else:
            # Learning rate 2**-10, and the mean divides by 2 or 4 at most.
            self.weight -= 2**20 * sum(self.cycle) // self.every
            self.step += 1
            self.consecutive_skips = 0
            self.good += 1
            if self.good == 5:
                self.scale, self.good = min(self.scale + 1, 15), 0
        self.cycle = []


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("clipped", [False, True])
def test_200_steps_with_random_overflows_are_those_of_a_model_in_integers(every, clipped, backend):
    optimizer = jr.sgd(
        2.0**-10,
        loss_scale=jr.DynamicLossScale(**RULE, growth=2, backoff=0.5),
        accumulate=jr.Accumulate(every) if every > 1 else None,
        # The norm is measured, in a pass of its own, and never reached.
        max_norm=1e6 if clipped else None,
        backend=backend,
    )
    state = jr.TrainState.create({"w": jnp.zeros(())}, optimizer, compute_dtype=jnp.float16)
    rng = np.random.default_rng({1: 10, 4: 3}[every])
    exponents = np.where(rng.random(STEPS) < 0.8, rng.integers(-3, 1, STEPS), 4)
    injected = rng.random(STEPS) < {1: 0.1, 4: 0.05}[every]
    gradient = np.where(injected, np.nan, 2.0**exponents).astype(np.float16)

    def body(state, g):
        grads = jax.grad(lambda p: state.scale_loss(p["w"] * g))(state.compute_params)
        state = state.apply_gradients(grads)
        return state, state.metrics | {"weight": state.weights[0][0]}

    _, seen = jax.jit(lambda s, g: jax.lax.scan(body, s, g))(state, jnp.asarray(gradient))
    model, wanted = Exponents(every), []
    for k, bad in zip(exponents, injected, strict=True):
        model.call(int(k), bad)
        wanted.append([getattr(model, name) for name in COUNTERS] + [model.scale, model.weight])
    wanted = np.array(wanted)
    for i, name in enumerate(COUNTERS):
        np.testing.assert_array_equal(seen[name], wanted[:, i], err_msg=name)
    np.testing.assert_array_equal(seen["loss_scale"], 2.0 ** wanted[:, -2])
    np.testing.assert_array_equal(seen["weight"], wanted[:, -1] * 2.0**-30)
    # The run has in it what it is about.
    scales, skips = wanted[:, -2], wanted[:, 3]
    assert (np.diff(scales) > 0).any()
    assert (np.diff(scales) < 0).any()
    assert scales.min() == 9
    assert scales.max() == (15 if every == 1 else 12)
    assert skips.max() >= 2


def test_the_scale_grows_after_exactly_its_interval_and_a_skip_starts_it_anew(backend):
    rule = jr.DynamicLossScale(initial=8, growth_interval=3, growth=4, backoff=0.25, maximum=64)
    state, step = make(loss_scale=rule, backend=backend), make_step()
    scales = []
    for value in [1.0, 1.0, np.nan, *[1.0] * 9]:
        state = step(state, {"w": jnp.full(3, value)})
        scales.append(float(state.loss_scale))
    assert scales == [8, 8, 2, 2, 2, 8, 8, 8, 32, 32, 32, 64]


@pytest.mark.parametrize(
    ("minimum", "maximum"), [(1.0, 2.0**24), (2.0**-100, 2.0**127), (0.75, 1000.0)]
)
def test_the_scale_stays_within_its_bounds_and_never_reaches_inf_or_zero(minimum, maximum, backend):
    rule = jr.DynamicLossScale(
        initial=maximum, growth_interval=1, growth=2.0**20, minimum=minimum, maximum=maximum
    )
    state = make(loss_scale=rule, backend=backend)

    @jax.jit
    def run(state, values):
        def body(state, value):
            state = state.apply_gradients({"w": jnp.full(3, value)})
            return state, state.loss_scale

        return jax.lax.scan(body, state, values)

    values = jnp.asarray([1.0] * 3 + [jnp.inf] * 250 + [1.0] * 20)
    state, scales = run(state, values)
    assert np.isfinite(scales).all()
    assert (scales[:3] == maximum).all()
    assert scales[252] == np.float32(minimum)
    assert scales[-1] == np.float32(maximum)
    assert scales.min() == np.float32(minimum)
    assert int(state.skipped) == 250
    # Not skipped for ever: training goes on at the minimum.
    assert int(state.consecutive_skips) == 0


def test_a_static_scale_never_changes_by_itself(backend):
    state, step = make(loss_scale=jr.StaticLossScale(1024), backend=backend), make_step()
    for value in (1024.0, jnp.nan, 2048.0):
        state = step(state, {"w": jnp.full(3, value)})
        assert float(state.loss_scale) == 1024
    np.testing.assert_array_equal(state.params["w"], -0.5 - 1.0)
    state = state.replace_hyperparams(loss_scale=256.0)
    for value in (256.0, jnp.inf):
        state = step(state, {"w": jnp.full(3, value)})
        assert float(state.loss_scale) == 256
    np.testing.assert_array_equal(state.params["w"], -2.0)
    assert int(state.skipped) == 2
    assert step._cache_size() == 1


def test_a_scale_that_is_set_divides_from_then_on_and_compiles_nothing(backend):
    rule = jr.DynamicLossScale(initial=2.0**10, growth_interval=2)
    state, step = make(loss_scale=rule, backend=backend), make_step()
    state = step(state, {"w": jnp.full(3, 2.0**10)})
    state = state.replace_hyperparams(loss_scale=2.0**4)
    assert float(state.scale_loss(jnp.float32(3.0))) == 48
    state = step(state, {"w": jnp.full(3, 2.0**4)})
    np.testing.assert_array_equal(state.params["w"], -1.0)
    assert float(state.metrics["loss_scale"]) == 2.0**4  # Counted from the new scale on.
    state = step(state, {"w": jnp.full(3, 2.0**4)})
    np.testing.assert_array_equal(state.params["w"], -1.5)
    assert float(state.metrics["loss_scale"]) == 2.0**5
    assert step._cache_size() == 1


# Unscaling.

PATHS = {
    "plain": {},
    "max_norm": {"max_norm": 1e3},
    "max_value": {"max_value": 1e3},
    "accumulate": {"accumulate": 2},
    "accumulate_max_norm": {"accumulate": 2, "max_norm": 1e3, "max_value": 1e3},
}


@pytest.mark.parametrize("name", PATHS)
def test_gradients_are_unscaled_exactly_once(name, backend):
    options = dict(PATHS[name])
    every = options.pop("accumulate", 1)
    if every > 1:
        options["accumulate"] = jr.Accumulate(every)
    state = make(loss_scale=jr.StaticLossScale(2.0**7), backend=backend, **options)
    step = make_step()
    for value in (1.0, 3.0, -8.0, 2.0):
        state = step(state, {"w": jnp.full(3, value * 2.0**7)})
    np.testing.assert_array_equal(state.params["w"], -0.5 * (-2.0) / every)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_scaled_loss_has_at_least_float32(dtype, backend):
    loss = jnp.asarray(6.0, dtype)
    state = make(loss_scale=jr.StaticLossScale(2.0**15), backend=backend)
    scaled = jax.jit(lambda s, x: s.scale_loss(x))(state, loss)
    assert scaled.dtype == jnp.float32
    assert float(scaled) == 6 * 2.0**15  # 196608, more than float16 holds
    plain = make(backend=backend).scale_loss(loss)
    assert plain.dtype == loss.dtype
    assert float(plain) == 6


def test_float16_gradients_too_small_to_be_seen_are_seen_with_a_scale(backend):
    params = {"w": jnp.ones(4)}

    def train(loss_scale):
        state = jr.TrainState.create(
            params,
            jr.sgd(2.0**20, loss_scale=loss_scale, backend=backend),
            compute_dtype=jnp.float16,
        )

        @jax.jit
        def step(state):
            def loss(p):
                y = (p["w"] * jnp.float16(2.0**-12)).astype(jnp.float32) * 2.0**-16
                return state.scale_loss(jnp.sum(y))

            return state.apply_gradients(jax.grad(loss)(state.compute_params))

        return step(state).params["w"]

    np.testing.assert_array_equal(train(None), 1.0)
    np.testing.assert_array_equal(train(jr.StaticLossScale(2.0**15)), 1 - 2.0**-8)


# Skipping.


def test_after_a_first_step_that_overflows_the_next_is_the_first_for_every_group(backend):
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2)), "c": jnp.ones(5)}
    optimizer = jr.adam(
        0.1,
        loss_scale=jr.DynamicLossScale(),
        groups=[jr.Group("b", b1=0.5, b2=0.8), jr.Group("c", learning_rate=0.2, b2=0.9999)],
        max_norm=1e9,
        ema_decay=0.5,
        backend=backend,
    )
    state, step = jr.TrainState.create(params, optimizer), make_step()
    grads = jax.tree.map(lambda x: x * 2.0**14, params)
    state = step(state, grads | {"c": grads["c"].at[4].set(jnp.inf)})
    assert [int(n) for n in (state.step, state.calls, state.skipped)] == [0, 1, 1]
    assert bool(state.has_nan)
    state = step(state, grads)
    assert not bool(state.has_nan)
    # Adam's first update is its learning rate, whatever the gradient.
    wanted = {"a": 0.9, "b": 0.9, "c": 0.8}
    for path, value in wanted.items():
        np.testing.assert_allclose(state.params[path], value, rtol=1e-6)
        np.testing.assert_allclose(state.ema_params[path], (1 + value) / 2, rtol=1e-6)


@pytest.mark.parametrize("every", [1, 2])
def test_a_state_saved_after_a_skipped_step_resumes_exactly(every, backend):
    optimizer = jr.adamw(
        0.1,
        mask="weights",
        loss_scale=jr.DynamicLossScale(initial=8, growth_interval=2),
        max_norm=1.0,
        ema_decay=0.9,
        ema_debias=True,
        accumulate=jr.Accumulate(every) if every > 1 else None,
        backend=backend,
    )
    state, step = make(optimizer=lambda rate: optimizer), make_step()
    values = [2.0, jnp.nan, 3.0, jnp.inf, 5.0, -7.0, 1.0, 4.0]
    states = [state]
    for value in values:
        states.append(step(states[-1], {"w": jnp.asarray([1.0, value, -2.0])}))
    # In the middle of a cycle, too.
    for start in (2, 4, 5):
        saved, treedef = jax.tree.flatten(states[start])
        loaded = jax.tree.unflatten(treedef, [jnp.asarray(np.array(x)) for x in saved])
        for value in values[start:]:
            loaded = step(loaded, {"w": jnp.asarray([1.0, value, -2.0])})
        for got, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(states[-1]), strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert step._cache_size() == 1


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"ema_decay": 0.5}, {"max_value": 1.0}])
def test_a_nan_gates_without_a_loss_scale(options, backend):
    state, step = make(backend=backend, **options), make_step()
    new = step(state, {"w": jnp.asarray([1.0, 1.0, jnp.nan])})
    np.testing.assert_array_equal(new.params["w"], 0.0)
    assert [bool(new.has_nan), int(new.step), int(new.skipped)] == [True, 0, 1]


# What is refused.


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ({"initial": 0.0}, "initial"),
        ({"initial": jnp.inf}, "initial"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"growth_interval": 2.5}, "growth_interval"),
        ({"growth": 0.5}, "growth"),
        ({"backoff": 0.0}, "backoff"),
        ({"backoff": 1.5}, "backoff"),
        ({"minimum": 0.0}, "minimum"),
        ({"minimum": 2.0**20}, "minimum|initial"),
        ({"maximum": 2.0**10}, "maximum|initial"),
        ({"maximum": jnp.inf}, "maximum"),
    ],
)
def test_rules_that_make_no_sense_are_refused_by_name(numbers, name):
    with pytest.raises((TypeError, ValueError), match=name):
        jr.DynamicLossScale(**numbers)


@pytest.mark.parametrize("scale", [0.0, -1.0, jnp.inf, jnp.nan])
def test_static_scales_that_make_no_sense_are_refused(scale):
    with pytest.raises(ValueError, match="scale"):
        jr.StaticLossScale(scale)


def test_a_dynamic_scale_needs_the_finite_check():
    with pytest.raises(ValueError, match=r"loss_scale.*skip_nonfinite|skip_nonfinite.*loss_scale"):
        jr.sgd(0.1, loss_scale=jr.DynamicLossScale(), skip_nonfinite=False)
    jr.sgd(0.1, loss_scale=jr.StaticLossScale(8), skip_nonfinite=False)


def test_equal_rules_and_other_numbers_share_one_program(backend):
    step = make_step()
    for initial in (2.0**4, 2.0**8):
        rule = jr.DynamicLossScale(initial=initial, growth_interval=int(initial))
        state = step(make(loss_scale=rule, backend=backend), {"w": jnp.full(3, initial)})
        np.testing.assert_array_equal(state.params["w"], -0.5)
    assert step._cache_size() == 1


@pytest.mark.parametrize("scale", [0.5, 16.0, 2.0**20])
def test_a_scale_that_is_set_within_a_cycle_is_that_of_the_whole_cycle(scale, backend):
    rule = jr.DynamicLossScale(initial=4, minimum=1, maximum=2.0**15, growth_interval=2)
    optimizer = jr.sgd(1.0, loss_scale=rule, accumulate=jr.Accumulate(2), backend=backend)
    state = jr.TrainState.create({"w": jnp.ones(40)}, optimizer)

    def call(state):
        return state.apply_gradients({"w": jnp.full(40, 0.25 * float(state.loss_scale))})

    state = call(call(state))  # One good update: the next would let the scale grow.
    np.testing.assert_array_equal(state.params["w"], 0.75)
    state = call(state).replace_hyperparams(loss_scale=scale)
    bounded = min(max(scale, 1.0), 2.0**15)
    assert float(state.loss_scale) == bounded
    state = call(state)
    np.testing.assert_array_equal(state.params["w"], 0.5)
    # Updates are counted from the new scale on: it grows after two, not after one.
    assert float(state.loss_scale) == bounded
    assert float(call(call(state)).loss_scale) == min(2 * bounded, 2.0**15)
