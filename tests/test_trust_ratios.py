"""Trust ratios: their formulas to the bit, which tensors have them, and what a state tells."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import (
    LEAF_DTYPES,
    NUMBERS,
    assert_same_bits,
    group_rows,
    make_floats,
    native_backends,
    on_elements,
    random_leaves,
    random_states,
    to_arena,
    to_leaves,
    usual_layout,
)
from reduction import segments_of, sum_of_products, sum_of_squares
from states import assert_trees_equal, make_step

import jaxrenaissance as jr
from jaxrenaissance import ops
from jaxrenaissance import scalars as s
from jaxrenaissance.regions import W_REGIONS, Region

RULES = {"lars": 1, "lars as optax": 2, "lamb": 3}
TRUSTED = {
    "lars": functools.partial(jr.lars, weight_decay_mask=True),
    "lars as optax": functools.partial(jr.lars, weight_decay_mask=True, optax_form=True),
    "lamb": functools.partial(jr.lamb, mask=True),
}

# The formulas, on one arena.


def scalars_of(rule, dtype):
    """Two groups, of which one has no ratio; bounds that some segments reach."""
    numbers = [n | ({} if rule == "lamb" else {"l2": n["wd"], "wd": 0.0}) for n in NUMBERS]
    most = 0.2 if rule == "lamb" else 0.8
    floats = make_floats(numbers, dtype=dtype, factor=0.5, max_ratio=most, min_norm=1.0)
    group_rows(floats)[0, s.TRUST] = 0.75
    return floats


def states_of(layout, rng):
    """Weights larger from segment to segment, and Adam's moments."""
    states = random_states(layout, "adam", rng)
    sizes = np.linspace(0.2, 2, len(layout.segments)).astype(layout.dtype)
    return [states[0] * on_elements(layout, sizes), *states[1:]]


def ratios_of(rule, layout, floats, states, gradients, backend):
    """The ratios of the ops, and the scalars after them."""
    count, groups = [len(layout.segments)], [layout.segments[:, 4].astype(np.int32)]

    @jax.jit
    def run(floats, ints, states, gradients):
        weights, *moments = states
        if rule == "lamb":
            floats, ints = ops.prologue(floats, ints, backend=backend)
            workspaces = ops.update_norms(
                "adam", layout, floats, weights, moments, gradients, direction=True, backend=backend
            )
            floats, (ratios,) = ops.finish_ratios(
                floats, workspaces, count * 2, groups, backend=backend
            )
            return floats, ratios
        products = rule == "lars as optax"
        ints, *workspaces = ops.norms(
            layout, ints, gradients, weights=weights, products=products, flag=True, backend=backend
        )
        floats, ints, norms, (ratios,) = ops.finish(
            floats,
            ints,
            workspaces,
            count * len(workspaces),
            gradients=1,
            trust=RULES[rule],
            groups=groups,
            backend=backend,
        )
        assert norms == ()
        return floats, ratios

    operands = jax.device_put((floats, s.initial_ints(), states, gradients))
    return [np.array(x) for x in run(*operands)]


def directions(layout, floats, states, arena):
    """Adam's update before the learning rate, decay included, each operation rounded once."""
    w, m, v = states
    new = np.zeros_like(w)
    for start, size, _, _, group in layout.segments.tolist():
        here, row = slice(start, start + size), group_rows(floats)[group]
        one, omb1, omb2 = w.dtype.type(1), row[s.ONE_MINUS_B1], row[s.ONE_MINUS_B2]
        g = arena[here] * floats[s.GRAD_FACTOR]
        m1 = (one - omb1) * m[here] + omb1 * g
        v1 = (one - omb2) * v[here] + omb2 * (g * g)
        u = m1 * row[s.C1] / (np.sqrt(v1 * row[s.C2] + row[s.EPS_ROOT]) + row[s.EPS])
        new[here] = u + row[s.WEIGHT_DECAY] * w[here]
    return new


