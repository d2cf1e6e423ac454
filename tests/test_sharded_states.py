"""States over several devices give what one device gives."""

import functools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from arenas import native_backends
from jax.sharding import PartitionSpec as P
from oracle import Oracle
from sharded import (
    FORMS,
    HOW,
    SPECS,
    STACKED,
    assert_lies_as_its_form_says,
    assert_replicas_agree,
    assert_same_training,
    batch,
    exact_gradients,
    loss_fn,
    make,
    make_mesh,
    on_backends,
    stepper,
    trained,
    tree,
)
from states import assert_trees_equal

import jaxrenaissance as jr

ALL = ["grad_norm", "leaves", "param_norm", "update_norm"]
TRUSTED = {"weight_decay": 0.1, "weight_decay_mask": True, "trust_ratio_mask": True}

ADAM = {"eps": 1e-3}
"""With less, a rounding of a gradient near 0 would be another update."""

# An optimizer's arguments, and those of `create`.
CASES = {
    "sgd": (jr.sgd, {"learning_rate": 0.1}, {}),
    "momentum": (
        jr.sgd,
        {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
        | {"mask": True, "max_norm": 0.5, "metrics": ALL},
        {"stacked": STACKED},
    ),
    "adamw": (
        jr.adamw,
        {"learning_rate": optax.linear_schedule(0.1, 0.01, 4), "weight_decay": 0.1}
        | {
            **ADAM,
            "max_norm": 0.5,
            "max_value": 0.1,
            "ema_decay": 0.9,
            "ema_debias": True,
            "metrics": ALL,
        }
        | {"loss_scale": jr.DynamicLossScale(initial=8.0, growth_interval=2)}
        | {"groups": [jr.Group("large/*", scale=0.5, b1=0.8), jr.Group("three", scale=2.0)]},
        {"compute_dtype": jnp.float32},
    ),
    "adamw of micro-batches": (
        jr.adamw,
        {"learning_rate": 0.1, "accumulate": jr.Accumulate(2), "max_norm": 0.5, **ADAM}
        | {"ema_decay": 0.9, "metrics": ALL, "mask": True},
        {"stacked": STACKED},
    ),
    "adamw with statistics": (
        jr.adamw,
        {"learning_rate": 0.1, "ema_decay": 0.9, "mask": "weights", **ADAM},
        {"ema_extra": True},
    ),
    "lars": (
        jr.lars,
        {"learning_rate": 1.0, "metrics": ALL, "trust_coefficient": 0.1, **TRUSTED},
        {"stacked": STACKED},
    ),
    "lars in optax's form": (
        jr.lars,
        {"learning_rate": 1.0, "accumulate": jr.Accumulate(2), "optax_form": True}
        | {"trust_coefficient": 0.1, "max_norm": 0.5, **TRUSTED},
        {"stacked": STACKED},
    ),
    "lamb": (
        jr.lamb,
        {"learning_rate": 0.1, "mask": True, "max_norm": 0.5, "metrics": ["update_norm"], **ADAM}
        | {"weight_decay": 0.1, "trust_ratio_mask": True},
        {"stacked": STACKED},
    ),
    "lion of some leaves": (
        jr.lion,
        {"learning_rate": 0.01, "mask": True, "ema_decay": 0.9},
        {"trainable": lambda path, _: path not in ("bias", "kernel")},
    ),
}
FROZEN = ("bias", "kernel")

WAYS = (
    ("replicated", "shard_map"),
    ("zero1", "jit"),
    ("zero1", "shard_map"),
    ("leaves", "jit"),
)
OTHER_WAYS = (
    ("replicated", "jit"),
    ("leaves", "shard_map"),
    *((form, "shard_map without checks") for form in FORMS),
)


def optimizer_of(case, backend):
    factory, options, _ = CASES[case]
    return factory(backend=backend, **options)


def create(case, backend, mesh=None, sharding="replicated", **options):
    own = CASES[case][2] | options
    if "statistics" in case:
        own["extra"] = jr.Packed(tree(2, {"mean": (3,), "var": (2, 5)}), backend=backend)
    return make(optimizer_of(case, backend), mesh, sharding, **own)


def waves_of(case):
    waves = tree(1)
    if "some leaves" in case:
        waves |= dict.fromkeys(FROZEN)
    return waves


@functools.cache
def on_one_device(case, backend):
    return trained(create(case, backend), waves_of(case))


@functools.cache
def over_devices(case, form, how, backend, devices=8):
    state = create(case, backend, make_mesh(backend, (devices,)), form)
    return trained(state, waves_of(case), how)


RUNS = [(case, *way) for case in CASES for way in WAYS]
RUNS += [("adamw", *way) for way in OTHER_WAYS]
runs = on_backends(
    ("case", "form", "how"),
    RUNS,
    on_xla=[
        ("adamw", "zero1", "shard_map"),
        ("lars in optax's form", "zero1", "jit"),
        ("lars in optax's form", "leaves", "jit"),
    ],
)


@runs
def test_each_form_gives_what_one_device_gives(case, form, how, backend):
    state = over_devices(case, form, how, backend)
    assert_same_training(state, on_one_device(case, backend))
    assert int(state.step) == (2 if "accumulate" in CASES[case][1] else 4)
    assert_lies_as_its_form_says(state)


@runs
def test_all_devices_hold_the_same_bits_of_what_they_share(case, form, how, backend):
    """Scalars, norms, ratios, replicated arenas, and parameters that were gathered."""
    state = over_devices(case, form, how, backend)
    assert_replicas_agree((state, state.params, state.metrics))


@on_backends(
    ("case", "form", "devices"),
    [
        ("adamw", "replicated", 3),
        ("adamw", "zero1", 1),
        ("adamw", "zero1", 2),
        ("adamw", "leaves", 1),
        ("adamw", "leaves", 3),
        ("lars in optax's form", "zero1", 3),
        ("lars in optax's form", "leaves", 2),
    ],
    on_xla=[("lars in optax's form", "zero1", 3)],
)
def test_any_number_of_devices_gives_what_one_gives(case, form, devices, backend):
    state = over_devices(case, form, HOW[devices % 2], backend, devices)
    assert_same_training(state, on_one_device(case, backend))
    assert_lies_as_its_form_says(state)


OF_FLOAT64 = {
    "adamw": {"learning_rate": 0.1, "weight_decay": 0.1, **ADAM},
    "lars": {"learning_rate": 1.0, "weight_decay": 0.1, "trust_coefficient": 0.1},
}


@on_backends(
    ("kind", "form"),
    [(kind, form) for kind in OF_FLOAT64 for form in FORMS[1:]],
    on_xla=[("lars", "zero1")],
)
def test_updates_are_those_of_float64(kind, form, backend):
    own = OF_FLOAT64[kind]
    masks = {"adamw": {"mask": True}, "lars": {"weight_decay_mask": True, "trust_ratio_mask": True}}
    optimizer = getattr(jr, kind)(backend=backend, **own, **masks[kind])
    params, waves = tree(0), tree(1)
    stacked = [STACKED.get(path, 0) for path in params]
    oracle = Oracle(kind, jax.tree.leaves(params), stacked=stacked, **own)
    state = make(optimizer, make_mesh(backend), form, stacked=STACKED)
    step = stepper(state, waves, "shard_map" if form == "zero1" else "jit")
    for i in range(4):
        state = step(state, batch(i))
        oracle.step(exact_gradients(oracle.weights, jax.tree.leaves(waves), batch(i)))
    for got, wanted in zip(jax.tree.leaves(state.params), oracle.weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=4e-6)
    if kind == "lars":
        for got, wanted in zip(state.trust_ratios().values(), oracle.ratios, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4)


@pytest.mark.parametrize(("form", "how"), [("zero1", "shard_map"), ("leaves", "jit")])
@native_backends
def test_float64_leaves_lie_beside_float32_ones(form, how, backend):
    with jax.enable_x64(True):
        params = tree(0)
        params |= {path: np.float64(params[path]) for path in ("kernel", "odd", "one")}
        optimizer = jr.lamb(0.1, eps=1e-3, mask=True, max_norm=0.5, metrics=ALL, backend=backend)
        states = [
            trained(make(optimizer, *over, params=params, stacked=STACKED), tree(1), how)
            for over in ((), (make_mesh(backend), form))
        ]
        assert [x.dtype for x in states[1].weights] == [jnp.float32, jnp.float64]
        assert_same_training(states[1], states[0])
        # Only a norm that float32 leaves take part in is rounded to it.
        np.testing.assert_allclose(states[1].params["odd"], states[0].params["odd"], rtol=1e-6)
        assert_replicas_agree(states[1])


@on_backends(
    ("shape", "how"),
    [
        ((), "jit"),
        ((3,), "shard_map"),
        ((33,), "jit"),
        ((0, 8), "jit"),
        ((257,), "shard_map"),
    ],
    on_xla=[((257,), "shard_map")],
)
def test_a_single_leaf_of_any_size(shape, how, backend):
    """In pieces: most are empty, or the last is short."""
    optimizer = jr.adamw(0.1, eps=1e-3, mask=True, max_norm=0.5, backend=backend)
    params, waves = tree(0, {"w": shape}), tree(1, {"w": shape})
    wanted = trained(make(optimizer, params=params), waves)
    state = trained(make(optimizer, make_mesh(backend), "zero1", params=params), waves, how)
    assert_same_training(state, wanted)
    assert_replicas_agree((state, state.params))


@pytest.mark.parametrize("how", HOW[:2])
@pytest.mark.parametrize("form", FORMS)
@native_backends
def test_leaves_without_elements_lie_among_the_others(form, how, backend):
    if how != "jit" and jax.__version_info__ >= (0, 11):
        pytest.skip("JAX 0.11 breaks down over such arrays in a shard_map over devices of the host")
    shapes = {"a": (0, 24), "b": (8, 5), "c": (3, 0), "d": (0,), "e": (33,)}
    specs = {"a": P(None, "data"), "b": P("data")}
    own = {"params": tree(0, shapes), "stacked": {"c": 1}}
    optimizer = jr.lamb(0.1, eps=1e-3, mask=True, max_norm=0.5, metrics=ALL, backend=backend)
    state = make(optimizer, make_mesh(backend), form, specs=specs, **own)
    state = trained(state, tree(1, shapes), how, specs=specs)
    assert_same_training(state, trained(make(optimizer, **own), tree(1, shapes)))
    leaves = state.to_leaves(host=True)
    again = jr.TrainState.from_leaves(leaves, state).map_params(jnp.copy)
    assert_trees_equal(again.to_leaves(host=True), leaves)


def test_a_tree_without_leaves_has_states_in_every_form(backend):
    for form in FORMS:
        state = make(jr.adamw(0.1, backend=backend), make_mesh(backend), form, params={})
        assert int(state.apply_gradients({}).step) == 1


def test_without_a_backend_of_its_own_a_state_is_joined_where_it_lies():
    """Then the program is made for each platform that it may run on."""
    optimizer = jr.lamb(0.1, eps=1e-3, mask=True, metrics=ALL)
    wanted = trained(make(optimizer, stacked=STACKED), tree(1))
    state = make(optimizer, make_mesh("cpu"), "zero1", stacked=STACKED)
    assert_same_training(trained(state, tree(1)), wanted)


@native_backends
def test_leaves_of_a_fully_sharded_model_are_gathered_and_reduced_by_the_user(backend):
    """As FSDP by hand: each device gathers the leaves, and scatters what it adds of gradients."""
    optimizer = jr.adamw(0.1, eps=1e-3, mask=True, max_norm=0.5, backend=backend)
    mesh, waves = make_mesh(backend), tree(1)
    state = make(optimizer, mesh, "leaves")
    axes = {path: list(spec).index("data") for path, spec in SPECS.items()}

    def of_each(fn, leaves):
        names = {"separator": "/", "simple": True}
        return jtu.tree_map_with_path(
            lambda path, x: fn(axes.get(jtu.keystr(path, **names)), x), leaves
        )

    def gathered(axis, x):
        return x if axis is None else jax.lax.all_gather(x, "data", axis=axis, tiled=True)

    def averaged(axis, g):
        return jax.lax.pmean(g, "data") if axis is None else g / 8

    def local_step(state, xs):
        def loss(params):
            return loss_fn(of_each(gathered, params), waves, xs)

        return state.apply_gradients(of_each(averaged, jax.grad(loss)(state.compute_params)))

    specs = state.partition_specs
    where = {"mesh": mesh, "in_specs": (specs, P("data")), "out_specs": specs}
    step = jax.jit(jax.shard_map(local_step, **where))
    for i in range(4):
        state = step(state, batch(i))
    assert_same_training(state, trained(make(optimizer), waves))


@pytest.mark.parametrize("how", HOW[:2])
@pytest.mark.parametrize("form", FORMS)
@native_backends
def test_what_crosses_the_links_in_bfloat16_is_rounded_and_no_more(form, how, backend):
    """Weights in the compute dtype, gradients in the one that was asked for."""
    params = tree(0)
    params |= {path: params[path].astype(jnp.bfloat16) for path in ("odd", "stack")}
    own = {"params": params, "stacked": STACKED, "compute_dtype": {"kernel": jnp.bfloat16}}
    narrow = {} if form == "leaves" else {"reduce_dtype": "bfloat16"}
    optimizer = jr.lamb(0.1, eps=1e-3, mask=True, max_norm=0.5, metrics=ALL, backend=backend)
    state = trained(make(optimizer, make_mesh(backend), form, **own, **narrow), tree(1), how)
    wanted = trained(make(optimizer, **own), tree(1))
    assert_same_training(state, wanted, rtol=0.02, atol=0.02)
    assert_replicas_agree((state, state.params, state.compute_params))
    assert state.compute_params["kernel"].dtype == jnp.bfloat16
    assert_lies_as_its_form_says(state)
