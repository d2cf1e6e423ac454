"""The compiled handlers: calls that do not fit are refused, and programs keep their own layouts."""

import threading

import jax
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    assert_same_bits,
    make_layout,
    native_backends,
    put_all,
    random_leaves,
    to_leaves,
)

from jaxrenaissance import ops
from jaxrenaissance import scalars as s

SIZE, FLOAT32 = 64, 0  # elements, the dtype's code
SEGMENT = (0, 40, 0, 0, 0)  # start, size, leaf, offset in it, group
WORKSPACE = jax.ShapeDtypeStruct((4,), np.int32)  # of one segment and partial


def unpack(layout, dtype="float32", **attributes):
    """A compiled call of the handler `unpack` for one leaf, with these words as its layout."""
    attributes = {"members": np.int64(1), "shared": np.array([-1])} | attributes
    leaf = jax.ShapeDtypeStruct((40,), np.dtype(dtype))
    call = jax.ffi.ffi_call("jaxrenaissance_unpack_v1", [leaf])
    words = np.array(layout, np.int64)
    function = jax.jit(lambda arena: call(arena, layout=words, **attributes)[0])
    return function.lower(jax.ShapeDtypeStruct((SIZE,), np.float32)).compile()


@native_backends
def test_a_call_that_fits(backend):
    arena = np.arange(SIZE, dtype=np.float32)
    run = unpack((SIZE, FLOAT32, *SEGMENT))
    for shift in (0, 1):
        np.testing.assert_array_equal(run(*put_all([arena + shift])), arena[:40] + shift)


@native_backends
@pytest.mark.parametrize(
    ("layout", "attributes", "message"),
    [
        ((SIZE,), {}, "the layout is malformed"),
        ((SIZE, FLOAT32, *SEGMENT[:-1]), {}, "the layout is malformed"),
        ((SIZE, FLOAT32, *SEGMENT, 64, 1, 0, 0, 0), {}, "segment 1 does not fit the arena"),
        ((SIZE, FLOAT32, 32, 40, 0, 0, 0), {}, "segment 0 does not fit the arena"),
        ((SIZE, FLOAT32, -32, 40, 0, 0, 0), {}, "segment 0 does not fit the arena"),
        ((SIZE, FLOAT32, 0, 0, 0, 0, 0), {}, "segment 0 does not fit the arena"),
        ((SIZE, FLOAT32, 0, 40, -1, 0, 0), {}, "segment 0 does not fit the arena"),
        ((SIZE, FLOAT32, 0, 40, 0, 0, -1), {}, "segment 0 does not fit the arena"),
        ((SIZE, 4, *SEGMENT), {}, "the layout is malformed"),
        ((SIZE, -1, *SEGMENT), {}, "the layout is malformed"),
        ((SIZE, FLOAT32, *SEGMENT), {"members": np.int64(-1)}, "members is missing or negative"),
        ((SIZE, FLOAT32, *SEGMENT), {"shared": np.int64(0)}, "attribute shared is missing"),
    ],
)
def test_attributes_that_are_wrong_do_not_compile(layout, attributes, message, backend):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxrenaissance: {message}"):
        unpack(layout, **attributes)


