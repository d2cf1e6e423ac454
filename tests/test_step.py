"""What a step runs: the ops of each set of options, and no buffer for what is not asked for."""

import re

import jax
import numpy as np
import pytest
from states import mlp

import jaxrenaissance as jr

OPTIONS = {
    "plain": ({}, ["statistics", "prologue", "update"], 5),
    "no skips": ({"skip_nonfinite": False}, ["prologue", "update"], 5),
    "max_value": ({"max_value": 1.0}, ["statistics", "prologue", "update"], 5),
    "ema": ({"ema_decay": 0.9}, ["statistics", "prologue", "update"], 6),
    "loss scale": (
        {"loss_scale": jr.DynamicLossScale()},
        ["statistics", "prologue", "update"],
        5,
    ),
    "max_norm": ({"max_norm": 1.0}, ["norms", "finish", "update"], 5),
    "grad_norm": ({"metrics": "grad_norm"}, ["norms", "finish", "update"], 5),
    "leaves": ({"metrics": "leaves"}, ["norms", "finish", "update"], 6),
    "param_norm": ({"metrics": "param_norm"}, ["statistics", "norms", "finish", "update"], 5),
    "update_norm": (
        {"metrics": "update_norm"},
        ["statistics", "prologue", "update_norms", "finish_update", "update"],
        5,
    ),
    "accumulate": (
        {"accumulate": jr.Accumulate(2)},
        ["accumulate", "prologue", "update"],
        6,
    ),
    "accumulate, max_norm, ema": (
        {"accumulate": jr.Accumulate(2), "max_norm": 1.0, "ema_decay": 0.9},
        ["accumulate", "finish", "update"],
        7,
    ),
    "norms of all": (
        {"max_norm": 1.0, "metrics": ["param_norm", "update_norm"]},
        ["norms", "norms", "finish", "update_norms", "finish_update", "update"],
        5,
    ),
}


def equations(jaxpr):
    """All equations of a program in order, also those of a jit inside of it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "jit":
            yield from equations(equation.params["jaxpr"])
        else:
            yield equation


def ops_of(jaxpr):
    """The package's ops in the order of the program; an update of any kind is one name."""
    names = [equation.primitive.name for equation in equations(jaxpr)]
    names = [x.removeprefix("jaxrenaissance_") for x in names if x.startswith("jaxrenaissance_")]
    return [
        re.sub(r"^(update|update_norms|changes)_(sgd|momentum|nesterov|adam|lion)$", r"\1", x)
        for x in names
    ]


@pytest.mark.parametrize("options", OPTIONS)
def test_ops_and_buffers(options):
    arguments, ops, buffers = OPTIONS[options]
    optimizer = jr.adamw(0.1, mask="weights", backend="auto", **arguments)
    state = jr.TrainState.create(mlp(), optimizer)
    jaxpr = jax.make_jaxpr(lambda s, g: s.apply_gradients(g))(state, mlp())
    assert ops_of(jaxpr) == ops
    assert len(jax.tree.leaves(state)) == buffers


