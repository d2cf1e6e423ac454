"""Specs and schedules compare by what they do, so that an equal optimizer compiles nothing anew."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrenaissance as jr
from jaxrenaissance.spec import Schedule, fingerprint

BUILDERS = {
    "constant": lambda x: optax.constant_schedule(x),
    "cosine": lambda x: optax.cosine_decay_schedule(x, 100),
    "exponential": lambda x: optax.exponential_decay(x, 10, 0.5),
    "linear": lambda x: optax.linear_schedule(x, 0.0, 10),
    "piecewise": lambda x: optax.piecewise_constant_schedule(x, {5: 0.1, 10: 0.5}),
    "polynomial": lambda x: optax.polynomial_schedule(x, 0.0, 2, 10),
    "warmup": lambda x: optax.warmup_cosine_decay_schedule(0.0, x, 10, 100),
    "joined": lambda x: optax.join_schedules(
        [optax.linear_schedule(0.0, x, 5), optax.constant_schedule(x)], [5]
    ),
    "onecycle": lambda x: optax.cosine_onecycle_schedule(100, x),
    "sgdr": lambda x: optax.sgdr_schedule(
        [{"init_value": 0.0, "peak_value": x, "decay_steps": 9, "warmup_steps": 2}]
    ),
    "partial": lambda x: functools.partial(_power, x),
    "default": lambda x: lambda count, base=x: base * count,
    "keyword default": lambda x: lambda count, *, base=x: base * count,
    "array": lambda x: _from_table(np.array([x, x / 2])),
    "method": lambda x: _Halving(x).at,
    "callable": lambda x: _Halving(x),
}


def _power(base, count):
    return base**count


def _from_table(table):
    return lambda count: jnp.asarray(table)[jnp.minimum(count, 1)]


class _Halving:
    def __init__(self, start):
        self.start = start

    def __eq__(self, other):
        return isinstance(other, _Halving) and self.start == other.start

    def __hash__(self):
        return hash(self.start)

    def at(self, count):
        return self.start / 2**count

    __call__ = at


@pytest.mark.parametrize("name", BUILDERS)
def test_a_schedule_built_again_is_equal_and_one_of_another_value_is_not(name):
    build = BUILDERS[name]
    first, again, other = (Schedule(build(x)) for x in (0.1, 0.1, 0.2))
    assert first == again
    assert hash(first) == hash(again)
    assert first != other
    assert jr.adamw(build(0.1)).spec == jr.adamw(build(0.1)).spec
    assert jr.adamw(build(0.1)).spec != jr.adamw(build(0.2)).spec


def test_equal_values_of_other_types_are_told_apart():
    values = [1, 1.0, True, "1", b"1", (1,), [1], {1: 1}, np.float32(1), np.array([1]), None, 0.0]
    values += [-0.0, float("nan")]
    keys = [fingerprint(value) for value in values]
    assert all(a != b for i, a in enumerate(keys) for b in keys[:i])
    assert fingerprint(float("nan")) == fingerprint(float("nan"))


def test_other_code_with_equal_closures_is_told_apart():
    x = 0.5
    assert Schedule(lambda count: x * count) != Schedule(lambda count: x + count)


def test_a_module_constant_that_changed_makes_another_schedule():
    # What happens in a notebook: the cell runs again after the constant that it reads has changed.
    namespace = {}
    source = "schedule = lambda count: (lambda c: BASE * c)(count)"
    exec("BASE = 0.1", namespace)
    exec(compile(source, "<cell>", "exec"), namespace)
    first = Schedule(namespace["schedule"])
    exec(compile(source, "<cell>", "exec"), namespace)
    again = Schedule(namespace["schedule"])
    exec("BASE = 0.2", namespace)
    exec(compile(source, "<cell>", "exec"), namespace)
    assert first == again
    assert first != Schedule(namespace["schedule"])


def test_objects_that_do_not_compare_fall_back_to_identity():
    array = jnp.ones(2)
    assert fingerprint(array) == fingerprint(array)
    assert fingerprint(array) != fingerprint(jnp.ones(2))
    one, other = object(), object()
    assert fingerprint((one,)) == fingerprint((one,))
    assert fingerprint((one,)) != fingerprint((other,))


def test_a_schedule_that_refers_to_itself_has_a_fingerprint():
    def build(base):
        def schedule(count):
            return schedule(count - 1) / 2 if count else base

        return schedule

    assert Schedule(build(1.0)) == Schedule(build(1.0))
    assert Schedule(build(1.0)) != Schedule(build(2.0))


def test_a_schedule_over_a_traced_value_is_an_error_with_advice():
    def run(x):
        jr.adamw(optax.constant_schedule(x))

    with pytest.raises(ValueError, match="learning_rate: the schedule closes over a traced value"):
        jax.jit(run)(1.0)


def test_numbers_are_no_part_of_the_spec_and_structure_is():
    base = jr.adamw(1e-3)
    assert base.spec == jr.adamw(3e-4, b1=0.5, weight_decay=0.5, eps=1e-3).spec
    assert hash(base.spec) == hash(jr.adamw(3e-4).spec)
    static, dynamic = jr.StaticLossScale(8), jr.DynamicLossScale(initial=4)
    assert jr.adamw(1e-3, loss_scale=static).spec == jr.adamw(1e-3, loss_scale=dynamic).spec
    two, four = (jr.adamw(1e-3, accumulate=jr.Accumulate(every)) for every in (2, 4))
    assert two.spec == four.spec
    lars = jr.lars(1e-3, min_norm=0, max_ratio=1, trust_coefficient=0.1, trust_ratio_mask=True)
    assert lars.spec == jr.lars(1e-3).spec
    assert jr.lamb(1e-3, max_ratio=10).spec == jr.lamb(1e-3).spec
    assert two != four
    others = [
        jr.adam(1e-3),
        jr.sgd(1e-3),
        jr.sgd(1e-3, momentum=0.9),
        jr.sgd(1e-3, momentum=0.9, nesterov=True),
        jr.sgd(1e-3, decoupled=False),
        jr.adamw(1e-3, skip_nonfinite=False),
        jr.adamw(1e-3, backend="xla"),
        jr.adamw(optax.constant_schedule(1e-3)),
        jr.adamw(1e-3, b1=optax.constant_schedule(0.9)),
        jr.adamw(1e-3, max_norm=1.0),
        jr.adamw(1e-3, max_value=1.0),
        jr.adamw(1e-3, ema_decay=0.9),
        jr.adamw(1e-3, ema_decay=0.9, ema_debias=True),
        jr.adamw(1e-3, loss_scale=jr.StaticLossScale(8)),
        jr.adamw(1e-3, accumulate=jr.Accumulate(2)),
        jr.adamw(1e-3, groups=[jr.Group("a", scale=2)]),
        jr.adamw(1e-3, metrics="grad_norm"),
        jr.lars(1e-3),
        jr.lars(1e-3, nesterov=True),
        jr.lars(1e-3, optax_form=True),
        jr.lamb(1e-3),
        jr.lion(1e-3),
    ]
    specs = [base.spec, *(optimizer.spec for optimizer in others)]
    assert len(set(specs)) == len(specs)


def test_optimizers_compare_with_their_numbers_since_flax_keeps_them_in_its_static_part():
    assert jr.adamw(1e-3) == jr.adamw(1e-3)
    assert hash(jr.adamw(1e-3)) == hash(jr.adamw(1e-3))
    assert jr.adamw(1e-3) != jr.adamw(3e-4)
    assert jr.adamw(1e-3, mask=True) != jr.adamw(1e-3, mask=False)
    assert jr.adamw(1e-3, mask={"a": True}) == jr.adamw(1e-3, mask={"a": True})
    assert jr.lamb(1e-3, trust_ratio_mask=True) == jr.lamb(1e-3, trust_ratio_mask=True)
    assert jr.lamb(1e-3, trust_ratio_mask=True) != jr.lamb(1e-3, trust_ratio_mask=False)
    assert jr.lars(1e-3) != jr.lars(1e-3, max_ratio=10)
    assert jr.adamw(1e-3) != optax.adamw(1e-3)
    assert jr.adamw(jnp.float32(0.5)) == jr.adamw(0.5)

    def compare(x, y):
        assert jr.adamw(x) == jr.adamw(x)
        assert jr.adamw(x) != jr.adamw(y)

    jax.jit(compare)(1e-3, 1e-3)


def test_an_optimizer_is_an_optax_one_that_prints_its_numbers_and_has_no_leaves():
    optimizer = jr.adamw(optax.constant_schedule(1e-3), b1=jnp.float32(0.5), max_norm=1)
    assert isinstance(optimizer, optax.GradientTransformationExtraArgs)
    assert repr(optimizer) == (
        "adamw(learning_rate=constant_schedule.<locals>.<lambda>, b1=0.5, b2=0.999, eps=1e-08, "
        "eps_root=0, weight_decay=0.0001, max_norm=1)"
    )
    assert jax.tree.leaves(optimizer) == []
    assert repr(jr.lars(0.1, nesterov=True)) == (
        "lars_nesterov(learning_rate=0.1, weight_decay=0, trust_coefficient=0.001, eps=0, "
        "momentum=0.9, min_norm=1e-12, max_ratio=100)"
    )
    assert repr(jr.lamb(0.1)) == (
        "lamb(learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-06, eps_root=0, weight_decay=0, "
        "max_ratio=inf)"
    )
    assert repr(jr.lion(0.1)) == "lion(learning_rate=0.1, b1=0.9, b2=0.99, weight_decay=0.001)"
    optimizer = jr.sgd(0.1, loss_scale=jr.StaticLossScale(8), accumulate=jr.Accumulate(2))
    assert repr(optimizer) == (
        "sgd(learning_rate=0.1, weight_decay=0, loss_scale=StaticLossScale(scale=8.0), "
        "accumulate=Accumulate(every=2))"
    )
    printed = []
    jax.jit(lambda x: printed.append(repr(jr.sgd(x))))(0.1)
    assert printed == ["sgd(learning_rate=<float32 scalar>, weight_decay=0)"]


def test_a_spec_without_schedules_can_be_pickled():
    for optimizer in (jr.sgd(0.1, momentum=0.9), jr.lars(0.1), jr.lamb(0.1, trust_ratio_mask=True)):
        assert pickle.loads(pickle.dumps(optimizer)) == optimizer


def test_equal_optimizers_and_other_numbers_compile_nothing():
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}

    def build(scale, b1, weight_decay):
        schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100)
        optimizer = jr.adamw(schedule, b1=b1, weight_decay=weight_decay, backend="xla")
        scaled = jax.tree.map(lambda x: x * scale, params)
        return jr.TrainState.create(scaled, optimizer, compute_dtype="bfloat16")

    step = jax.jit(lambda s: s.apply_gradients(s.compute_params), donate_argnums=0)
    state = step(step(build(1.0, 0.9, 0.1)))
    assert step._cache_size() == 1
    for numbers in ((2.0, 0.8, 0.0), (3.0, 0.7, 0.3)):
        other = build(*numbers)
        assert jax.tree.structure(other) == jax.tree.structure(state)
        step(step(other))
    assert step._cache_size() == 1
    step(jr.TrainState.create(params, jr.adamw(1e-3, backend="xla")))
    assert step._cache_size() == 2


def test_an_optimizer_with_a_schedule_can_be_pickled():
    optimizer = jr.adamw(_halved, mask=True)
    assert pickle.loads(pickle.dumps(optimizer)).spec == optimizer.spec


def _halved(count):
    return 0.5**count
