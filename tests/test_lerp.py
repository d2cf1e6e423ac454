"""lerp: targets that follow a source, from arenas and from leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from states import HOW, applied, assert_buffers_equal, assert_trees_equal, loss_fn, mlp

import jaxrenaissance as jr
import jaxrenaissance.flax as jf


def optimizer(backend, **options):
    return jr.adam(0.1, backend=backend, **options)


def lerped(target, source, tau):
    """In float64."""
    return jax.tree.map(
        lambda a, b: np.float64(a) + tau * (np.float64(b) - np.float64(a)), target, source
    )


def sources(backend):
    """One tree as everything that a source can be; the second state has another plan."""
    own = optimizer(backend)
    return {
        "state": jr.TrainState.create(mlp(1), own),
        "other plan": jr.TrainState.create(mlp(1), own, rules=lambda *_: jr.Region.W_FC_WEIGHT),
        "packed": jr.Packed(mlp(1), backend=backend),
        "tree": mlp(1),
        "numpy": jax.tree.map(np.asarray, mlp(1)),
    }


@pytest.mark.parametrize("source", sources("xla"))
@pytest.mark.parametrize("kind", ["state", "packed"])
def test_every_target_follows_every_source(kind, source, backend):
    target = sources(backend)[kind].replace(**{"params" if kind == "state" else "tree": mlp()})
    new = jr.lerp(target, sources(backend)[source], 0.25)
    tree = new.params if kind == "state" else new.tree
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
        tree,
        lerped(mlp(), mlp(1), 0.25),
    )
    assert jax.tree.structure(new) == jax.tree.structure(target)


@pytest.mark.parametrize("how", HOW)
def test_only_the_parameters_of_a_state_move(how, backend):
    source = jr.TrainState.create(mlp(1), optimizer(backend))
    target = jr.TrainState.create(mlp(), optimizer(backend, ema_decay=0.9), extra=jnp.ones(2))
    target = target.apply_gradients(mlp(2))
    new = applied(lambda s: jr.lerp(s, source, 0.5), target, how)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
        new.params,
        lerped(target.params, mlp(1), 0.5),
    )
    rest = [(s.moments, s.ema, s.floats, s.ints, s.extra) for s in (new, target)]
    assert_buffers_equal(*rest)


def test_tau_of_one_copies_also_over_nan_and_zero_leaves_all_as_it_is(backend):
    target = jr.Packed({"a": jnp.asarray([jnp.nan, 1.0, jnp.inf]), "b": jnp.ones(2)})
    source = {"a": jnp.asarray([1.0, 2.0, 3.0]), "b": jnp.asarray([jnp.nan, 2.0])}
    assert_trees_equal(jr.lerp(target, source, 1).tree, source)
    assert_trees_equal(jr.lerp(target, source, 0.0).tree, target.tree)


def test_another_tau_compiles_nothing(backend):
    target = jr.TrainState.create(mlp(), optimizer(backend))
    source = jr.TrainState.create(mlp(1), optimizer(backend))
    # Programs of one function share a cache; this one has its own.
    follow = jax.jit(lambda *arguments: jr.lerp(*arguments), donate_argnums=0)
    for tau in (0.5, 0.25, 0.0):
        target = follow(target, source, tau)
    assert follow._cache_size() == 1
    for tau in (np.float64(0.5), jnp.float32(0.5), 0):
        target = jr.lerp(target, source, tau)
    wanted = lerped(mlp(), mlp(1), 1 - 0.75 * 0.5**3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), target.params, wanted
    )


def test_taus_of_members(backend):
    target = jr.TrainState.create(mlp(), optimizer(backend))
    source = jr.TrainState.create(mlp(1), optimizer(backend))
    members = jax.vmap(lambda tau: jr.lerp(target, source, tau).weights[0])(jnp.asarray([0.0, 1.0]))
    np.testing.assert_array_equal(members[0], target.weights[0])
    np.testing.assert_array_equal(members[1], source.weights[0])


def test_low_precision_targets_move_in_full_precision(backend):
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    target = jr.TrainState.create(params, optimizer(backend))
    source = {"w": jnp.full(4, 2.0, jnp.bfloat16)}
    for _ in range(10):  # Each step alone is less than half of bfloat16's last bit.
        target = jr.lerp(target, source, 1e-3)
    np.testing.assert_allclose(target.weights[0][:4], 2 - 0.999**10, rtol=1e-6)


def test_leaves_that_are_not_trained_are_not_read(backend):
    params = {"base": jnp.ones(3, jnp.int8), "head": jnp.ones(2)}
    target = jr.TrainState.create(params, optimizer(backend), trainable="head")
    for base in (None, jnp.zeros(3)):
        new = jr.lerp(target, {"base": base, "head": jnp.zeros(2)}, 0.5)
        assert_trees_equal(new.params, {**params, "head": jnp.full(2, 0.5)})


def test_states_for_flax_are_taken_as_the_states_in_them():
    def create(seed):
        return jf.TrainState.create(apply_fn=loss_fn, params=mlp(seed), tx=optimizer("xla"))

    target = jr.lerp(create(0), create(1), 0.5)
    assert isinstance(target, jf.TrainState)
    assert_trees_equal(target.params, jr.lerp(create(0).core, mlp(1), 0.5).params)


def test_what_cannot_be_followed_is_refused():
    target = jr.Packed(mlp(), backend="xla")
    with pytest.raises(TypeError, match="target: expected a TrainState or a Packed, got a dict"):
        jr.lerp(mlp(), target, 0.5)
    with pytest.raises(ValueError, match=r"source: 'in/bias' has shape \(6,\), wanted \(5,\)"):
        jr.lerp(target, jr.Packed(mlp(width=6), backend="xla"), 0.5)
    with pytest.raises(ValueError, match=r"source: the tree does not .*'in/bias' is missing"):
        jr.lerp(target, {"out": mlp()["out"]}, 0.5)
    for tau in (-0.1, 1.5, float("nan"), jnp.float32(2)):
        with pytest.raises(ValueError, match=r"tau: expected a number in \[0, 1\]"):
            jr.lerp(target, mlp(), tau)
    with pytest.raises(ValueError, match=r"tau: expected a scalar, got shape \(2,\)"):
        jr.lerp(target, mlp(), jnp.ones(2))
    with pytest.raises(TypeError, match="tau: expected a number, got 'slow'"):
        jr.lerp(target, mlp(), "slow")
