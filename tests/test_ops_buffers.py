"""Which buffers the ops leave alone, which they update in place, and what compiles nothing."""

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
    assert_same_bits,
    expected_update,
    kinds_on_native_backends,
    make_floats,
    make_layout,
    native_backends,
    put,
    put_all,
    random_leaves,
    to_arena,
)
from ops_steps import LAYOUT, assert_states, operands, step_fn
from states import count_compilations
from whole_step import whole_step, whole_step_operands

from jaxrenaissance import ops, scalars


@pytest.mark.parametrize("jit", [True, False])
def test_operands_of_a_whole_step_that_are_not_donated_stay(jit, backend):
    given = whole_step_operands(LAYOUT, np.random.default_rng(7))
    placed = jax.tree.map(jnp.array, given)
    fn = whole_step(LAYOUT, backend)
    jax.block_until_ready((jax.jit(fn) if jit else fn)(*placed))
    jax.tree.map(assert_same_bits, placed, given)


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