@native_backends
@pytest.mark.parametrize(
    ("layout", "dtype", "message"),
    [
        ((SIZE, FLOAT32, 0, 40, 1, 0, 0), "float32", "segments name more leaves than there are"),
        ((SIZE, FLOAT32, *SEGMENT), "int32", "leaf 0 has a dtype that is not supported"),
        ((2 * SIZE, FLOAT32, *SEGMENT), "float32", "the arena has another size or type"),
        ((SIZE, 1, *SEGMENT), "float32", "the arena has another size or type"),
        ((SIZE, 2, *SEGMENT), "float32", "the arena has another size or type"),
        ((SIZE, 3, *SEGMENT), "float32", "the arena has another size or type"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_every_time(layout, dtype, message, backend):
    run = unpack(layout, dtype)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxrenaissance: {message}"):
            jax.block_until_ready(run(*put_all([np.zeros(SIZE, np.float32)])))


@native_backends
@pytest.mark.parametrize(
    ("index", "attributes", "message"),
    [
        (np.zeros(1, np.float32), {"shards": np.int64(1)}, "the index is not an int32"),
        (np.zeros(2, np.int32), {"shards": np.int64(1)}, "the index is not an int32"),
        (np.zeros((), np.int32), {}, "attribute shards is missing"),
        (np.zeros((), np.int32), {"shards": np.int64(0)}, "shards is not positive"),
    ],
)
def test_pieces_that_are_none_are_refused(index, attributes, message, backend):
    call = jax.ffi.ffi_call(
        "jaxrenaissance_pack_piece_v1", [jax.ShapeDtypeStruct((SIZE,), np.float32)]
    )
    attributes = {"members": np.int64(1), "shared": np.array([-1])} | attributes
    layout = np.array([SIZE, FLOAT32, *SEGMENT])
    run = jax.jit(lambda *arrays: call(*arrays, layout=layout, **attributes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxrenaissance: {message}"):
        jax.block_until_ready(run(*put_all([index, np.zeros(40, np.float32)])))


@native_backends
@pytest.mark.parametrize("code", [2, 3])
def test_only_pack_and_unpack_have_arenas_of_two_bytes(code, backend):
    ints = jax.ShapeDtypeStruct((s.INTS,), np.int32)
    call = jax.ffi.ffi_call("jaxrenaissance_statistics_v1", [ints], input_output_aliases={0: 0})
    attributes = {name: np.int64(x) for name, x in {"members": 1, "from_arena": 0}.items()}
    attributes |= {"shared": np.array([-1]), "layout": np.array([SIZE, code, *SEGMENT])}
    run = jax.jit(lambda *arrays: call(*arrays, first_leaf=np.int64(0), **attributes))
    message = "jaxrenaissance: only pack and unpack work with an arena of bfloat16 or float16"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(*put_all([s.initial_ints(), np.zeros(40, np.float32)])))


@native_backends
def test_sums_want_to_know_the_segments_of_their_workspaces(backend):
    shapes = [jax.ShapeDtypeStruct((s.HEADER + 2 * s.ROW,), np.float32), WORKSPACE]
    call = jax.ffi.ffi_call(
        "jaxrenaissance_finish_update_v1", shapes, input_output_aliases={0: 0, 1: 1}
    )
    attributes = {"members": np.int64(1), "shared": np.array([-1])}
    run = jax.jit(lambda *arrays: call(*arrays, **attributes))
    message = "jaxrenaissance: attribute segments is missing"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(*put_all([np.zeros(x.shape, x.dtype) for x in shapes])))


@native_backends
@pytest.mark.parametrize(
    ("floats", "dtype", "message"),
    [
        (s.HEADER + 2 * s.ROW, "int32", "leaf 0 has a dtype that is not supported"),
        (s.HEADER - 1, "float32", "floats are not a header and rows"),
    ],
)
def test_changes_of_what_is_wrong_before_the_weights_are_read(floats, dtype, message, backend):
    leaves = [jax.ShapeDtypeStruct((32,), np.float32)] * 3
    call = jax.ffi.ffi_call("jaxrenaissance_changes_sgd_v1", leaves)
    attributes = {
        name: np.int64(x) for name, x in {"members": 1, "weights": 1, "ratios": 0}.items()
    }
    segments = [(32 * i, 32, i, 0, 0) for i in range(3)]
    layout = np.array([96, FLOAT32, *np.ravel(segments)])
    shared = np.array([-1])
    run = jax.jit(lambda *arrays: call(*arrays, layout=layout, shared=shared, **attributes))
    gradients, weights = [np.zeros(32, dtype)] * 3, [np.zeros(32, np.float32)] * 3
    arguments = put_all([np.zeros(floats, np.float32), *gradients, *weights])
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxrenaissance: {message}"):
        jax.block_until_ready(run(*arguments))


@native_backends
def test_programs_of_one_op_keep_their_own_layouts(backend):
    rng = np.random.default_rng(0)
    float32 = np.dtype(np.float32)
    runs = []
    for sizes, dtypes in [
        ((3, 70), (float32, BFLOAT16)),
        ((3, 70), (BFLOAT16, float32)),
        ((70, 3), (float32, float32)),
        ((1,) * 700, (float32, BFLOAT16) * 350),
    ]:
        layout = make_layout([(size,) for size in sizes])
        runs.append((layout, dtypes, _unpack(layout, dtypes, backend)))
    for _ in range(2):
        for layout, dtypes, run in runs:
            arena = rng.standard_normal(layout.size).astype(np.float32)
            for got, wanted, dtype in zip(
                run(*put_all([arena])), to_leaves(layout, arena), dtypes, strict=True
            ):
                assert_same_bits(got, wanted.astype(dtype))


def _unpack(layout, dtypes, backend):
    return jax.jit(lambda arena: ops.unpack(layout, arena, dtypes, backend=backend))


@native_backends
def test_several_threads_are_first_to_execute_a_program(backend):
    rng = np.random.default_rng(1)
    layout = make_layout([(size,) for size in range(1, 300)])
    dtypes = [BFLOAT16 if size % 2 else np.dtype(np.float32) for size in range(1, 300)]
    device = jax.devices(backend)[0]
    every = [random_leaves(layout, rng, dtypes) for _ in range(8)]
    for _ in range(5):  # a program each
        pack = jax.jit(lambda *leaves: ops.pack(layout, leaves, backend=backend))
        run = pack.lower(*jax.device_put(every[0], device)).compile()
        start, arenas = threading.Barrier(len(every)), {}

        def execute(i, run=run, start=start, arenas=arenas):
            leaves = jax.block_until_ready(jax.device_put(every[i], device))
            start.wait()
            arenas[i] = run(*leaves)

        threads = [threading.Thread(target=execute, args=(i,)) for i in range(len(every))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, leaves in enumerate(every):
            for got, wanted in zip(to_leaves(layout, arenas[i]), leaves, strict=True):
                assert_same_bits(got, np.asarray(wanted).astype(np.float32))
