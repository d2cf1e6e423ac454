"""pack_piece: each piece is its part of the whole that pack makes, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import (
    BFLOAT16,
    LEAF_DTYPES,
    LEAVES,
    assert_same_bits,
    native_backends,
    put,
    put_all,
    random_leaves,
    to_arena,
)
from jax.sharding import AxisType, PartitionSpec

from jaxrenaissance import collectives, ops
from jaxrenaissance.pieces import cutting_layout, whole_layout
from jaxrenaissance.placement import Placement
from jaxrenaissance.plan import MemoryPlan
from jaxrenaissance.regions import Region

DTYPES = {name: np.dtype(name) for name in ("float32", "float64", "float16")} | {
    "bfloat16": BFLOAT16
}


def plan_of(shapes, stacked, dtype="float32", **options):
    return MemoryPlan.build(
        [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape in shapes],
        rules=lambda path, leaf: Region.W_FC_WEIGHT,
        stacked=lambda path, leaf: stacked[int(path)],
        **options,
    )


def layouts_of(shapes, stacked, shards, name="float32"):
    """Of a piece, and of the whole that has all of them."""
    plan = plan_of(shapes, stacked, "float64" if name == "float64" else "float32", shards=shards)
    layout, leaves = plan.arenas[0], plan.leaves_of(0)
    own = dataclasses.replace(cutting_layout(layout, leaves, shards), dtype=DTYPES[name])
    return own, whole_layout(layout, leaves, shards, DTYPES[name])


def pieces_of(whole, leaves, shards):
    return to_arena(whole, leaves).reshape(shards, -1)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_every_piece_is_its_part_of_the_whole(shards, name, backend):
    shapes, stacked, _ = zip(*LEAVES, strict=True)
    layout, whole = layouts_of(shapes, stacked, shards, name)
    allowed = LEAF_DTYPES["float64" if name == "float64" else "float32"]
    with jax.enable_x64(name == "float64"):
        run = jax.jit(lambda i, x: ops.pack_piece(layout, x, i, shards=shards, backend=backend))
        packed = jax.jit(lambda x: ops.pack(whole, x, backend=backend))
        for seed in range(1 if backend == "xla" else len(allowed)):
            dtypes = allowed[seed:] + allowed[:seed]
            leaves = random_leaves(layout, np.random.default_rng(seed), dtypes)
            wanted = pieces_of(whole, leaves, shards)
            assert_same_bits(packed(put_all(leaves)), wanted.reshape(-1))
            for index in range(shards):
                # Memory that the piece may be given again holds NaNs.
                np.array(put(np.full(layout.size, np.nan, layout.dtype)) + 1)
                assert_same_bits(run(put(np.int32(index)), put_all(leaves)), wanted[index])


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_no_more_is_read_than_the_slice_has(shards, backend):
    # The next slice, and what lies behind the last one, must not be seen in the padding.
    layout, whole = layouts_of([(4, 33), (1,), (4, 32)], [1, 0, 1], shards)
    leaves = [np.full(shape, np.nan, np.float32) for shape in layout.shapes]
    leaves[0][1], leaves[1][:], leaves[2][3] = 1.0, 2.0, 3.0
    wanted = pieces_of(whole, leaves, shards)
    run = jax.jit(lambda i, x: ops.pack_piece(layout, x, i, shards=shards, backend=backend))
    for index in range(shards):
        got = np.array(run(put(np.int32(index)), put_all(leaves)))
        np.testing.assert_array_equal(got, wanted[index])


def test_leaves_without_elements(backend):
    for shapes in [], [(0,)], [(3, 0), (2,)]:
        layout, whole = layouts_of(shapes or [(0, 2)], [0] * max(len(shapes), 1), 2)
        leaves = [np.ones(shape, np.float32) for shape in layout.shapes]
        wanted = pieces_of(whole, leaves, 2)
        for index in range(2):
            got = ops.pack_piece(
                layout, put_all(leaves), put(np.int32(index)), shards=2, backend=backend
            )
            assert_same_bits(got, wanted[index])


@pytest.mark.parametrize("batched", ["index", "leaves", "both", "nested"])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_members_of_a_batch(name, batched, backend):
    shards = 3
    layout, whole = layouts_of([(5,), (0,), (3, 33), (), (1031,)], [0, 0, 1, 0, 0], shards, name)
    dtypes = LEAF_DTYPES["float32"]
    members = [random_leaves(layout, np.random.default_rng(seed), dtypes) for seed in range(shards)]
    leaves = [np.stack(xs) for xs in zip(*members, strict=True)]
    wanted = np.stack([pieces_of(whole, own, shards) for own in members])  # by member and piece
    run = lambda i, x: ops.pack_piece(layout, x, i, shards=shards, backend=backend)  # noqa: E731
    every = np.arange(shards, dtype=np.int32)
    if batched == "index":
        fn, operands, wanted = jax.vmap(run, (0, None)), (every, members[0]), wanted[0]
    elif batched == "leaves":
        fn, operands, wanted = jax.vmap(run, (None, 0)), (np.int32(1), leaves), wanted[:, 1]
    elif batched == "both":
        order = every[::-1]
        fn, operands, wanted = jax.vmap(run), (order, leaves), wanted[every, order]
    else:
        fn = jax.vmap(jax.vmap(run, (0, None)), (None, 0))
        operands = every, leaves
    assert_same_bits(jax.jit(fn)(*jax.device_put(operands)), wanted)


# One more than each of CUDA's tables holds.
@native_backends
@pytest.mark.parametrize("count", [65, 449, 2001])
@pytest.mark.parametrize("name", DTYPES)
def test_many_segments(name, count, backend):
    shards = 3
    layout, whole = layouts_of([(1 + i % 70,) for i in range(count)], [0] * count, shards, name)
    dtypes = LEAF_DTYPES["float32"]
    members = [random_leaves(layout, np.random.default_rng(seed), dtypes) for seed in range(2)]
    leaves = [np.stack(xs) for xs in zip(*members, strict=True)]
    with jax.enable_x64(name == "float64"):
        run = lambda i, x: ops.pack_piece(layout, x, i, shards=shards, backend=backend)  # noqa: E731
        alone, together = jax.jit(run), jax.jit(jax.vmap(run))
        wanted = [pieces_of(whole, own, shards) for own in members]
        for index in range(shards):
            got = alone(put(np.int32(index)), put_all(members[0]))
            assert_same_bits(got, wanted[0][index])
        got = np.array(together(put(np.array([2, 0], np.int32)), put_all(leaves)))
        assert_same_bits(got[0], wanted[0][2])
        assert_same_bits(got[1], wanted[1][0])


@native_backends
def test_slices_of_many_segments_at_odd_offsets(backend):
    layout, whole = layouts_of([(700, 37), (3, 5001)], [1, 1], 2)
    for dtype in LEAF_DTYPES["float32"]:
        leaves = random_leaves(layout, np.random.default_rng(0), [dtype])
        wanted = pieces_of(whole, leaves, 2)
        run = jax.jit(lambda i, x: ops.pack_piece(layout, x, i, shards=2, backend=backend))
        for index in range(2):
            assert_same_bits(run(put(np.int32(index)), put_all(leaves)), wanted[index])


@native_backends
def test_an_index_outside_is_that_of_the_nearest_piece(backend):
    layout, whole = layouts_of([(180,), (3, 70)], [0, 1], 3)
    leaves = random_leaves(layout, np.random.default_rng(0))
    wanted = pieces_of(whole, leaves, 3)
    run = jax.jit(lambda i, x: ops.pack_piece(layout, x, i, shards=3, backend=backend))
    for index, piece in (-1, 0), (3, 2), (2**31 - 1, 2), (-(2**31), 0):
        assert_same_bits(run(put(np.int32(index)), put_all(leaves)), wanted[piece])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("own_backend", ["xla", "auto"])
def test_devices_pack_what_they_would_cut_from_the_whole(own_backend, check_vma, host_devices):
    mesh = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Auto,) * 2, devices=host_devices[:4])
    shapes, stacked, _ = zip(*LEAVES, strict=True)
    full = [i for i, shape in enumerate(shapes) if np.prod(shape) > 0]
    plan = plan_of(
        [shapes[i] for i in full],
        [stacked[i] for i in full],
        placement=Placement(mesh, "zero1", ("b", "a")),
    )
    leaves = [
        random_leaves(cutting_layout(plan.arenas[0], plan.leaves, 4), np.random.default_rng(0))
    ]

    @jax.jit
    def run(leaves):
        def local(leaves):
            wholes = collectives.whole_arenas(plan, leaves, backend=own_backend)
            own = collectives.own_pieces(plan, leaves, backend=own_backend)
            return own, collectives.cut(plan, wholes)

        spec = PartitionSpec(("b", "a"))
        return jax.shard_map(
            local, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=check_vma
        )(leaves)

    (own,), (cut,) = run(leaves)
    assert_same_bits(own, cut)
    whole = whole_layout(plan.arenas[0], plan.leaves_of(0), 4, np.dtype("float32"))
    assert_same_bits(own, to_arena(whole, leaves[0]))


def test_a_state_over_devices_never_packs_the_whole(host_devices):
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=host_devices[:4])
    plan = plan_of([(5, 3), (70,)], [0, 0], placement=Placement(mesh, "zero1", ("data",)))
    pack = lambda *x: collectives.own_pieces(plan, [list(x)], backend="auto")  # noqa: E731
    over = plan.placement.over_devices(pack, (PartitionSpec(),) * 2, (plan.placement.arena_spec,))
    text = str(jax.make_jaxpr(over)(jnp.zeros((5, 3)), jnp.zeros(70)))
    assert "jaxrenaissance_pack_piece" in text
    assert "jaxrenaissance_pack[" not in text