def expected_ratios(rule, layout, floats, states, leaves):
    """From the sums of the fixed tree, in float64 and in the order of the formulas."""
    numbers = floats.astype(np.float64)
    weights = to_leaves(layout, states[0])
    if rule == "lamb":
        leaves = to_leaves(layout, directions(layout, floats, states, to_arena(layout, leaves)))
    factor, ratios = numbers[s.GRAD_FACTOR], []
    pairs = zip(segments_of(layout, weights), segments_of(layout, leaves), strict=True)
    for (w, g), group in zip(pairs, layout.segments[:, 4], strict=True):
        row = group_rows(numbers)[group]
        weight, update = np.sqrt(sum_of_squares(w)), np.sqrt(sum_of_squares(g))
        denominator = update
        if rule == "lars":
            update = update * factor
            denominator = (update + row[s.L2] * weight) + row[s.EPS]
        elif rule == "lars as optax":
            squares = sum_of_squares(g) * factor * factor
            products = 2 * row[s.L2] * factor * sum_of_products(w, g)
            update = np.sqrt(squares + products + row[s.L2] * row[s.L2] * sum_of_squares(w))
            denominator = update + row[s.EPS]
        ratio = min(row[s.TRUST] * weight / denominator, numbers[s.MAX_RATIO])
        regular = row[s.TRUST] and min(weight, update) >= numbers[s.MIN_NORM]
        ratios.append(ratio if regular else 1.0)
    return np.array(ratios).astype(floats.dtype)


