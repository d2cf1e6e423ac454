"""The ops under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    assert_close,
    assert_same_bits,
    expected_update,
    kinds_on_native_backends,
    put,
    random_leaves,
    to_arena,
    to_leaves,
)
from jax.sharding import AxisType, PartitionSpec
from ops_steps import LAYOUT, assert_states, operands, step_fn, wanted_states
from whole_step import assert_whole_step, whole_step, whole_step_operands

from jaxrenaissance import native, ops, scalars


@kinds_on_native_backends
@pytest.mark.parametrize("disable_jit", [False, True])
def test_without_jit(kind, disable_jit, backend):
    carry, gradients = operands(kind)
    wanted = wanted_states(kind, carry[2], gradients)
    carry, gradients = jax.device_put((carry, gradients))
    with jax.disable_jit(disable_jit):
        for leaves in gradients:
            carry = step_fn(kind, backend)(carry, leaves)
        dtypes = [np.dtype(np.float32), BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)]
        leaves = ops.unpack(LAYOUT, carry[2][0], dtypes, backend=backend)
        packed = ops.pack(LAYOUT, leaves, backend=backend)
    assert_states(carry[2], wanted)
    assert [x.dtype for x in leaves] == dtypes
    np.testing.assert_array_equal(packed, to_arena(LAYOUT, leaves))
    np.testing.assert_allclose(packed, wanted[0], rtol=2.0**-8, atol=1e-5)


def test_under_scan(backend):
    carry, gradients = operands()
    wanted = wanted_states("adam", carry[2], gradients)
    step = step_fn("adam", backend)
    many = jax.tree.map(lambda *xs: np.stack(xs), *gradients)
    run = jax.jit(lambda c, xs: jax.lax.scan(lambda c, x: (step(c, x), c[1]), c, xs))
    (_, ints, states), before = run(*jax.device_put((carry, many)))
    assert_states(states, wanted)
    assert ints[scalars.STEP] == 3
    # What a step was given is not touched by the steps after it.
    np.testing.assert_array_equal(before[:, scalars.STEP], [0, 1, 2])


def test_under_while_and_cond(backend):
    carry, gradients = operands()
    wanted = wanted_states("adam", carry[2], [gradients[0]] * 2)
    step = step_fn("adam", backend)

    @jax.jit
    def run(carry, leaves):
        def body(state):
            i, carry = state
            return i + 1, jax.lax.cond(i % 2 == 1, step, lambda c, _: c, carry, leaves)

        return jax.lax.while_loop(lambda state: state[0] < 4, body, (0, carry))[1]

    _, ints, states = run(*jax.device_put((carry, gradients[0])))
    assert_states(states, wanted)
    assert ints[scalars.STEP] == 2


def test_under_checkpoint(backend):
    carry, gradients = operands()
    wanted = wanted_states("adam", carry[2], gradients[:1])
    step = jax.jit(jax.checkpoint(step_fn("adam", backend)))
    assert_states(step(*jax.device_put((carry, gradients[0])))[2], wanted)

    # A loss that is recomputed, around leaves that were unpacked outside.
    @jax.jit
    def descend(floats, weights):
        def loss(leaves):
            return sum(jnp.sum(jnp.sin(x) ** 2) for x in leaves)

        leaves = ops.unpack(LAYOUT, weights, [np.float32] * 4, backend=backend)
        grads = jax.grad(jax.checkpoint(loss))(leaves)
        return ops.update("sgd", LAYOUT, floats, weights, (), grads, backend=backend)[0]

    floats, _, (weights, *_) = carry
    gradient = 2 * np.sin(weights.astype(np.float64)) * np.cos(weights.astype(np.float64))
    wanted = expected_update("sgd", LAYOUT, [weights], gradient, factor=0.5)
    assert_close(descend(put(floats), put(weights)), wanted[0])


def test_strict_promotion_and_x64_leave_dtypes_alone(backend):
    carry, gradients = operands()
    wanted = wanted_states("adam", carry[2], gradients[:1])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        carry, leaves = jax.device_put((carry, gradients[0]))
        for source in leaves, ops.pack(LAYOUT, leaves, backend=backend):
            floats, ints, states = jax.jit(step_fn("adam", backend))(carry, source)
            assert_states(states, wanted)
            assert {x.dtype.name for x in (floats, *states)} == {"float32"}
            assert ints.dtype == np.int32
            assert not any(x.weak_type for x in (floats, ints, *states))
        for x, dtype in zip(
            ops.unpack(LAYOUT, carry[2][0], [x.dtype for x in leaves], backend=backend),
            [x.dtype for x in leaves],
            strict=True,
        ):
            assert x.dtype == dtype


# shard_map over the host's devices.


def make_mesh(backend):
    devices = jax.devices("cpu") if backend == "cpu" else jax.devices()
    assert len(devices) == (8 if devices[0].platform == "cpu" else len(devices))
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def test_shard_map_over_replicated_arenas(backend):
    mesh, replicated = make_mesh(backend), PartitionSpec()
    carry, gradients = operands()
    wanted = wanted_states("adam", carry[2], gradients)
    step = jax.jit(
        jax.shard_map(
            step_fn("adam", backend), mesh=mesh, in_specs=replicated, out_specs=replicated
        )
    )
    for leaves in gradients:
        carry = step(carry, leaves)
    assert_states(carry[2], wanted)
    for shard in carry[2][0].addressable_shards:
        np.testing.assert_array_equal(shard.data, carry[2][0])


@pytest.mark.parametrize("source", ["leaves", "arena"])
def test_shard_map_over_replicated_arenas_and_a_mean_of_gradients(source, backend):
    mesh = make_mesh(backend)
    carry, _ = operands()
    rng = np.random.default_rng(1)
    shards = [random_leaves(LAYOUT, rng, [np.dtype("float32")]) for _ in range(mesh.size)]
    mean = [np.mean([x.astype(np.float64) for x in xs], 0) for xs in zip(*shards, strict=True)]
    wanted = wanted_states("adam", carry[2], [mean])
    stacked = [np.stack(xs) for xs in zip(*shards, strict=True)]

    def local(carry, stacked):
        leaves = [x[0] for x in stacked]
        if source == "arena":
            leaves = ops.pack(LAYOUT, leaves, backend=backend)
        return step_fn("adam", backend)(carry, jax.lax.pmean(leaves, "data"))

    step = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
        )
    )
    assert_states(step(carry, stacked)[2], wanted)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_gradients_of_each_device(check_vma, backend):
    # Scalars and states are the same everywhere, the results are not; one device skips.
    mesh = make_mesh(backend)
    carry, _ = operands()
    rng = np.random.default_rng(2)
    shards = [random_leaves(LAYOUT, rng) for _ in range(mesh.size)]
    shards[-1][3][30] = np.nan
    stacked = [np.stack(xs) for xs in zip(*shards, strict=True)]

    def local(carry, stacked):
        _, ints, states = step_fn("adam", backend)(carry, [x[0] for x in stacked])
        return ints[None], [x[None] for x in states]

    def mapped(out_specs):
        in_specs = PartitionSpec(), PartitionSpec("data")
        return jax.jit(
            jax.shard_map(
                local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
            )
        )

    ints, states = mapped(PartitionSpec("data"))(carry, stacked)
    np.testing.assert_array_equal(ints[:, scalars.STEP], [1] * (mesh.size - 1) + [0])
    for i in range(mesh.size - 1):
        assert_states([x[i] for x in states], wanted_states("adam", carry[2], [shards[i]]))
    for x, y in zip(states, carry[2], strict=True):
        assert_same_bits(x[mesh.size - 1], y)
    if check_vma:  # The results are known to vary over the devices.
        with pytest.raises(ValueError, match="data"):
            mapped(PartitionSpec())(carry, stacked)


def test_shard_map_of_vmap(backend):
    mesh = make_mesh(backend)
    arenas = np.random.default_rng(3).normal(size=(2 * mesh.size, LAYOUT.size)).astype(np.float32)

    def local(arenas):
        unpack = jax.vmap(lambda x: ops.unpack(LAYOUT, x, [np.float32] * 4, backend=backend))
        return jax.vmap(lambda *x: ops.pack(LAYOUT, x, backend=backend))(*unpack(arenas))

    spec = PartitionSpec("data")
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    for got, arena in zip(np.array(jax.jit(run)(arenas)), arenas, strict=True):
        np.testing.assert_array_equal(got, to_arena(LAYOUT, to_leaves(LAYOUT, arena)))


# All ops of a step.


@pytest.mark.parametrize("disable_jit", [False, True])
def test_a_whole_step_without_jit(disable_jit, backend):
    given = whole_step_operands(LAYOUT, np.random.default_rng(4))
    with jax.disable_jit(disable_jit):
        got = whole_step(LAYOUT, backend)(*jax.device_put(given))
    assert_whole_step(LAYOUT, jax.tree.map(np.array, got), given)


@pytest.mark.parametrize("x64", [False, True])
def test_a_whole_step_promotes_nothing(x64, backend):
    given = whole_step_operands(LAYOUT, np.random.default_rng(5))
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        got = jax.jit(whole_step(LAYOUT, backend))(*jax.device_put(given))
    floats, ints, *others = got
    assert ints.dtype == np.int32
    assert {x.dtype.name for x in (floats, *jax.tree.leaves(others))} == {"float32"}
    assert not any(x.weak_type for x in jax.tree.leaves(got))
    assert_whole_step(LAYOUT, jax.tree.map(np.array, got), given)


def test_a_whole_step_in_shard_map_with_gradients_of_each_device(backend):
    mesh, spec = make_mesh(backend), PartitionSpec("data")
    rng = np.random.default_rng(6)
    floats, ints, states, _, taus = whole_step_operands(LAYOUT, rng)
    shards = [random_leaves(LAYOUT, rng) for _ in range(mesh.size)]
    shards[-1][1][1, 32] = np.inf
    stacked = [np.stack(xs) for xs in zip(*shards, strict=True)]

    def local(stacked, *others):
        *others, taus = others
        got = whole_step(LAYOUT, backend)(*others, [x[0] for x in stacked], taus)
        return jax.tree.map(lambda x: x[None], got)

    replicated = PartitionSpec()
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec, replicated, replicated, replicated, replicated),
        out_specs=spec,
    )
    got = jax.tree.map(np.array, jax.jit(run)(stacked, floats, ints, states, taus))
    np.testing.assert_array_equal(got[1][:, scalars.STEP], [1] * (mesh.size - 1) + [0])
    for i in range(mesh.size - 1):
        own = jax.tree.map(lambda x, i=i: x[i], got)
        assert_whole_step(LAYOUT, own, (floats, ints, states, shards[i], taus))
    for x, y in zip(got[2][:4], states[:4], strict=True):
        assert_same_bits(x[mesh.size - 1], y)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_a_whole_step_without_a_module_is_that_of_the_xla_backend(many, x64, monkeypatch):
    monkeypatch.setattr(native, "available", lambda platform: False)
    monkeypatch.setattr(native, "warn_fallback_once", lambda platform: None)
    with jax.enable_x64(x64):
        operands = jax.device_put(whole_step_operands(LAYOUT, np.random.default_rng(9)))
        if many:
            operands = jax.tree.map(lambda x: jnp.stack([x, x]), operands)

        def run(backend):
            step = whole_step(LAYOUT, backend)
            return jax.jit(jax.vmap(step) if many else step)(*operands)

        got, wanted = run("auto"), run("xla")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