LAMB = ["statistics", "prologue", "update_norms", "finish_ratios", "update"]
OTHERS = {
    "lars": (jr.lars, {}, ["norms", "finish", "update"], 5),
    "lars, optax_form, max_norm": (
        jr.lars,
        {"optax_form": True, "max_norm": 1.0, "metrics": ["grad_norm", "param_norm"]},
        ["norms", "finish", "update"],
        5,
    ),
    "lars, accumulate": (
        jr.lars,
        {"accumulate": jr.Accumulate(2)},
        ["accumulate", "norms", "finish", "update"],
        6,
    ),
    "lamb": (jr.lamb, {}, LAMB, 6),
    "lamb, norms": (
        jr.lamb,
        {"max_norm": 1.0, "metrics": "update_norm"},
        ["norms", "finish", *LAMB[2:4], "update_norms", "finish_update", "update"],
        6,
    ),
    "lion": (jr.lion, {}, ["statistics", "prologue", "update"], 4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_ops_and_buffers_of_other_optimizers(name):
    factory, options, ops, buffers = OTHERS[name]
    state = jr.TrainState.create(mlp(), factory(0.1, backend="auto", **options))
    jaxpr = jax.make_jaxpr(lambda s, g: s.apply_gradients(g))(state, mlp())
    assert ops_of(jaxpr) == ops
    assert len(list(equations(jaxpr))) == len(ops)
    assert len(jax.tree.leaves(state)) == buffers


def test_reading_trust_ratios_launches_nothing():
    state = jr.TrainState.create(mlp(), jr.lars(0.1, backend="auto"))
    assert ops_of(jax.make_jaxpr(lambda s: s.trust_ratios())(state)) == []


def test_a_plain_step_is_three_ops_and_nothing_beside_them():
    state = jr.TrainState.create(mlp(), jr.adamw(0.1, mask="weights", backend="auto"))
    jaxpr = jax.make_jaxpr(lambda s, g: s.apply_gradients(g))(state, mlp())
    assert len(list(equations(jaxpr))) == 3


CONTRACT = {
    "adamw": (jr.adamw, {}, ["statistics", "prologue", "changes"]),
    "sgd": (jr.sgd, {}, ["statistics", "prologue", "changes"]),
    "lion, not skipped": (jr.lion, {"skip_nonfinite": False}, ["prologue", "changes"]),
    "adamw, max_norm": (jr.adamw, {"max_norm": 1.0}, ["norms", "finish", "changes"]),
    "lars": (jr.lars, {}, ["pack", "norms", "finish", "changes"]),
    "lamb": (jr.lamb, {}, ["pack", *LAMB[:-1], "changes"]),
}


@pytest.mark.parametrize("name", CONTRACT)
def test_under_optax_contract_all_leaves_are_one_launch(name):
    factory, options, ops = CONTRACT[name]
    params, optimizer = mlp(), factory(0.1, backend="auto", **options)
    jaxpr = jax.make_jaxpr(optimizer.update)(params, optimizer.init(params), params)
    assert ops_of(jaxpr) == ops


def test_both_arenas_take_part_and_the_scalars_advance_once():
    with jax.enable_x64(True):
        params = {"a": np.ones(3, np.float64), "b": np.ones(3, np.float32)}
        optimizer = jr.adamw(
            0.1, max_norm=1.0, metrics=["param_norm", "update_norm"], mask=True, backend="auto"
        )
        state = jr.TrainState.create(params, optimizer)
        jaxpr = jax.make_jaxpr(lambda s, g: s.apply_gradients(g))(state, params)
    two = ["norms"] * 4 + ["finish"] + ["update_norms"] * 2 + ["finish_update"] + ["update"] * 2
    assert ops_of(jaxpr) == two


def test_sums_of_micro_batches_are_looked_at_where_they_add_up():
    optimizer = jr.adamw(0.1, mask="weights", backend="auto")
    state = jr.TrainState.create(mlp(), optimizer)

    def step(state, grads):
        sums = state.accumulate(state.zero_gradients(), grads)
        return state.apply_gradients(sums)

    assert ops_of(jax.make_jaxpr(step)(state, mlp())) == ["accumulate", "prologue", "update"]


@pytest.mark.parametrize(
    ("change", "ops"),
    [
        (lambda s: s.reset_moments("norm/*"), ["lerp"]),
        (lambda s: jr.lerp(s, s, 0.5), ["lerp"]),
        (lambda s: jr.lerp(s, mlp(), 0.5), ["lerp"]),
        (lambda s: s.map_params(lambda x: 2 * x), ["unpack", "pack"]),
        (lambda s: s.with_ema(), []),
    ],
)
def test_changes_from_outside_take_few_launches(change, ops):
    optimizer = jr.adamw(0.1, ema_decay=0.9, mask="weights", backend="auto")
    state = jr.TrainState.create(mlp(), optimizer)
    assert ops_of(jax.make_jaxpr(change)(state)) == ops