@pytest.mark.parametrize("dtype", LEAF_DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_ratios_are_those_of_the_formulas(rule, dtype, backend):
    rng = np.random.default_rng(0)
    layout, floats = usual_layout(dtype), scalars_of(rule, dtype)
    states, leaves = states_of(layout, rng), random_leaves(layout, rng)
    with jax.enable_x64(dtype == "float64"):
        for gradients in leaves, to_arena(layout, leaves):
            new, ratios = ratios_of(rule, layout, floats, states, gradients, backend)
            wanted = expected_ratios(rule, layout, new, states, leaves)
            assert {1.0, float(new[s.MAX_RATIO])} < set(wanted.tolist())
            if backend == "xla":
                rtol = 1e-5 if dtype == "float32" else 1e-13
                np.testing.assert_allclose(ratios, wanted, rtol=rtol)
            else:
                assert_same_bits(ratios, wanted)
    if rule != "lamb":
        norm = np.linalg.norm(states[0].astype(np.float64))
        np.testing.assert_allclose(new[s.PARAM_NORM], norm, rtol=1e-6)


@native_backends
def test_scalars_of_float64_beside_a_float32_arena(backend):
    rng = np.random.default_rng(1)
    layout, floats = usual_layout(), scalars_of("lars", "float64")
    states, leaves = states_of(layout, rng), random_leaves(layout, rng)
    with jax.enable_x64(True):
        new, ratios = ratios_of("lars", layout, floats, states, leaves, backend)
    assert_same_bits(ratios, expected_ratios("lars", layout, new, states, leaves))


def test_operands_that_do_not_fit_are_refused(backend):
    layout = usual_layout()
    arena, ints = jnp.zeros(layout.size), jnp.asarray(s.initial_ints())
    floats, groups = jnp.asarray(make_floats()), layout.segments[:, 4].astype(np.int32)
    count = len(layout.segments)
    where = {"backend": backend}
    _, *two = ops.norms(layout, ints, arena, weights=arena, flag=False, **where)

    def finish(workspaces=two, trust=1, groups=(groups,), segments=(count,) * 2):
        ops.finish(
            floats, ints, workspaces, segments, gradients=1, trust=trust, groups=groups, **where
        )

    with pytest.raises(ValueError, match="products: they are with the weights"):
        ops.norms(layout, ints, arena, products=True, flag=False, **where)
    with pytest.raises(ValueError, match=r"weights: got float32\[3\]"):
        ops.norms(layout, ints, arena, weights=jnp.zeros(3), flag=False, **where)
    with pytest.raises(ValueError, match="trust: got 3, wanted 0, 1 or 2"):
        finish(trust=3)
    with pytest.raises(ValueError, match="workspaces: got 2, wanted 3 for each of the 1 arenas"):
        finish(trust=2)
    with pytest.raises(ValueError, match="groups: got 0, wanted one for each of the 1 arenas"):
        finish(groups=())
    with pytest.raises(ValueError, match=r"groups\[0\]: got int32"):
        finish(groups=(groups[1:],))
    with pytest.raises(ValueError, match="groups: they are for trust ratios"):
        finish(trust=0)
    with pytest.raises(ValueError, match=r"ratios: got float32\[2\], wanted float32"):
        ops.update("sgd", layout, floats, arena, (), arena, ratios=jnp.ones(2), **where)


def test_without_arenas_there_are_no_ratios(backend):
    floats = jnp.asarray(make_floats())
    assert ops.finish_ratios(floats, [], [], [], backend=backend) == (floats, ())
    state = jr.TrainState.create({}, jr.lamb(0.1, backend=backend)).apply_gradients({})
    assert state.trust_ratios() == {}


# A state's leaves.


def make(name, params, learning_rate=0.5, *, backend, create=None, **options):
    optimizer = TRUSTED[name](learning_rate, backend=backend, **options)
    return jr.TrainState.create(params, optimizer, **(create or {}))


@pytest.mark.parametrize("name", TRUSTED)
def test_where_a_norm_is_zero_the_ratio_is_1_and_zero_weights_move(name, backend):
    params = {"weights": jnp.zeros((3, 4)), "still": jnp.full((3, 4), 2.0), "both": jnp.zeros(3)}
    grads = {"weights": jnp.ones((3, 4)), "still": jnp.zeros((3, 4)), "both": jnp.zeros(3)}
    state = make(name, params, trust_ratio_mask=True, weight_decay=0.0, backend=backend)
    state = make_step()(state, grads)
    assert state.trust_ratios() == {"weights": 1, "still": 1, "both": 1}
    new = state.params
    # Both LARS and Adam's first step move by the learning rate.
    np.testing.assert_allclose(new["weights"], np.full((3, 4), -0.5), rtol=1e-5)
    np.testing.assert_array_equal(new["still"], params["still"])
    np.testing.assert_array_equal(new["both"], params["both"])


@pytest.mark.parametrize("name", TRUSTED)
def test_biases_and_norm_scales_have_neither_decay_nor_ratio(name, backend):
    rng = np.random.default_rng(2)
    shapes = {
        "attention": {"kernel": (3, 2, 4), "bias": (2, 4)},
        "conv": {"kernel": (3, 3, 2, 4), "bias": (4,)},
        "norm": {"scale": (4,), "bias": (4,)},
    }
    params, *grads = (
        jax.tree.map(
            lambda x: jnp.asarray(rng.normal(size=x), jnp.float32),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        for _ in range(4)
    )
    mask = {"mask": "weights"} if name == "lamb" else {"weight_decay_mask": "weights"}
    own = {"trust_ratio_mask": "weights", "weight_decay": 0.3, **mask}
    state = make(name, params, 0.05, backend=backend, **own)
    plain = jr.adam(0.05, eps=1e-6) if name == "lamb" else jr.sgd(0.05, momentum=0.9)
    other = jr.TrainState.create(params, plain)
    step, plain_step = make_step(), make_step()
    for g in grads:
        state, other = step(state, g), plain_step(other, g)
    biases = {
        leaf.path for leaf in state.plan.leaves if leaf.path.split("/")[1] in ("bias", "scale")
    }
    assert len(biases) == 4
    for path, ratio in state.trust_ratios().items():
        one, two = (functools.reduce(dict.get, path.split("/"), x.params) for x in (state, other))
        assert (ratio == 1) == (path in biases)
        assert np.allclose(one, two, rtol=1e-5, atol=1e-6) == (path in biases)


@pytest.mark.parametrize("name", ["lars", "lars as optax"])
def test_tiny_gradients_have_the_ratio_of_the_formula_above_min_norm(name, backend):
    params = {"kernel": jnp.asarray([[3.0, 4.0]])}
    grads = {"kernel": jnp.asarray([[0.6e-25, 0.8e-25]])}
    own = {"trust_ratio_mask": True, "trust_coefficient": 0.125, "metrics": ["param_norm"]}
    bound = {"max_ratio": np.inf}
    state = make(name, params, min_norm=0, backend=backend, **own, **bound).apply_gradients(grads)
    np.testing.assert_allclose(state.trust_ratios()["kernel"], 0.125 * 5 / 1e-25, rtol=1e-5)
    # By lr * 0.125 * 5 along the gradient.
    moved = np.asarray(params["kernel"]) - np.asarray([[0.6, 0.8]]) * 0.5 * 0.125 * 5
    np.testing.assert_allclose(state.params["kernel"], moved, rtol=1e-5)
    np.testing.assert_allclose(state.metrics["grad_norm"], 1e-25, rtol=1e-5)
    np.testing.assert_allclose(state.metrics["param_norm"], 5, rtol=1e-6)
    # LARS by default has a least norm; as optax has it, one that is given.
    least = {} if name == "lars" else {"min_norm": 1e-12}
    state = make(name, params, backend=backend, **own, **bound, **least).apply_gradients(grads)
    assert state.trust_ratios() == {"kernel": 1}


@pytest.mark.parametrize("name", TRUSTED)
def test_every_slice_of_a_stacked_leaf_has_its_ratio(name, backend):
    rng = np.random.default_rng(3)
    # The slices of the first are padded in the arena, those of the second are not.
    shapes = {"odd": (3, 5, 7), "even": (2, 3, 4, 8), "bias": (3, 5)}
    stacked = {"odd": 1, "even": 2, "bias": 1}
    params = {k: jnp.asarray(rng.normal(size=v) * 3, jnp.float32) for k, v in shapes.items()}
    params["odd"] = params["odd"] * jnp.asarray([1.0, 10.0, 0.0])[:, None, None]

    def apart(tree):
        return {
            f"{path}/{i}": part
            for path, x in tree.items()
            for i, part in enumerate(x.reshape(-1, *x.shape[stacked[path] :]))
        }

    own = {"trust_ratio_mask": True, "weight_decay": 0.1, "backend": backend}
    one = make(name, params, create={"stacked": stacked}, **own)
    many = make(name, apart(params), **own)
    step, other_step = make_step(), make_step()
    for _ in range(3):
        grads = {k: jnp.asarray(rng.normal(size=v), jnp.float32) for k, v in shapes.items()}
        one, many = step(one, grads), other_step(many, apart(grads))
    ratios = one.trust_ratios()
    assert {k: v.shape for k, v in ratios.items()} == {"odd": (3,), "even": (2, 3), "bias": (3,)}
    assert len(np.unique(ratios["even"])) == 6
    for got, wanted in (
        (apart(ratios), many.trust_ratios()),
        (apart(one.params), many.params),
    ):
        assert got.keys() == wanted.keys()
        for path, x in wanted.items():
            np.testing.assert_allclose(got[path], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TRUSTED)
def test_ratios_are_bounded(name, backend):
    params = {"large": jnp.full((2, 2), 1e4), "small": jnp.full((2, 2), 1e-3), "zero": jnp.zeros(2)}
    grads = jax.tree.map(jnp.ones_like, params)
    own = {} if name == "lamb" else {"trust_coefficient": 1.0}
    state = make(name, params, trust_ratio_mask=True, max_ratio=0.5, backend=backend, **own)
    ratios = make_step()(state, grads).trust_ratios()
    # The ratio of a norm of zero is no large one.
    assert ratios["large"] == 0.5
    assert ratios["zero"] == 1
    np.testing.assert_allclose(ratios["small"], 1e-3, rtol=1e-5)


@pytest.mark.parametrize("name", TRUSTED)
def test_leaves_without_elements_have_ratio_1_and_leave_the_others_theirs(name, backend):
    shapes = {"a": (0, 3), "b": (4, 4), "c": (2, 0), "d": (3, 3), "e": (0,), "f": (2, 2)}
    params = {k: jnp.full(v, 2.0 + i) for i, (k, v) in enumerate(shapes.items())}
    state = make(name, params, trust_ratio_mask=True, create={"stacked": {"c": 1}}, backend=backend)
    assert all((x == 1).all() for x in state.trust_ratios().values())
    ratios = make_step()(state, jax.tree.map(jnp.ones_like, params)).trust_ratios()
    assert ratios["a"] == ratios["e"] == 1
    assert ratios["c"].tolist() == [1, 1]
    tau = 1.0 if name == "lamb" else 1e-3
    for i, path in enumerate(shapes):
        if path in "bdf":
            np.testing.assert_allclose(ratios[path], tau * (2.0 + i), rtol=1e-5)
    empty = make(name, {"a": jnp.zeros((0, 3))}, backend=backend)
    assert make_step()(empty, {"a": jnp.zeros((0, 3))}).trust_ratios() == {"a": 1}


@pytest.mark.parametrize("name", [*TRUSTED, "lion"])
def test_a_nan_in_a_tensor_of_any_region_skips_the_call(name, backend):
    params = {region.name: jnp.full((2, 3), 2.0) for region in W_REGIONS}
    optimizers = TRUSTED | {"lion": functools.partial(jr.lion, mask=True)}
    state = jr.TrainState.create(
        params,
        optimizers[name](0.1, weight_decay=0.1, max_norm=1.0, backend=backend),
        rules=lambda path, leaf: Region[path],
    )
    step = make_step()
    grads = jax.tree.map(jnp.ones_like, params)
    state = step(state, grads)
    for i, path in enumerate(params):
        new = step(state, grads | {path: grads[path].at[-1, -1].set(jnp.nan)})
        assert (int(new.step), int(new.skipped), bool(new.has_nan)) == (1, i + 1, True)
        assert_trees_equal((new.weights, new.moments), (state.weights, state.moments))
        if name != "lion":
            # Of a call that updates nothing.
            assert all(ratio == 1 for ratio in new.trust_ratios().values())
        state = new
    assert int(step(state, grads).step) == 2


@pytest.mark.parametrize("name", TRUSTED)
def test_ratios_of_members_under_jit_and_of_a_donated_state(name, backend):
    rng = np.random.default_rng(5)
    params = {"kernel": jnp.asarray(rng.normal(size=(3, 2, 4)), jnp.float32), "b": jnp.ones(3)}
    grads = jax.tree.map(jnp.ones_like, params)

    def create(scale):
        scaled = jax.tree.map(lambda x: x * scale, params)
        return make(name, scaled, create={"stacked": {"kernel": 1}}, backend=backend)

    states = jax.vmap(create)(jnp.asarray([1.0, 2.0]))
    step = jax.jit(jax.vmap(lambda s, g: s.apply_gradients(g), (0, None)), donate_argnums=0)
    new = step(states, grads)
    ratios = new.trust_ratios()
    assert {k: v.shape for k, v in ratios.items()} == {"kernel": (2, 3), "b": (2,)}
    traced = jax.jit(jax.vmap(lambda state: state.trust_ratios()))(new)
    step(new, grads)  # Which uses up the state that they are of.
    for path in params:
        np.testing.assert_array_equal(traced[path], ratios[path])
    for i, scale in enumerate([1.0, 2.0]):
        alone = make_step()(create(scale), grads).trust_ratios()
        for path in params:
            np.testing.assert_allclose(ratios[path][i], alone[path], rtol=1e-6)


def test_an_optimizer_without_ratios_says_so():
    state = jr.TrainState.create({"w": jnp.ones(2)}, jr.lion(0.1, backend="xla"))
    with pytest.raises(ValueError, match="trust_ratios: lion has none"):
        state.trust_ratios()
    assert state.ratios == ()
