"""The ops under JAX's transformations, and what they refuse."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    KINDS,
    MOMENTS,
    NUMBERS,
    assert_close,
    assert_same_bits,
    expected_update,
    kinds_on_native_backends,
    make_floats,
    make_layout,
    native_backends,
    put,
    put_all,
    random_leaves,
    random_states,
    to_arena,
    to_leaves,
)
from jax.sharding import AxisType, PartitionSpec
from states import count_compilations
from whole_step import assert_whole_step, whole_step, whole_step_operands

from jaxrenaissance import native, ops, scalars
from jaxrenaissance.workspaces import workspace_size

# Without an empty leaf: JAX 0.11's shard_map on the CPU breaks down over arrays without elements.
LAYOUT = make_layout([(5,), (2, 33), (), (31,)], groups=[0, 1, 1, 0], stacked=[0, 1, 0, 0])


@functools.cache
def step_fn(kind, backend, layout=LAYOUT):
    def step(carry, gradients):
        floats, ints, (weights, *moments) = carry
        ints = ops.statistics(layout, ints, gradients, backend=backend)
        floats, ints = ops.prologue(floats, ints, backend=backend)
        weights, moments, _ = ops.update(
            kind, layout, floats, weights, moments, gradients, backend=backend
        )
        return floats, ints, [weights, *moments]

    return step


def operands(kind="adam", seed=0, dtype="float32"):
    """Scalars, counters and states, and the gradients of three steps."""
    rng = np.random.default_rng(seed)
    carry = make_floats(factor=0.5), scalars.initial_ints(), random_states(LAYOUT, kind, rng)
    return carry, [random_leaves(LAYOUT, rng) for _ in range(3)]


def wanted_states(kind, states, gradients):
    for i, leaves in enumerate(gradients):
        arena = to_arena(LAYOUT, leaves)
        states = expected_update(kind, LAYOUT, states, arena, step=i + 1, factor=0.5)
    return states


def assert_states(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        assert_close(x, y)


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


@pytest.mark.parametrize("jit", [True, False])
def test_operands_of_a_whole_step_that_are_not_donated_stay(jit, backend):
    given = whole_step_operands(LAYOUT, np.random.default_rng(7))
    placed = jax.tree.map(jnp.array, given)
    fn = whole_step(LAYOUT, backend)
    jax.block_until_ready((jax.jit(fn) if jit else fn)(*placed))
    jax.tree.map(assert_same_bits, placed, given)


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


@native_backends
def test_a_donated_whole_step_copies_none_of_its_arenas(backend):
    # Without the lerps, whose targets are states that are also results.
    floats, ints, states, leaves, _ = whole_step_operands(LAYOUT, np.random.default_rng(8))

    def step(floats, ints, states, leaves):
        weights, m, v, ema, accumulator = states
        ints, total, workspace = ops.accumulate(
            LAYOUT, ints, accumulator, leaves, flag=True, norms=True, backend=backend
        )
        floats, ints, *_ = ops.finish(
            floats, ints, [workspace], [len(LAYOUT.segments)], gradients=1, backend=backend
        )
        weights, moments, ema = ops.update(
            "adam", LAYOUT, floats, weights, (m, v), total, ema=ema, gated=True, backend=backend
        )
        return floats, ints, [weights, *moments, ema, total]

    operands = jax.tree.map(jnp.array, (floats, ints, states, leaves))
    compiled = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*operands).compile().as_text()
    assert copies(compiled, [floats, ints, *states]) == []
    assert len(re.findall(r"(may|must)-alias", compiled.splitlines()[0])) == 7


# Buffers and compilations.


@kinds_on_native_backends
@pytest.mark.parametrize("jit", [True, False])
def test_arrays_that_are_not_donated_stay(kind, jit, backend):
    carry, gradients = operands(kind)
    before = jax.tree.map(np.copy, (carry, gradients))
    placed = jax.tree.map(jnp.array, (carry, gradients))
    step = step_fn(kind, backend)
    step = jax.jit(step) if jit else step
    jax.block_until_ready([step(placed[0], leaves) for leaves in placed[1]])
    jax.tree.map(assert_same_bits, placed, before)


@pytest.mark.parametrize("kind", KINDS)
def test_one_array_may_be_several_operands(kind, backend):
    _, _, (weights, *_) = operands(kind)[0]
    states = [np.abs(weights)] * (1 + MOMENTS[kind])
    wanted = expected_update(kind, LAYOUT, states, states[0], factor=0.5)

    def fn(floats, x):
        moments = [x] * MOMENTS[kind]
        new, moments, _ = ops.update(kind, LAYOUT, floats, x, moments, x, backend=backend)
        return [new, *moments]

    for step in jax.jit(fn), jax.jit(fn, donate_argnums=1):
        assert_states(step(put(make_floats(factor=0.5)), jnp.array(states[0])), wanted)


def donated_step(backend):
    """unpack, the gradient of a nonlinear loss, statistics, prologue, update; state donated."""
    layout = make_layout(
        [(17,), (8, 17), (17, 17), (17, 3), (3,)], groups=[1, 0, 0, 0, 1], stacked=0
    )

    def loss(leaves, x):
        bias, first, second, third, last = leaves
        hidden = jnp.tanh(x @ first + bias)
        hidden = hidden + jax.nn.gelu(hidden @ second)
        return jnp.mean(jnp.square(hidden @ third + last))

    def step(floats, ints, weights, m, v, x):
        dtypes = [BFLOAT16 if len(shape) == 2 else np.dtype("f4") for shape in layout.shapes]
        leaves = ops.unpack(layout, weights, dtypes, backend=backend)
        value, grads = jax.value_and_grad(loss)(leaves, x)
        ints = ops.statistics(layout, ints, grads, backend=backend)
        floats, ints = ops.prologue(floats, ints, backend=backend)
        weights, moments, _ = ops.update(
            "adam", layout, floats, weights, (m, v), grads, backend=backend
        )
        return (floats, ints, weights, *moments), value

    rng = np.random.default_rng(0)
    weights = to_arena(layout, random_leaves(layout, rng))
    state = make_floats(NUMBERS), scalars.initial_ints(), weights, 0 * weights, 0 * weights
    x = rng.normal(size=(4, 8)).astype(np.float32)
    return jax.jit(step, donate_argnums=range(5)), jax.tree.map(jnp.array, state), put(x)


def copies(compiled, buffers):
    """Lines of an HLO text that copy an array of the size of one of these."""
    names = {"float32": "f32", "int32": "s32"}
    sizes = {re.escape(f"{names[x.dtype.name]}[{x.size}]") for x in buffers}
    assert all(re.search(size, compiled) for size in sizes)
    copy = re.compile(rf"= \(?({'|'.join(sizes)})\S* copy")
    return [line for line in compiled.splitlines() if copy.search(line)]


@native_backends
def test_a_donated_step_of_a_nonlinear_model_copies_nothing(backend):
    step, state, x = donated_step(backend)
    compiled = step.lower(*state, x).compile().as_text()
    assert copies(compiled, state) == []
    assert len(re.findall(r"(may|must)-alias", compiled.splitlines()[0])) == 5
    if backend == "cpu":  # Without donation XLA copies, and this is how it writes that.
        kept = jax.jit(step.__wrapped__).lower(*state, x).compile().as_text()
        assert len(copies(kept, state)) >= 5


def test_a_donated_state_trains_in_its_own_buffers(backend):
    step, state, x = donated_step(backend)
    state, first = step(*state, x)
    where = sorted(a.unsafe_buffer_pointer() for a in state)
    for _ in range(30):
        old = state
        state, loss = step(*state, x)
        assert all(a.is_deleted() for a in old)
    assert sorted(a.unsafe_buffer_pointer() for a in state) == where
    assert float(loss) < 0.5 * float(first)
    assert int(state[1][scalars.STEP]) == 31


def test_new_numbers_and_an_equal_layout_compile_nothing(backend):
    carry, gradients = operands()
    layouts = [make_layout([(3,), (0,), (2, 33)], groups=[0, 1, 0]) for _ in range(2)]
    assert layouts[0] is not layouts[1]
    rng = np.random.default_rng(0)
    jitted = jax.jit(step_fn("adam", backend))

    def run(layout, lr):
        leaves = put_all(random_leaves(layout, rng))
        arena = ops.pack(layout, leaves, backend=backend)
        floats = put(make_floats([n | {"lr": lr} for n in NUMBERS]))
        ops.unpack(layout, arena, [x.dtype for x in leaves], backend=backend)
        ints = ops.statistics(layout, put(scalars.initial_ints()), leaves, backend=backend)
        floats, ints = ops.prologue(floats, ints, backend=backend)
        w, _, _ = ops.update("momentum", layout, floats, arena, (arena,), leaves, backend=backend)
        new = jitted(jax.device_put(carry), put_all(gradients[0]))
        return jax.block_until_ready((w, new))

    run(layouts[0], 0.1)
    with count_compilations() as compiled:
        run(layouts[0], 0.2)
        run(layouts[1], 0.3)
    assert compiled == []


# Derivatives.


def differentiable_calls(backend):
    floats = jnp.asarray(make_floats())
    arena = jnp.asarray(random_states(LAYOUT, "sgd", np.random.default_rng(0))[0])
    ints = jnp.asarray(scalars.initial_ints())
    leaves = [jnp.asarray(x) for x in random_leaves(LAYOUT, np.random.default_rng(0))]
    words = jnp.zeros(workspace_size(LAYOUT), jnp.int32)
    segments, taus = [len(LAYOUT.segments)], jnp.ones(2)
    return {
        "unpack": lambda x: ops.unpack(LAYOUT, arena * x, [np.float32] * 4, backend=backend)[0],
        "pack": lambda x: ops.pack(
            LAYOUT, [y * x.astype(y.dtype) for y in leaves], backend=backend
        ),
        "statistics": lambda x: x * ops.statistics(LAYOUT, ints, arena * x, backend=backend)[0],
        "prologue": lambda x: ops.prologue(floats * x, ints, backend=backend)[0],
        "update_sgd": lambda x: ops.update(
            "sgd", LAYOUT, floats, arena * x, (), leaves, backend=backend
        )[0],
        "norms": lambda x: x * ops.norms(LAYOUT, ints, arena * x, flag=True, backend=backend)[0],
        "accumulate": lambda x: ops.accumulate(
            LAYOUT, ints, arena * x, leaves, flag=True, norms=False, backend=backend
        )[1],
        "finish": lambda x: ops.finish(
            floats * x, ints, [words], segments, gradients=1, backend=backend
        )[0],
        "finish_update": lambda x: ops.finish_update(
            floats * x, [words], segments, backend=backend
        ),
        "update_norms_sgd": lambda x: (
            x * ops.update_norms("sgd", LAYOUT, floats, arena * x, (), leaves, backend=backend)[0]
        ),
        "lerp": lambda x: ops.lerp(LAYOUT, taus * x, [arena], None, backend=backend)[0],
    }


DIFFERENTIATED = (
    "unpack",
    "pack",
    "statistics",
    "norms",
    "accumulate",
    "prologue",
    "finish",
    "update_norms_sgd",
    "finish_update",
    "update_sgd",
    "lerp",
)


@native_backends
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_differentiating_is_an_error_that_says_what_to_do(name, backend):
    fn = lambda x: jnp.sum(differentiable_calls(backend)[name](x))  # noqa: E731
    message = rf"jaxrenaissance's {name} cannot be differentiated.*state\.compute_params"
    for derivative in (
        jax.grad(fn),
        jax.jit(jax.grad(fn)),
        lambda x: jax.jvp(fn, (x,), (x,)),
        jax.grad(jax.checkpoint(fn)),
    ):
        with pytest.raises(TypeError, match=message):
            derivative(jnp.float32(1.0))


def test_the_xla_backend_is_differentiable():
    floats, factor = make_floats(factor=0.5), 0.5
    rng = np.random.default_rng(0)
    weights, m = random_states(LAYOUT, "momentum", rng)
    gradient, cotangent = rng.normal(size=(2, LAYOUT.size)).astype(np.float32)

    def fn(weights, gradient):
        w, _, _ = ops.update("momentum", LAYOUT, floats, weights, (m,), gradient, backend="xla")
        leaves = ops.unpack(LAYOUT, w, [np.float32] * 4, backend="xla")
        return jnp.vdot(ops.pack(LAYOUT, leaves, backend="xla"), cotangent)

    dw, dg = jax.jit(jax.grad(fn, (0, 1)))(jnp.asarray(weights), jnp.asarray(gradient))
    ones = [np.ones(shape) for shape in LAYOUT.shapes]
    keep = [x * (1 - 0.1 * 0.3 if i in (0, 3) else 1) for i, x in enumerate(ones)]
    rate = [x * -factor * (0.1 if i in (0, 3) else 0.07) for i, x in enumerate(ones)]
    assert_close(dw, cotangent * to_arena(LAYOUT, keep))
    assert_close(dg, cotangent * to_arena(LAYOUT, rate))


def test_average_bound_sum_and_lerp_are_differentiable_on_the_xla_backend():
    rng = np.random.default_rng(1)
    floats = make_floats([{"lr": 0.5}] * 2, one_minus_ema=0.25, max_value=1.0, loss_scale=2.0)
    weights, ema, accumulator, target = rng.normal(size=(4, LAYOUT.size)).astype(np.float32)
    gradient, cotangent = rng.normal(size=(2, LAYOUT.size)).astype(np.float32)
    taus = jnp.full(2, 0.5)

    def fn(gradient, max_norm):
        ints = jnp.asarray(scalars.initial_ints()).at[scalars.MICRO].set(1)
        ints, total, words = ops.accumulate(
            LAYOUT, ints, jnp.asarray(accumulator), gradient, flag=True, norms=True, backend="xla"
        )
        new, ints, *_ = ops.finish(
            jnp.asarray(floats).at[scalars.MAX_NORM].set(max_norm),
            ints,
            [words],
            [len(LAYOUT.segments)],
            gradients=1,
            backend="xla",
        )
        _, _, average = ops.update(
            "sgd", LAYOUT, new, jnp.asarray(weights), (), total, ema=jnp.asarray(ema), backend="xla"
        )
        (moved,) = ops.lerp(LAYOUT, taus, [jnp.asarray(target)], average, backend="xla")
        return jnp.vdot(moved, cotangent)

    # Two micro-batches and a scale of 2: a factor of 1/4, and less where the norm is bounded.
    total = gradient + accumulator
    counted = to_arena(LAYOUT, to_leaves(LAYOUT, total))  # What the norm is of: no padding.
    norm = np.linalg.norm(counted)
    for max_norm, factor in (np.inf, 0.25), (norm / 8, 0.125):
        dg = jax.jit(jax.grad(fn))(jnp.asarray(gradient), np.float32(max_norm))
        # Through the lerp, the average, the rate, the factor; clamped elements have none.
        wanted = cotangent * 0.5 * 0.25 * -0.5 * factor * (np.abs(total * factor) < 1)
        if max_norm < np.inf:  # And the factor is as 1 / norm, whose derivative is -total / norm^3.
            wanted = wanted - np.vdot(wanted, total) * counted / norm**2
        assert_close(dg, wanted)
