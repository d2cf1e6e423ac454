"""What the ops refuse when they are traced or lowered: by the name of the argument."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import BFLOAT16, make_layout

from jaxrenaissance import ops
from jaxrenaissance.workspaces import workspace_size

LAYOUT = make_layout([(5,), (2, 33), (), (31,)], groups=[0, 1, 1, 0], stacked=[0, 1, 0, 0])
ARENA = jax.ShapeDtypeStruct((LAYOUT.size,), np.float32)
FLOATS = jax.ShapeDtypeStruct((64,), np.float32)
INDEX = jax.ShapeDtypeStruct((), np.int32)
INTS = jax.ShapeDtypeStruct((16,), np.int32)
WORDS = jax.ShapeDtypeStruct((workspace_size(LAYOUT),), np.int32)
SEGMENTS = [len(LAYOUT.segments)]
TAUS = jax.ShapeDtypeStruct((2,), np.float32)
LEAVES = [jax.ShapeDtypeStruct(shape, np.float32) for shape in LAYOUT.shapes]


def like(x, shape=None, dtype=None):
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, dtype or x.dtype)


def changed(leaves, i, **change):
    return [like(x, **change) if i == k else x for k, x in enumerate(leaves)]


def one_piece():
    """The layout of the only piece, whose segments have no group."""
    segments = LAYOUT.segments * (1, 1, 1, 1, 0)
    return dataclasses.replace(LAYOUT, segments=segments)


def call(name, backend="auto", **change):
    """Traces an op with one operand changed."""
    given = {
        "floats": FLOATS,
        "ints": INTS,
        "index": INDEX,
        "weights": ARENA,
        "arena": ARENA,
        "accumulator": ARENA,
        "moments": (ARENA, ARENA),
        "ema": None,
        "gradients": LEAVES,
        "leaves": LEAVES,
        "workspaces": [WORDS],
        "taus": TAUS,
        "targets": [ARENA],
        "source": LEAVES,
    } | {k: v for k, v in change.items() if k not in ("kind", "dtypes", "segments", "count")}
    kind, options = change.get("kind", "adam"), {"backend": backend}
    segments = change.get("segments", SEGMENTS)
    calls = {
        "update": lambda floats, weights, moments, gradients, ema: ops.update(
            kind, LAYOUT, floats, weights, moments, gradients, ema=ema, **options
        ),
        "changes": lambda floats, moments, gradients, leaves: ops.changes(
            kind,
            LAYOUT,
            floats,
            moments,
            gradients,
            leaves,
            change.get("dtypes", [np.float32] * 4),
            **options,
        ),
        "update_norms": lambda floats, weights, moments, gradients: ops.update_norms(
            kind, LAYOUT, floats, weights, moments, gradients, **options
        ),
        "prologue": lambda floats, ints: ops.prologue(floats, ints, **options),
        "finish": lambda floats, ints, workspaces: ops.finish(
            floats, ints, workspaces, segments, gradients=change.get("count", 1), **options
        ),
        "finish_update": lambda floats, workspaces: ops.finish_update(
            floats, workspaces, segments, **options
        ),
        "statistics": lambda ints, gradients: ops.statistics(LAYOUT, ints, gradients, **options),
        "norms": lambda ints, gradients: ops.norms(LAYOUT, ints, gradients, flag=True, **options),
        "accumulate": lambda ints, accumulator, gradients: ops.accumulate(
            LAYOUT, ints, accumulator, gradients, flag=True, norms=True, **options
        ),
        "lerp": lambda taus, targets, source: ops.lerp(LAYOUT, taus, targets, source, **options),
        "pack": lambda leaves: ops.pack(LAYOUT, leaves, **options),
        "pack_piece": lambda leaves, index: ops.pack_piece(
            one_piece(), leaves, index, shards=1, **options
        ),
        "unpack": lambda arena: ops.unpack(
            LAYOUT, arena, change.get("dtypes", [np.float32] * 4), **options
        ),
    }
    arguments = inspect.signature(calls[name]).parameters
    return jax.eval_shape(calls[name], *(given[k] for k in arguments))


OPS = (
    "update",
    "changes",
    "update_norms",
    "prologue",
    "finish",
    "finish_update",
    "statistics",
    "norms",
    "accumulate",
    "lerp",
    "pack",
    "pack_piece",
    "unpack",
)
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
    "leaf too few to cut": ("pack_piece", {"leaves": LEAVES[1:]}, "leaves: got 3 leaves, wanted 4"),
    "index with an axis": ("pack_piece", {"index": like(INDEX, (1,))}, r"index: got int32\[1\]"),
    "unsigned index": ("pack_piece", {"index": like(INDEX, dtype=np.uint32)}, "index: got uint32"),
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
    "moment too many for changes": (
        "changes",
        {"kind": "lion"},
        "moments: lion has 1, got 2",
    ),
    "weight of another shape": (
        "changes",
        {"leaves": changed(LEAVES, 1, shape=(33, 2))},
        r"weights\[1\]: got float32\[33, 2\], wanted .*\[2, 33\]",
    ),
    "gradient too few for changes": (
        "changes",
        {"gradients": LEAVES[1:]},
        "gradients: got 3 leaves, wanted 4",
    ),
    "dtype too few": ("changes", {"dtypes": [np.float32]}, "dtypes: got 1 dtypes, wanted 4"),
    "change wider than the arena": (
        "changes",
        {"dtypes": [np.float64] * 4},
        r"dtypes\[0\]: got float64, wanted one of float32",
    ),
    "floats of part of a row": ("update", {"floats": like(FLOATS, (63,))}, r"floats: got .*\[63\]"),
    "floats of too few groups": ("update", {"floats": like(FLOATS, (48,))}, r"wanted \[64\]"),
    "floats without a group": ("prologue", {"floats": like(FLOATS, (32,))}, "floats: got"),
    "floats of bfloat16": ("prologue", {"floats": like(FLOATS, dtype=BFLOAT16)}, "floats: got bf"),
    "ints of another size": ("prologue", {"ints": like(INTS, (15,))}, r"ints: got int32\[15\]"),
    "unsigned ints": ("statistics", {"ints": like(INTS, dtype=np.uint32)}, "ints: got uint32"),
    "average of another size": ("update", {"ema": like(ARENA, (32,))}, r"ema: got float32\[32\]"),
    "accumulator of half": (
        "accumulate",
        {"accumulator": like(ARENA, dtype=np.float16)},
        "accumulator: got float16",
    ),
    "gradient too few to add": (
        "accumulate",
        {"gradients": LEAVES[1:]},
        "gradients: got 3 leaves, wanted 4",
    ),
    "unsigned counters of norms": (
        "norms",
        {"ints": like(INTS, dtype=np.uint32)},
        "ints: got uint",
    ),
    "norms of integers": (
        "norms",
        {"gradients": changed(LEAVES, 3, dtype=np.int32)},
        r"gradients\[3\]: got int32",
    ),
    "kind of norms": ("update_norms", {"kind": "adamw"}, "kind: got 'adamw', wanted one of sgd"),
    "moment too few for norms": (
        "update_norms",
        {"moments": (ARENA,)},
        "moments: adam has 2, got 1",
    ),
    "workspace without a count": (
        "finish",
        {"workspaces": [WORDS, WORDS]},
        "segments: got 1 counts, wanted one for each of the 2 workspaces",
    ),
    "workspace of a smaller arena": (
        "finish",
        {"segments": [9]},
        rf"workspaces\[0\]: got shape \[{WORDS.shape[0]}\], wanted .* with 9 segments",
    ),
    "workspace of floats": (
        "finish_update",
        {"workspaces": [like(WORDS, dtype=np.float32)]},
        r"workspaces\[0\]: got float32",
    ),
    "workspace of another backend": (
        "finish",
        {"backend": "xla"},
        rf"workspaces\[0\]: got int32\[{WORDS.shape[0]}\], wanted float32\[{SEGMENTS[0]}\]",
    ),
    "gradients that have no workspace": ("finish", {"count": 2}, "gradients: got 2, wanted 0 to 1"),
    "factor too few": ("lerp", {"taus": like(TAUS, (1,))}, r"taus: got shape \[1\], wanted \[2\]"),
    "factor of another dtype": ("lerp", {"taus": like(TAUS, dtype=BFLOAT16)}, "taus: got bfloat16"),
    "one factor": ("lerp", {"taus": like(TAUS, ())}, r"taus: got shape \[\]"),
    "no target": ("lerp", {"targets": []}, "targets: got 0, wanted one arena or two"),
    "target of another size": (
        "lerp",
        {"targets": [ARENA, like(ARENA, (32,))]},
        r"targets\[1\]: got float32\[32\]",
    ),
    "source of another shape": (
        "lerp",
        {"source": changed(LEAVES, 1, shape=(33, 2))},
        r"source\[1\]: got float32\[33, 2\]",
    ),
    "source arena of another size": ("lerp", {"source": like(ARENA, (7,))}, "source: got float32"),
    "backend": ("unpack", {"backend": "gpu"}, "backend: got 'gpu', wanted one of auto"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_operand_is_named_when_it_is_traced(case):
    name, change, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call(name, **change)


def test_what_is_right_is_not_refused():
    for name in OPS:
        call(name)
    call("update", ema=ARENA)
    call("changes", leaves=None)
    call("lerp", source=None, targets=[ARENA, ARENA])
    call("finish", workspaces=[WORDS, WORDS], segments=SEGMENTS * 2)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float16")])
@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_only_pack_and_unpack_work_with_narrow_arenas(dtype, backend, monkeypatch):
    arena = like(ARENA, dtype=dtype)
    given = {"backend": backend, "arena": arena, "weights": arena, "accumulator": arena}
    given |= {"moments": (arena, arena), "targets": [arena], "taus": like(TAUS, dtype=dtype)}
    monkeypatch.setitem(globals(), "LAYOUT", dataclasses.replace(LAYOUT, dtype=dtype))
    for name in OPS:
        if name in ("pack", "pack_piece", "unpack"):
            call(name, **given)
        elif name not in ("prologue", "finish", "finish_update"):
            with pytest.raises(ValueError, match=f"layout: got an arena of {dtype}, wanted"):
                call(name, **given)


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
        ints, total, words = ops.accumulate(
            LAYOUT, ints, arena, leaves, flag=True, norms=True, backend=backend
        )
        floats, ints, *_ = ops.finish(floats, ints, [words], SEGMENTS, gradients=1, backend=backend)
        w, _, _ = ops.update("sgd", LAYOUT, floats, arena, (), new, backend=backend)
        (w,) = ops.lerp(LAYOUT, jnp.ones(2), [w], total, backend=backend)
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
