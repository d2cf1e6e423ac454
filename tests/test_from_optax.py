"""from_optax: a run switched in mid-training goes on as the unswitched one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from states import assert_trees_equal, by_path, count_compilations, make_step
from switched import BAD, GRADIENTS, KERNELS, PAIRS, RATE, assert_close, optax_run, our_run, tree

import jaxrenaissance as jr
from jaxrenaissance import scalars

CUT = 5


@pytest.mark.parametrize("name", PAIRS)
def test_a_run_that_was_switched_goes_on_as_the_unswitched_one(name):
    tx, optimizer = PAIRS[name]
    params, opt_state = optax_run(tx, tree(), tx.init(tree()), GRADIENTS[:CUT])
    state = jr.from_optax(params, opt_state, optimizer)
    assert_trees_equal(state.params, params)
    wanted, _ = optax_run(tx, params, opt_state, GRADIENTS[CUT:])
    assert_close(our_run(state, GRADIENTS[CUT:]).params, wanted)


def test_the_moments_are_optax_s_own_and_for_lars_with_the_other_sign():
    for name in ("adam", "momentum", "lars"):
        tx, optimizer = PAIRS[name]
        params, opt_state = optax_run(tx, tree(), tx.init(tree()), GRADIENTS[:2])
        state = jr.from_optax(params, opt_state, optimizer)
        field = "mu" if name == "adam" else "trace"
        sign = -1 if name == "lars" else 1
        got = by_path(state, [own[0] for own in state.moments])
        wanted = optax.tree.get(opt_state, field)
        for path, x in (("head", wanted["head"]), ("layer/bias", wanted["layer"]["bias"])):
            np.testing.assert_array_equal(got[path], sign * np.asarray(x))
    # By hand, after the first step: momentum has added up g, LARS's trace −lr · ratio · (g + wd w).
    tx, optimizer = PAIRS["lars"]
    _, opt_state = optax_run(tx, tree(), tx.init(tree()), GRADIENTS[:1])
    state = jr.from_optax(tree(), opt_state, optimizer)
    w, g = (np.float64(x["head"]) for x in (tree(), GRADIENTS[0]))
    g = g + 0.1 * w
    wanted = 0.1 * 0.1 * np.linalg.norm(w) / np.linalg.norm(g) * g
    got = by_path(state, [own[0] for own in state.moments])["head"]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_counts_and_skips_are_taken_over():
    tx, optimizer = PAIRS["apply_if_finite"]
    gradients = [GRADIENTS[0], BAD, GRADIENTS[1], BAD, BAD]
    params, opt_state = optax_run(tx, tree(), tx.init(tree()), gradients)
    state = jr.from_optax(params, opt_state, optimizer)
    counts = [int(x) for x in (state.step, state.calls, state.skipped, state.consecutive_skips)]
    assert counts == [2, 5, 3, 2]


def test_a_running_mean_becomes_a_sum_in_the_loss_scale():
    tx = optax.MultiSteps(optax.adam(0.1), 3)
    params, opt_state = optax_run(tx, tree(), tx.init(tree()), GRADIENTS[:5])
    optimizer = jr.adam(0.1, accumulate=jr.Accumulate(3), loss_scale=jr.StaticLossScale(4))
    state = jr.from_optax(params, opt_state, optimizer)
    got = by_path(state, state.accumulator)["head"]
    wanted = 4 * (np.float64(GRADIENTS[3]["head"]) + np.float64(GRADIENTS[4]["head"]))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert (int(state.step), int(state.calls), int(state.ints[scalars.MICRO])) == (1, 5, 2)
    scaled = jax.tree.map(lambda x: 4 * x, GRADIENTS[5])
    wanted, _ = optax_run(tx, params, opt_state, GRADIENTS[5:6])
    assert_close(state.apply_gradients(scaled).params, wanted)
    with pytest.raises(ValueError, match=r"MultiSteps has added up 2 .*cycles are of 1"):
        jr.from_optax(params, opt_state, jr.adam(0.1))
    params, opt_state = optax_run(tx, tree(), tx.init(tree()), GRADIENTS[:3])
    assert int(jr.from_optax(params, opt_state, jr.adam(0.1)).step) == 1


def test_a_running_mean_that_is_not_finite_skips_its_cycle():
    tx = optax.MultiSteps(optax.apply_if_finite(optax.adam(0.1), 5), 3)
    bad = {**tree(), "layer": {"kernel": tree()["layer"]["kernel"], "bias": jnp.full(3, jnp.inf)}}
    before = optax_run(tx, tree(), tx.init(tree()), GRADIENTS[:3])
    params, opt_state = optax_run(tx, *before, [GRADIENTS[3], bad])
    optimizer = jr.adam(0.1, accumulate=jr.Accumulate(3))
    state = jr.from_optax(params, opt_state, optimizer)
    assert bool(state.has_nan)
    state = state.apply_gradients(GRADIENTS[4])
    assert_trees_equal(state.params, params)
    assert [int(x) for x in (state.step, state.calls, state.skipped)] == [1, 6, 1]
    with pytest.raises(FloatingPointError, match=r"In call 4 .* of 'layer/bias' had a NaN"):
        jr.check(state, max_consecutive=0)
    wanted, _ = optax_run(tx, *before, GRADIENTS[5:8])
    assert_close(our_run(state, GRADIENTS[5:8]).params, wanted)
    # Without skipping, the NaN goes its way here as there.
    unsafe = jr.adam(0.1, accumulate=jr.Accumulate(3), skip_nonfinite=False)
    unskipped = jr.from_optax(params, opt_state, unsafe).apply_gradients(GRADIENTS[4])
    assert np.isnan(unskipped.params["layer"]["bias"]).all()
    assert np.isfinite(unskipped.params["head"]).all()
    # optax's own mean is never finite again, also when the cycle is over.
    params, opt_state = optax_run(tx, params, opt_state, GRADIENTS[4:5])
    state = jr.from_optax(params, opt_state, optimizer)
    assert_close(our_run(state, GRADIENTS[5:8]).params, wanted)


def test_a_step_is_given_where_nothing_counts():
    tx = optax.sgd(0.1, momentum=0.9)
    params, opt_state = optax_run(tx, tree(), tx.init(tree()), GRADIENTS[:2])
    optimizer = jr.sgd(RATE, momentum=0.9)
    assert int(jr.from_optax(params, opt_state, optimizer).step) == 0
    state = jr.from_optax(params, opt_state, optimizer, step=4)
    assert (int(state.step), int(state.calls)) == (4, 4)
    rate = state.apply_gradients(GRADIENTS[2]).metrics["learning_rate"]
    np.testing.assert_allclose(rate, RATE(4), rtol=1e-6)
    assert int(jr.from_optax(tree(), ADAM_LATER, jr.adam(0.1), step=3).step) == 3
    with pytest.raises(ValueError, match="step: 4 was given, and ScaleByAdamState has counted 3"):
        jr.from_optax(tree(), ADAM_LATER, jr.adam(0.1), step=4)
    with pytest.raises(ValueError, match="step: expected the number of updates made, got -1"):
        jr.from_optax(params, opt_state, optimizer, step=-1)
    with pytest.raises(TypeError, match=r"step: expected an integer, got 1\.5"):
        jr.from_optax(params, opt_state, optimizer, step=1.5)


def test_numbers_that_have_no_place_are_told_in_one_warning(caplog):
    def clipped(lr, clip):
        return optax.chain(optax.clip(clip), optax.adam(lr))

    plateau = optax.contrib.reduce_on_plateau()
    inject = optax.inject_hyperparams(clipped)(0.05, clip=2.0)
    opt_state = [inject.init(tree()), plateau.init(tree())]
    opt_state[1] = opt_state[1]._replace(scale=jnp.asarray(0.5))
    assert int(jr.from_optax(tree(), opt_state, jr.adam(0.1)).step) == 0
    (record,) = caplog.records
    for part in ("lr = 0.05", "clip = 2", "scale = 0.5 of ReduceLROnPlateauState"):
        assert part in record.message
    assert "learning_rate" not in record.message
    caplog.clear()
    tx, optimizer = PAIRS["inject_hyperparams"]
    jr.from_optax(tree(), [tx.init(tree()), plateau.init(tree())], optimizer)
    assert not caplog.records


@pytest.mark.parametrize("placed", [{"params"}, {"opt_state"}, {"params", "opt_state"}])
def test_the_state_lies_together_where_params_or_opt_state_were_put(placed, host_devices):
    tx, optimizer = PAIRS["inject_hyperparams"]
    mesh = jax.make_mesh((2,), ("x",), devices=host_devices[:2])
    for where in (host_devices[1], NamedSharding(mesh, PartitionSpec())):
        params, opt_state = tree(), tx.init(tree())
        params = jax.device_put(params, where) if "params" in placed else params
        opt_state = jax.device_put(opt_state, where) if "opt_state" in placed else opt_state
        state = jr.from_optax(params, opt_state, optimizer)
        step = make_step()
        with count_compilations() as compilations:
            state = step(step(state, GRADIENTS[0]), GRADIENTS[1])
        assert len(compilations) == 1
        assert state.ints.devices() == jax.device_put(1, where).devices()


def test_what_is_sharded_or_has_several_members_or_no_values_is_an_error(host_devices):
    mesh = jax.make_mesh((2,), ("x",), devices=host_devices[:2])
    rows = NamedSharding(mesh, PartitionSpec("x"))
    mu = {**tree(), "layer": {**tree()["layer"], "kernel": jax.device_put(jnp.ones((4, 3)), rows)}}
    with pytest.raises(ValueError, match=r"opt_state: the leaf '.*kernel' is sharded"):
        jr.from_optax(tree(), optax.tree.set(ADAM, mu=mu), jr.adam(0.1))
    several = jax.tree.map(lambda x: jnp.stack([x, x]), (tree(), ADAM))
    with pytest.raises(ValueError, match=r"opt_state: ScaleByAdamState holds \(2,\) members"):
        jr.from_optax(*several, jr.adam(0.1))
    with pytest.raises(
        TypeError, match=r"params: expected arrays.* Call from_optax outside of jit"
    ):
        jax.jit(lambda params: jr.from_optax(params, ADAM, jr.adam(0.1)))(tree())
    with pytest.raises(TypeError, match="opt_state: expected arrays, got traced or abstract"):
        jr.from_optax(tree(), jax.eval_shape(lambda: ADAM), jr.adam(0.1))


def test_injected_numbers_are_taken_but_for_those_on_a_schedule():
    tx = optax.inject_hyperparams(optax.adamw)(0.1, b2=RATE, weight_decay=0.2)
    opt_state = tx.init(tree())
    opt_state.hyperparams["learning_rate"] = jnp.asarray(0.03)
    state = jr.from_optax(tree(), opt_state, jr.adamw(0.1, b2=0.5, mask=True))
    values = {name: float(state.metrics[name]) for name in ("learning_rate", "b2", "weight_decay")}
    assert values == {"learning_rate": np.float32(0.03), "b2": 0.5, "weight_decay": np.float32(0.2)}
    # What follows a schedule here goes on to do so.
    state = jr.from_optax(tree(), opt_state, jr.adamw(RATE, mask=True))
    rate = state.apply_gradients(tree()).metrics["learning_rate"]
    np.testing.assert_allclose(rate, 0.1, rtol=1e-6)


def test_options_are_those_of_create_and_leaves_may_be_frozen():
    tx = optax.partition(
        {"train": optax.adam(0.1), "freeze": optax.set_to_zero()},
        {"layer": "train", "head": "freeze"},
    )
    params, opt_state = optax_run(tx, tree(), tx.init(tree()), GRADIENTS[:2])
    state = jr.from_optax(
        params, opt_state, jr.adam(0.1), trainable="layer/*", compute_dtype="bfloat16", extra=params
    )
    assert state.compute_params["layer"]["kernel"].dtype == jnp.bfloat16
    wanted, _ = optax_run(tx, params, opt_state, GRADIENTS[2:])
    assert_close(our_run(state, GRADIENTS[2:]).params, wanted)
    # Moments that nobody needs any more are left behind.
    whole = optax.adam(0.1).init(tree())
    assert int(jr.from_optax(tree(), whole, jr.adam(0.1), trainable="layer/*").step) == 0


def test_moments_in_16_bits_are_widened():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree())
    tx = optax.adam(0.1)
    _, opt_state = optax_run(tx, params, tx.init(params), [params])
    state = jr.from_optax(params, opt_state, jr.adam(0.1))
    got = by_path(state, [own[0] for own in state.moments])["head"]
    assert state.moments[0][0].dtype == jnp.float32
    np.testing.assert_array_equal(got, np.float32(opt_state[0].mu["head"]))


ADAM = optax.adam(0.1).init(tree())
ADAM_LATER = optax.tree.set(ADAM, count=jnp.asarray(3))


@pytest.mark.parametrize(
    ("opt_state", "optimizer", "message"),
    [
        (
            ADAM,
            jr.lion(0.1, mask=True),
            r"ScaleByAdamState has mu for 'head'; 'layer/bias'.*another",
        ),
        (optax.EmptyState(), jr.adam(0.1), "found no ScaleByAdamState, .* among EmptyState"),
        ((), jr.adam(0.1), "found no ScaleByAdamState, .* among no states"),
        ((ADAM, ADAM), jr.adam(0.1), "two ScaleByAdamState with mu for 'head'; 'layer/bias'"),
        (
            optax.masked(optax.scale_by_adam(), KERNELS).init(tree()),
            jr.adam(0.1),
            "there are no moments for 'layer/bias'$",
        ),
        (
            optax.adam(0.1).init({**tree(), "more": jnp.ones(1)}),
            jr.adam(0.1),
            "'more' is not a leaf of the parameters",
        ),
        (
            optax.adam(0.1).init({**tree(), "head": jnp.ones(3)}),
            jr.adam(0.1),
            r"'head' has shape \(3,\), wanted \(3, 2\)",
        ),
        (optax.amsgrad(0.1).init(tree()), jr.adam(0.1), "ScaleByAmsgradState has mu for 'head'"),
        (
            optax.chain(optax.trace(0.9), optax.adam(0.1)).init(tree()),
            jr.adam(0.1),
            "TraceState has trace for 'head'",
        ),
        (
            optax.sgd(0.1, momentum=0.9).init(tree()),
            jr.sgd(0.1),
            "TraceState has trace for 'head'",
        ),
        (
            (ADAM_LATER, optax.scale_by_schedule(RATE).init(tree())),
            jr.adam(RATE),
            "the counts differ, 3 in ScaleByAdamState and 0 in ScaleByScheduleState",
        ),
        (
            (
                optax.inject_hyperparams(optax.scale)(0.1).init(tree()),
                optax.inject_hyperparams(optax.adam)(0.1).init(tree()),
                optax.inject_hyperparams(optax.sgd)(0.2).init(tree()),
            ),
            jr.adam(0.1),
            "two different values are injected for learning_rate: 0.1.* and 0.2",
        ),
        (
            PAIRS["lars"][0].init(tree()),
            jr.lars(0.1, trust_ratio_mask="weights"),
            "optimizer: jr.lars in its default form takes other trust ratios than optax.lars",
        ),
        (
            optax.masked(jr.adam(0.1), KERNELS).init(tree()),
            jr.adam(0.1),
            "the moments of its State are of other leaves",
        ),
        (jr.lion(0.1, mask=True).init(tree()), jr.adam(0.1), "or of another kind"),
    ],
)
def test_what_cannot_be_taken_over_is_an_error(opt_state, optimizer, message):
    with pytest.raises(ValueError, match=message):
        jr.from_optax(tree(), opt_state, optimizer)


def test_an_optimizer_of_optax_is_an_error():
    with pytest.raises(TypeError, match="TrainState updates in place"):
        jr.from_optax(tree(), ADAM, optax.adam(0.1))
