"""What the ops refuse when they are traced or lowered: by the name of the argument."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import BFLOAT16, make_layout

from jaxrenaissance import ops

LAYOUT = make_layout([(5,), (2, 33), (), (31,)], groups=[0, 1, 1, 0], stacked=[0, 1, 0, 0])
ARENA = jax.ShapeDtypeStruct((LAYOUT.size,), np.float32)
FLOATS = jax.ShapeDtypeStruct((64,), np.float32)
INTS = jax.ShapeDtypeStruct((16,), np.int32)
LEAVES = [jax.ShapeDtypeStruct(shape, np.float32) for shape in LAYOUT.shapes]


def like(x, shape=None, dtype=None):
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, dtype or x.dtype)


def changed(leaves, i, **change):
    return [like(x, **change) if i == k else x for k, x in enumerate(leaves)]


def call(name, backend="auto", **change):
    """Traces an op with one operand changed."""
    given = {
        "floats": FLOATS,
        "ints": INTS,
        "weights": ARENA,
        "arena": ARENA,
        "moments": (ARENA, ARENA),
        "gradients": LEAVES,
        "leaves": LEAVES,
    } | {k: v for k, v in change.items() if k not in ("kind", "dtypes")}
    options = {"backend": backend}
    calls = {
        "update": lambda floats, weights, moments, gradients: ops.update(
            change.get("kind", "adam"), LAYOUT, floats, weights, moments, gradients, **options
        ),
        "prologue": lambda floats, ints: ops.prologue(floats, ints, **options),
        "statistics": lambda ints, gradients: ops.statistics(LAYOUT, ints, gradients, **options),
        "pack": lambda leaves: ops.pack(LAYOUT, leaves, **options),
        "unpack": lambda arena: ops.unpack(
            LAYOUT, arena, change.get("dtypes", [np.float32] * 4), **options
        ),
    }
    arguments = {
        "update": ("floats", "weights", "moments", "gradients"),
        "prologue": ("floats", "ints"),
        "statistics": ("ints", "gradients"),
        "pack": ("leaves",),
        "unpack": ("arena",),
    }[name]
    return jax.eval_shape(calls[name], *(given[k] for k in arguments))


WRONG = {
    "arena of another size": ("unpack", {"arena": like(ARENA, (LAYOUT.size + 1,))}, "arena: got"),
    "arena of rank 2": ("unpack", {"arena": like(ARENA, (1, LAYOUT.size))}, "arena: got"),
    "arena of half": ("unpack", {"arena": like(ARENA, dtype=np.float16)}, "arena: got float16"),
    "integer dtype": ("unpack", {"dtypes": [np.int32] * 4}, r"dtypes\[0\]: got int32"),
    "wide dtype": (
        "unpack",
        {"dtypes": [np.float32, np.float64, np.float32, np.float32]},
        r"dtypes\[1\]: got float64, wanted one of float32, bfloat16, float16",
    ),
    "leaf too few": ("pack", {"leaves": LEAVES[:-1]}, "leaves: got 3 leaves, wanted 4"),
    "leaf of another shape": (
        "pack",
        {"leaves": changed(LEAVES, 1, shape=(33, 2))},
        r"leaves\[1\]: got float32\[33, 2\], wanted .*\[2, 33\]",
    ),
    "integer leaf": (
        "pack",
        {"leaves": changed(LEAVES, 3, dtype=np.int8)},
        r"leaves\[3\]: got int8\[31\], wanted float32 or bfloat16 or float16\[31\]",
    ),
    "gradient of another shape": (
        "update",
        {"gradients": changed(LEAVES, 2, shape=(1,))},
        r"gradients\[2\]: got float32\[1\]",
    ),
    "complex gradient": (
        "statistics",
        {"gradients": changed(LEAVES, 0, dtype=np.complex64)},
        r"gradients\[0\]: got complex64",
    ),
    "gradient arena of another size": (
        "statistics",
        {"gradients": like(ARENA, (7,))},
        r"gradients: got float32\[7\]",
    ),
    "gradient arena of bfloat16": (
        "update",
        {"gradients": like(ARENA, dtype=BFLOAT16)},
        "gradients: got bfloat16",
    ),
    "integer weights": ("update", {"weights": like(ARENA, dtype=np.int32)}, "weights: got int32"),
    "short moment": ("update", {"moments": (ARENA, like(ARENA, (32,)))}, r"moments\[1\]: got"),
    "moment too few": ("update", {"moments": (ARENA,)}, "moments: adam has 2, got 1"),
    "moment too many": ("update", {"kind": "sgd"}, "moments: sgd has 0, got 2"),
    "kind": ("update", {"kind": "adamw"}, "kind: got 'adamw', wanted one of sgd"),
    "floats of part of a row": ("update", {"floats": like(FLOATS, (63,))}, r"floats: got .*\[63\]"),
    "floats of too few groups": ("update", {"floats": like(FLOATS, (48,))}, r"wanted \[64\]"),
    "floats without a group": ("prologue", {"floats": like(FLOATS, (32,))}, "floats: got"),
    "floats of bfloat16": ("prologue", {"floats": like(FLOATS, dtype=BFLOAT16)}, "floats: got bf"),
    "ints of another size": ("prologue", {"ints": like(INTS, (15,))}, r"ints: got int32\[15\]"),
    "unsigned ints": ("statistics", {"ints": like(INTS, dtype=np.uint32)}, "ints: got uint32"),
    "backend": ("unpack", {"backend": "gpu"}, "backend: got 'gpu', wanted one of auto"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_operand_is_named_when_it_is_traced(case):
    name, change, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call(name, **change)


def test_what_is_right_is_not_refused():
    for name in "update", "prologue", "statistics", "pack", "unpack":
        call(name)


def test_a_float64_arena_wants_float64_scalars():
    layout = make_layout([(3,)], dtype="float64")
    with jax.enable_x64(True):
        arena = jax.ShapeDtypeStruct((layout.size,), np.float64)
        update = lambda f: ops.update("sgd", layout, f, arena, (), arena, backend="auto")  # noqa: E731
        with pytest.raises(ValueError, match="floats: got float32"):
            update(FLOATS)


def test_operands_that_are_no_arrays_are_named():
    with pytest.raises(ValueError, match=r"leaves\[2\]: got a float, wanted float32"):
        ops.pack(
            LAYOUT, [*(np.zeros(x.shape, np.float32) for x in LEAVES[:2]), 1.0, 2.0], backend="xla"
        )
    with pytest.raises(ValueError, match="arena: got a NoneType"):
        ops.unpack(LAYOUT, None, [np.float32] * 4, backend="auto")


@pytest.mark.native
def test_a_backend_of_another_platform_is_refused_when_it_is_lowered():
    with jax.default_device(jax.devices("cpu")[0]):
        arena = jnp.zeros(LAYOUT.size)
        for run in jax.jit, lambda fn: fn:
            with pytest.raises(ValueError, match=r"backend: 'cuda' was asked for.* runs on cpu"):
                run(lambda x: ops.unpack(LAYOUT, x, [np.float32] * 4, backend="cuda"))(arena)


def lowered_for_tpu(backend):
    def fn(floats, ints, arena, *leaves):
        new = ops.pack(LAYOUT, leaves, backend=backend)
        ints = ops.statistics(LAYOUT, ints, leaves, backend=backend)
        floats, ints = ops.prologue(floats, ints, backend=backend)
        w, _, _ = ops.update("sgd", LAYOUT, floats, arena, (), new, backend=backend)
        many = jax.vmap(lambda x: ops.unpack(LAYOUT, x, [np.float32] * 4, backend=backend))
        return w, many(jnp.stack([w, w])), ints

    traced = jax.jit(fn).trace(FLOATS, INTS, ARENA, *LEAVES)
    return traced.lower(lowering_platforms=("tpu",)).as_text()


def test_auto_is_plain_xla_where_there_is_no_native_backend():
    assert "jaxrenaissance" not in re.sub(r'loc\(.*|"jit.*', "", lowered_for_tpu("auto"))
    assert "custom_call" not in lowered_for_tpu("auto")
    for backend in "cpu", "cuda":
        with pytest.raises(ValueError, match=f"backend: '{backend}' was asked for"):
            lowered_for_tpu(backend)


@pytest.mark.native
def test_auto_is_the_native_backend_of_the_platform():
    arena = jax.ShapeDtypeStruct((LAYOUT.size,), np.float32)
    unpack = jax.jit(lambda x: ops.unpack(LAYOUT, x, [np.float32] * 4, backend="auto"))
    text = unpack.trace(arena).lower(lowering_platforms=("cpu",)).as_text()
    assert text.count("jaxrenaissance_unpack_v1") == 1
