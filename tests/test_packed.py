"""Packed: any float tree in one buffer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrenaissance as jr


class Stats(NamedTuple):
    mean: object
    var: object


def stats():
    return {
        "norm0": Stats(jnp.arange(3.0), jnp.ones(3)),
        "norm1": Stats(jnp.full((2, 33), 0.1, jnp.bfloat16), jnp.asarray(2.0, jnp.float16)),
        "empty": [jnp.zeros((0, 4)), None],
    }


def assert_trees_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_tree_comes_back_as_it_went_in(backend):
    packed = jr.Packed(stats(), backend=backend)
    assert [x.shape for x in jax.tree.leaves(packed)] == [(192,)]
    assert_trees_equal(packed.tree, stats())
    assert repr(packed) == "Packed(MemoryPlan(5 leaves, 73 parameters, float32[192]))"


def test_replace_packs_again_and_compiles_once(backend):
    @jax.jit
    def step(packed):
        return packed.replace(jax.tree.map(lambda x: x + x, packed.tree))

    packed = jr.Packed(stats(), backend=backend)
    for _ in range(3):
        packed = step(packed)
    step(jr.Packed(stats(), backend=backend))
    assert step._cache_size() == 1
    assert_trees_equal(packed.tree, jax.tree.map(lambda x: 8 * x, stats()))


def test_other_float_dtypes_may_stand_for_the_first(backend):
    packed = jr.Packed(stats(), backend=backend)
    again = packed.replace(jax.tree.map(lambda x: x.astype(jnp.float32), stats()))
    assert_trees_equal(again.tree, stats())


def test_works_under_scan_vmap_and_grad_of_its_tree(backend):
    packed = jr.Packed({"a": jnp.ones(3)}, backend=backend)

    def body(packed, x):
        return packed.replace({"a": packed.tree["a"] * x}), packed.tree["a"].sum()

    last, sums = jax.jit(lambda p: jax.lax.scan(body, p, jnp.full(3, 2.0)))(packed)
    np.testing.assert_array_equal(last.tree["a"], 8.0)
    np.testing.assert_array_equal(sums, [3.0, 6.0, 12.0])

    batch = jax.vmap(lambda x: jr.Packed({"a": x}, backend=backend))(jnp.arange(6.0).reshape(2, 3))
    trees = jax.vmap(lambda packed: packed.tree)(batch)
    np.testing.assert_array_equal(trees["a"], np.arange(6.0).reshape(2, 3))
    with pytest.raises(ValueError, match=r"several members.*jax\.vmap"):
        _ = batch.tree
    gradient = jax.grad(lambda tree: tree["a"].sum())(packed.tree)
    np.testing.assert_array_equal(gradient["a"], 1.0)


def test_buffers_of_the_caller_survive_donation(backend):
    # One leaf that fills its arena exactly, so that the arena could be the leaf itself.
    tree = {"a": jnp.arange(32.0)}
    packed = jr.Packed(tree, backend=backend)
    read = packed.tree["a"]
    jax.jit(lambda p: p.replace({"a": p.tree["a"] + 1}), donate_argnums=0)(packed)
    np.testing.assert_array_equal(tree["a"], np.arange(32.0))
    np.testing.assert_array_equal(read, np.arange(32.0))
    jax.jit(lambda p: p.tree, donate_argnums=0)(jr.Packed(tree, backend=backend))
    np.testing.assert_array_equal(tree["a"], np.arange(32.0))


def test_float64_leaves_have_an_arena_of_their_own(backend):
    with jax.enable_x64(True):
        tree = {"a": jnp.full(3, 0.1, jnp.float64), "b": jnp.full(3, 0.1, jnp.float32)}
        packed = jr.Packed(tree, backend=backend)
        assert [x.dtype for x in jax.tree.leaves(packed)] == [jnp.float32, jnp.float64]
        assert_trees_equal(packed.tree, tree)
        with pytest.raises(ValueError, match="'b' has dtype float64, wanted float32"):
            packed.replace({"a": tree["a"], "b": tree["a"]})


def test_numpy_float64_is_float32_without_x64():
    packed = jr.Packed({"a": np.full(3, 0.1), "b": np.float64(2)}, backend="xla")
    assert_trees_equal(packed.tree, {"a": jnp.full(3, 0.1), "b": jnp.asarray(2.0)})
    assert_trees_equal(
        packed.replace({"a": np.ones(3), "b": np.float64(1)}).tree,
        {"a": jnp.ones(3), "b": jnp.asarray(1.0)},
    )


def test_trees_without_leaves_and_of_a_single_leaf(backend):
    assert jr.Packed({}, backend=backend).tree == {}
    assert jr.Packed({}, backend=backend).replace({}).tree == {}
    np.testing.assert_array_equal(jr.Packed(jnp.ones(3), backend=backend).tree, 1.0)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jnp.ones(3, jnp.int32), "'n/count' has dtype int32"),
        (jax.random.key(0), r"'n/count' has dtype key"),
        (jnp.ones(3, jnp.complex64), "'n/count' has dtype complex64"),
        (1.0, "'n/count' is a float"),
        ("x", "'n/count' is a str"),
    ],
)
def test_leaves_that_are_no_floats_are_refused_by_path(leaf, message):
    with pytest.raises(ValueError, match=f"Packed: the leaf {message}"):
        jr.Packed({"n": {"count": leaf}, "x": jnp.ones(2)})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": jnp.ones(3)}, "tree: .*'b/c' is missing"),
        ({"a": jnp.ones(3), "b": {"c": jnp.ones(2), "d": 1}}, "'b/d' is not a leaf"),
        ({"a": jnp.ones(4), "b": {"c": jnp.ones(2)}}, r"tree: 'a' has shape \(4,\), wanted \(3,\)"),
        ({"a": jnp.ones(3, int), "b": {"c": jnp.ones(2)}}, "tree: 'a' has dtype int32"),
        ({"a": 1.0, "b": {"c": jnp.ones(2)}}, "tree: 'a' is 1.0, wanted an array"),
        ({"a": jnp.ones(3), "b": Stats(1, 2)}, "tree: .*'b/c' is missing"),
    ],
)
def test_replace_names_the_paths_that_do_not_match(tree, message):
    packed = jr.Packed({"a": jnp.ones(3), "b": {"c": jnp.ones(2)}}, backend="xla")
    with pytest.raises(ValueError, match=message):
        packed.replace(tree)


def test_other_containers_of_equal_paths_are_refused():
    packed = jr.Packed([jnp.ones(2), jnp.ones(3)], backend="xla")
    with pytest.raises(ValueError, match=r"tree: .*other containers"):
        packed.replace((jnp.ones(2), jnp.ones(3)))


def test_an_unknown_backend_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="backend: got 'gpu', wanted one of auto, cpu, cuda, xla"):
        jr.Packed({"a": jnp.ones(2)}, backend="gpu")
    monkeypatch.setenv("JAXRENAISSANCE_BACKEND", "gpu")
    with pytest.raises(ValueError, match="JAXRENAISSANCE_BACKEND: got 'gpu'"):
        jr.Packed({"a": jnp.ones(2)})
