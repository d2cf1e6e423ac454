"""to_optax: optax goes on where a TrainState stands."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from states import assert_trees_equal, by_path, count_compilations
from switched import BAD, GRADIENTS, KERNELS, PAIRS, RATE, assert_close, optax_run, our_run, tree

import jaxrenaissance as jr
import jaxrenaissance.flax as jf

CUT = 5
ACCUMULATING = jr.adam(0.1, accumulate=jr.Accumulate(3))


@pytest.mark.parametrize("name", PAIRS)
def test_optax_goes_on_as_if_it_had_been_optax_all_along(name):
    tx, optimizer = PAIRS[name]
    wanted, wanted_state = optax_run(tx, tree(), tx.init(tree()), GRADIENTS[:CUT])
    state = jr.TrainState.create(tree(), optimizer)
    if name == "inject_hyperparams":
        state = state.replace_hyperparams(learning_rate=0.1)
    state = our_run(state, GRADIENTS[:CUT])
    params, opt_state = jr.to_optax(state, tx)
    assert_trees_equal(params, state.params)
    assert_close(opt_state, wanted_state)
    got, _ = optax_run(tx, params, opt_state, GRADIENTS[CUT:])
    wanted, _ = optax_run(tx, wanted, wanted_state, GRADIENTS[CUT:])
    assert_close(got, wanted)


def test_back_and_forth_changes_no_bit():
    for name in ("adamw", "lars", "MultiSteps", "all at once"):
        tx, optimizer = PAIRS[name]
        params, opt_state = optax_run(tx, tree(), tx.init(tree()), GRADIENTS[:CUT])
        again = jr.to_optax(jr.from_optax(params, opt_state, optimizer), tx)
        assert_trees_equal(again, (params, opt_state))


def test_what_comes_out_can_be_donated_and_a_new_state_is_init_s():
    for name in ("chain", "inject_hyperparams of a schedule", "partition"):
        tx, optimizer = PAIRS[name]
        state = jr.TrainState.create(tree(), optimizer)
        params, opt_state = jr.to_optax(state, tx)
        assert_trees_equal(opt_state, tx.init(tree()))
        step = jax.jit(lambda p, s, tx=tx: tx.update(p, s, p), donate_argnums=(0, 1))
        step(params, opt_state)
        assert int(our_run(state, GRADIENTS[:1]).step) == 1


def test_moments_take_the_dtypes_that_tx_has():
    state = our_run(jr.TrainState.create(tree(), jr.adam(0.1)), GRADIENTS[:2])
    _, (adam, _) = jr.to_optax(state, optax.adam(0.1, mu_dtype=jnp.bfloat16))
    assert adam.mu["head"].dtype == jnp.bfloat16
    assert adam.nu["head"].dtype == jnp.float32
    wanted = by_path(state, [own[0] for own in state.moments])["head"]
    np.testing.assert_array_equal(adam.mu["head"], jnp.asarray(wanted, jnp.bfloat16))


def test_all_leaves_are_converted_by_one_program():
    params = {str(n): jnp.ones(n) for n in (11, 13, 17, 19)}
    tx, optimizer = PAIRS["lars"]
    state = jr.TrainState.create(params, optimizer)
    tx.init(state.params)
    with count_compilations() as compilations:
        jr.to_optax(state, tx)
    assert len(compilations) == 1


def test_skips_are_counted_and_sums_are_unscaled():
    optimizer = jr.adam(0.1, accumulate=jr.Accumulate(2), loss_scale=jr.StaticLossScale(8))
    state = jr.TrainState.create(tree(), optimizer)
    scaled = [jax.tree.map(lambda x: 8 * x, grads) for grads in GRADIENTS[:3]]
    state = our_run(state, [*scaled[:2], BAD, BAD, BAD, BAD, scaled[2]])
    tx = optax.MultiSteps(optax.apply_if_finite(optax.adam(0.1), 5), 2)
    _, opt_state = jr.to_optax(state, tx)
    finite = opt_state.inner_opt_state
    assert (int(finite.notfinite_count), int(finite.total_notfinite)) == (2, 2)
    assert (int(opt_state.mini_step), int(opt_state.gradient_step)) == (1, 1)
    np.testing.assert_allclose(opt_state.acc_grads["head"], GRADIENTS[2]["head"], rtol=1e-6)


def test_a_cycle_to_be_skipped_cannot_be_handed_over():
    state = our_run(jr.TrainState.create(tree(), ACCUMULATING), [*GRADIENTS[:4], BAD])
    tx = optax.MultiSteps(optax.apply_if_finite(optax.adam(0.1), 5), 3)
    with pytest.raises(ValueError, match="state: a gradient of its running cycle was not finite"):
        jr.to_optax(state, tx)
    state = our_run(state, GRADIENTS[4:5])
    got, _ = optax_run(tx, *jr.to_optax(state, tx), GRADIENTS[5:8])
    assert_close(got, our_run(state, GRADIENTS[5:8]).params)


def test_what_tx_has_of_its_own_stays_as_init_made_it():
    state = our_run(jr.TrainState.create(tree(), jr.adam(RATE)), GRADIENTS[:3])
    tx = optax.chain(
        optax.adam(RATE), optax.contrib.reduce_on_plateau(), optax.add_noise(0.1, 0.5, 0)
    )
    _, ((adam, schedule), plateau, noise) = jr.to_optax(state, tx)
    assert (int(adam.count), int(schedule.count)) == (3, 3)
    assert_trees_equal(plateau, optax.contrib.reduce_on_plateau().init(tree()))
    assert int(noise.count) == 0


def test_counts_lie_where_the_state_does(host_devices):
    tx, optimizer = PAIRS["inject_hyperparams of a schedule"]
    where = host_devices[1]
    state = jr.TrainState.create(jax.device_put(tree(), where), optimizer)
    params, opt_state = jr.to_optax(state, tx)
    assert all(x.committed and x.devices() == {where} for x in jax.tree.leaves(opt_state))
    step = jax.jit(tx.update)
    with count_compilations() as compilations:
        for grads in GRADIENTS[:2]:
            _, opt_state = step(grads, opt_state, params)
    assert len(compilations) == 1


def test_a_state_for_flax_is_taken_as_the_state_in_it():
    state = jf.TrainState.create(apply_fn=None, params=tree(), tx=jr.adam(0.1))
    state = state.apply_gradients(grads=GRADIENTS[0])
    assert_trees_equal(
        jr.to_optax(state, optax.adam(0.1)), jr.to_optax(state.core, optax.adam(0.1))
    )


def test_leaves_that_are_not_trained_start_anew():
    state = jr.TrainState.create(tree(), jr.adam(0.1), trainable="layer/*")
    state = our_run(state, GRADIENTS[:2])
    _, (adam, _) = jr.to_optax(state, optax.adam(0.1))
    np.testing.assert_array_equal(adam.mu["head"], 0)
    assert np.all(adam.mu["layer"]["kernel"] != 0)
    tx = optax.masked(optax.adam(0.1), {"layer": True, "head": False})
    _, opt_state = jr.to_optax(state, tx)
    assert_trees_equal(opt_state.inner_state[0].mu["layer"], adam.mu["layer"])


@pytest.mark.parametrize(
    ("optimizer", "tx", "message"),
    [
        (jr.adam(0.1), optax.sgd(0.1), "tx: it keeps no moments of adam for 'head'; 'layer/bias'"),
        (
            jr.adam(0.1),
            optax.masked(optax.scale_by_adam(), KERNELS),
            "tx: it keeps no moments of adam for 'layer/bias'$",
        ),
        (
            jr.adam(0.1),
            optax.chain(optax.scale_by_adam(), optax.scale_by_adam()),
            "tx: it keeps two ScaleByAdamState for 'head'; 'layer/bias'; 'layer/kernel'",
        ),
        (
            jr.lion(0.1, mask=True),
            optax.adam(0.1),
            "tx: it keeps ScaleByAdamState for .*'head'.*, and the state is that of lion",
        ),
        (jr.sgd(0.1), optax.adam(0.1), "tx: it keeps ScaleByAdamState for .*'head'"),
        (
            jr.lars(0.1, trust_ratio_mask="weights"),
            PAIRS["lars"][0],
            "state: jr.lars in its default form takes other trust ratios",
        ),
        (ACCUMULATING, optax.adam(0.1), "state: it has added up 1 micro-batches of a cycle"),
        (jr.adam(0.1), optax.masked(jr.adam(0.1), KERNELS), "its State are of other leaves"),
        (jr.adam(0.1), optax.chain(jr.lion(0.1, mask=True)), "or of another kind"),
        (
            jr.adam(0.1),
            jr.lion(0.1, mask=True),
            "of another kind, lion, and those of the state are adam",
        ),
        (
            jr.sgd(0.1, momentum=0.9),
            jr.lion(0.1, mask=True),
            "tx: its moments are of another kind, lion, and those of the state are momentum",
        ),
        (
            jr.lars(0.1, trust_ratio_mask="weights"),
            jr.sgd(0.1, momentum=0.9),
            "tx: its moments are of another kind, momentum, and those of the state are lars",
        ),
        (
            jr.adam(0.1),
            optax.chain(optax.adam(0.1), optax.ema(0.9)),
            "tx: EmaState keeps ema for 'head'; 'layer/bias'; 'layer/kernel', of which",
        ),
        (jr.sgd(0.1), optax.rmsprop(0.1), "tx: ScaleByRmsState keeps nu for 'head'; 'layer/bias'"),
        (
            ACCUMULATING,
            optax.MultiSteps(optax.adam(0.1), 3, use_grad_mean=False),
            "tx: its MultiSteps has use_grad_mean=False",
        ),
        (
            ACCUMULATING,
            optax.MultiSteps(optax.adam(0.1), 1).gradient_transformation(),
            "tx: the cycles of its MultiSteps are of 1 micro-batches, and the state has added up 1 "
            "of 3",
        ),
    ],
)
def test_what_has_no_place_is_an_error(optimizer, tx, message):
    state = our_run(jr.TrainState.create(tree(), optimizer), GRADIENTS[:1])
    with pytest.raises(ValueError, match=message):
        jr.to_optax(state, tx)


def test_members_are_taken_one_at_a_time():
    states = jax.vmap(lambda rate: jr.TrainState.create(tree(), jr.sgd(rate)))(jnp.ones(2))
    with pytest.raises(ValueError, match=r"state: it holds \(2,\) members"):
        jr.to_optax(states, optax.sgd(RATE))
    params, _ = jr.to_optax(jax.tree.map(lambda x: x[0], states), optax.sgd(RATE))
    assert_trees_equal(params, tree())


def test_what_is_no_state_or_no_optimizer_is_an_error():
    with pytest.raises(TypeError, match="state: expected a TrainState, got a dict"):
        jr.to_optax(tree(), optax.sgd(0.1))
    state = jr.TrainState.create(tree(), jr.sgd(0.1))
    with pytest.raises(TypeError, match=r"tx: expected .* got sgd, .*one: sgd\(…\)"):
        jr.to_optax(state, optax.sgd)
    with pytest.raises(TypeError, match=r"tx: expected .* got MultiSteps, which makes one"):
        jr.to_optax(state, optax.MultiSteps)
    with pytest.raises(TypeError, match=r"tx: expected an optimizer, .* got None"):
        jr.to_optax(state, None)
    with pytest.raises(TypeError, match=r"state: expected arrays.* Call to_optax outside of jit"):
        jax.jit(lambda state: jr.to_optax(state, optax.sgd(0.1)))(state)
