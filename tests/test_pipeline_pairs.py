"""Every two features of a step together, against the whole step in float64: in threes, which have
every pair in one of them and are fewer programs."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arenas import native_backends
from pipeline_oracle import LossScale, Pipeline
from states import by_path

import jaxrenaissance as jr

MICRO_BATCHES = 6
MEASURED = {"loss_scale", "clip_factor", "grad_norm", "param_norm", "update_norm", "leaf_grad_norm"}
BAD = 2  # the micro-batch with a NaN in it
SCALE = {"initial": 8.0, "growth_interval": 2, "growth": 2.0, "backoff": 0.5, "maximum": 64.0}
NUMBERS = {"learning_rate": 0.05, "b1": 0.8, "b2": 0.95, "eps": 0.1, "weight_decay": 0.3}
SGD = {"learning_rate": 0.05, "weight_decay": 0.3}
LARS = SGD | {"momentum": 0.7, "trust_coefficient": 0.4, "eps": 0.1, "max_ratio": 0.6}
LION = {"learning_rate": 0.05, "b1": 0.8, "b2": 0.95, "weight_decay": 0.3}
# Kind of the oracle → factory, numbers, other options.
KINDS = {
    "adamw": (jr.adamw, NUMBERS, {}),
    "adam": (jr.adam, NUMBERS, {}),
    "sgd": (jr.sgd, SGD, {}),
    "momentum": (jr.sgd, SGD | {"momentum": 0.7}, {"decoupled": False}),
    "nesterov": (jr.sgd, SGD | {"momentum": 0.7}, {"nesterov": True}),
    "lars": (jr.lars, LARS, {}),
    "lars_nesterov": (jr.lars, LARS, {"nesterov": True, "optax_form": True}),
    "lamb": (jr.lamb, NUMBERS | {"max_ratio": 1.5}, {}),
    "lion": (jr.lion, LION, {}),
}
TRUST = ("lars", "lars_nesterov", "lamb")
GROUP = {"scale": 0.5, "b1": 0.6, "momentum": 0.5, "weight_decay": 0.2}
BIASES = {"learning_rate": 0.02, "eps": 0.3, "trust_coefficient": 0.5}


@dataclasses.dataclass
class Case:
    """What a combination of features changes."""

    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    create: dict[str, Any] = dataclasses.field(default_factory=dict)
    oracle: dict[str, Any] = dataclasses.field(default_factory=dict)
    features: tuple[str, ...] = ()
    kind: str = "adamw"

    def own(self, numbers: dict[str, float]) -> dict[str, float]:
        """A group's numbers, but for those that this optimizer does not have."""
        return {k: v for k, v in numbers.items() if k in ("scale", *KINDS[self.kind][1])}


def option(**numbers: float) -> Callable[[Case], None]:
    """A feature that is hyperparameters of the same name on both sides."""

    def feature(case: Case) -> None:
        case.optimizer |= numbers
        case.oracle |= numbers

    return feature


def loss_scale(case: Case) -> None:
    case.optimizer["loss_scale"] = jr.DynamicLossScale(**SCALE)
    case.oracle["loss_scale"] = lambda: LossScale(**SCALE)


def accumulate(case: Case) -> None:
    case.optimizer["accumulate"] = jr.Accumulate(2)
    case.oracle["every"] = 2


def groups(case: Case) -> None:
    case.optimizer["groups"] = [
        jr.Group("head/*", name="head", **case.own(GROUP)),
        jr.Group(lambda path, leaf: path == "body/bias", name="biases", **case.own(BIASES)),
    ]


def trainable(case: Case) -> None:
    case.create["trainable"] = ["body/*", "head/*"]


def metrics(case: Case) -> None:
    case.optimizer["metrics"] = ("grad_norm", "param_norm", "update_norm", "leaves")


def stacked(case: Case) -> None:
    case.create["stacked"] = {"body/*": 1}


def compute_dtype(dtype: str) -> Callable[[Case], None]:
    def feature(case: Case) -> None:
        case.create["compute_dtype"] = dtype

    return feature


def by_name(case: Case) -> None:
    """Nothing in the options: `run` looks for it."""


FEATURES = {
    "loss_scale": loss_scale,
    "max_norm": option(max_norm=1.5),
    "max_value": option(max_value=0.3),
    "ema": option(ema_decay=0.7),
    "ema_debias": option(ema_decay=0.7, ema_debias=True),
    "accumulate": accumulate,
    "zero_gradients": by_name,
    "groups": groups,
    "schedule": by_name,
    "trainable": trainable,
    "metrics": metrics,
    "stacked": stacked,
    "float64": by_name,
    "bfloat16": compute_dtype("bfloat16"),
    "float16": compute_dtype("float16"),
    "vmap": by_name,
}
EXCLUSIVE = [
    {"ema", "ema_debias"},
    {"accumulate", "zero_gradients"},
    {"bfloat16", "float16"},
]


def pairs_of(features: tuple[str, ...]) -> set[tuple[str, ...]]:
    return set(itertools.combinations(features, 2))


def threes() -> Iterator[tuple[str, ...]]:
    """The three features with the most pairs that are still to come, until there are none."""
    exclusive = {pair for pair in pairs_of(tuple(FEATURES)) if set(pair) in EXCLUSIVE}
    possible = itertools.combinations(FEATURES, 3)
    possible = [three for three in possible if not pairs_of(three) & exclusive]
    missing = pairs_of(tuple(FEATURES)) - exclusive
    while missing:
        best = max(possible, key=lambda three: len(pairs_of(three) & missing))
        missing -= pairs_of(best)
        yield best


ON_NATIVE_BACKENDS = [
    ("loss_scale", "max_norm"),
    ("loss_scale", "zero_gradients"),
    ("max_norm", "accumulate"),
    ("max_norm", "float64"),
    ("max_value", "bfloat16"),
    ("ema", "accumulate"),
    ("ema_debias", "vmap"),
    ("accumulate", "vmap"),
    ("groups", "metrics"),
    ("groups", "schedule"),
    ("trainable", "metrics"),
    ("stacked", "metrics"),
    ("metrics", "vmap"),
    ("float64", "metrics"),
    ("float16", "accumulate"),
    ("float16", "loss_scale"),
]
EVERYTHING = ("loss_scale", "max_norm", "max_value", "ema_debias", "accumulate", "groups")
EVERYTHING += ("schedule", "trainable", "metrics", "stacked", "float64", "bfloat16", "vmap")


def schedule_of(value: float) -> Callable[[Any], Any]:
    # Of the updates made before; of one that is none it would be another value.
    return lambda count: value * (1 + count) / 2


def make_case(features: tuple[str, ...], kind: str) -> Case:
    _, numbers, _ = KINDS[kind]
    case = Case(dict(numbers), {}, dict(numbers), features, kind)
    for name in features:
        FEATURES[name](case)
    if "schedule" in features:
        scheduled = {"learning_rate", "weight_decay", "eps", "max_norm", "max_value", "ema_decay"}
        # Members have learning rates of their own.
        if "vmap" in features:
            scheduled.remove("learning_rate")
        for name in scheduled & case.oracle.keys():
            case.optimizer[name] = case.oracle[name] = schedule_of(case.oracle[name])
    return case


def tree(rng: np.random.Generator, features: tuple[str, ...]) -> Any:
    wide = jnp.float64 if "float64" in features else jnp.float32
    shapes = {
        "body": {"bias": ((2, 3), jnp.float32), "kernel": ((2, 4, 3), wide)},
        "head": {"bias": ((), wide), "kernel": ((3, 1), jnp.float32)},
    }
    if "trainable" in features:
        shapes["base"] = {"kernel": ((2, 2), jnp.float32)}
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x[0]), x[1]),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def gradients_of(state: jr.TrainState, wanted: Any) -> Any:
    """Those of a linear loss: `wanted` times the loss scale, in the compute dtypes."""

    def loss(params: Any) -> jax.Array:
        products = jax.tree.map(
            lambda p, c: jnp.sum(p * c.astype(p.dtype)).astype(jnp.float32),
            state.merge(params),
            wanted,
        )
        return state.scale_loss(sum(jax.tree.leaves(products)))

    return jax.grad(loss)(state.trainable_params)


def read(state: jr.TrainState, case: Case) -> dict[str, Any]:
    average = {"ema_params": state.ema_params} if "ema_decay" in case.optimizer else {}
    return {"metrics": state.metrics} | average


def whole_step(state: jr.TrainState, micro_batches: Any, case: Case) -> Any:
    """One call of `apply_gradients`; its gradients, the new state, and what it reads as."""
    if "zero_gradients" in case.features:

        def body(acc: Any, wanted: Any) -> Any:
            grads = gradients_of(state, wanted)
            return state.accumulate(acc, grads), grads

        acc, grads = jax.lax.scan(body, state.zero_gradients(), micro_batches)
        new = state.apply_gradients(acc)
    else:
        grads = gradients_of(state, jax.tree.map(lambda x: x[0], micro_batches))
        new = state.apply_gradients(grads)
        grads = jax.tree.map(lambda x: x[None], grads)
    return new, grads, read(new, case)


def make_oracle(case: Case, plan: Any, params: Any, numbers: dict[str, float]) -> Pipeline:
    options = case.oracle | numbers
    if "loss_scale" in options:
        options["loss_scale"] = options["loss_scale"]()
    if "groups" in case.features:
        given = {"head/bias": GROUP, "head/kernel": GROUP, "body/bias": BIASES}
        options["of_leaf"] = [case.own(given.get(leaf.path, {})) for leaf in plan.leaves]
    decayed = [leaf.region in jr.WEIGHTS for leaf in plan.leaves]
    decoupled = KINDS[case.kind][2].get("decoupled")
    return Pipeline(
        case.kind,
        trained(plan, params),
        decayed=decayed,
        trusted=decayed,
        stacked=[leaf.stacked for leaf in plan.leaves],
        decoupled=decoupled,
        optax_form=KINDS[case.kind][2].get("optax_form", False),
        **options,
    )


def trained(plan: Any, values: Any) -> list[np.ndarray]:
    """The trained leaves of a tree, in float64."""
    leaves = zip(jax.tree.leaves(values, is_leaf=lambda x: x is None), plan.trained, strict=True)
    return [np.asarray(x).astype(np.float64) for x, is_trained in leaves if is_trained]


def assert_all_close(got: Any, wanted: Any, what: str) -> None:
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=f"{what} {i}")


def assert_is_that_of_the_oracle(state: Any, seen: Any, oracle: Pipeline, case: Case) -> None:
    plan = state.plan
    assert_all_close(by_path(state, state.weights).values(), oracle.weights, "weights")
    kept = (oracle.first_moments, oracle.second_moments)[: len(state.moments[0])]
    for i, series in enumerate(kept):
        arenas = [moments[i] for moments in state.moments]
        assert_all_close(by_path(state, arenas).values(), series, f"moment {i}")
    if case.kind in TRUST:
        assert_all_close(state.trust_ratios().values(), oracle.ratios, "ratio")
    if "ema_params" in seen:
        assert_all_close(trained(plan, seen["ema_params"]), oracle.average, "average")
    for name in ("step", "calls", "skipped", "consecutive_skips", "has_nan"):
        assert seen["metrics"][name] == getattr(oracle, name), name
    wanted = {}
    if "loss_scale" in case.features:
        wanted["loss_scale"] = oracle.loss_scale.value
    if "max_norm" in case.features:
        wanted["clip_factor"] = oracle.clip_factor
    if {"max_norm", "metrics"} & set(case.features) or case.kind.startswith("lars"):
        wanted["grad_norm"] = oracle.grad_norm
    if "metrics" in case.features:
        for name in ("param_norm", "update_norm", "leaf_grad_norm"):
            wanted[name] = getattr(oracle, name)
    assert MEASURED & seen["metrics"].keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(seen["metrics"][name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def stack(items: Any) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *items)


def run(features: tuple[str, ...], backend: str, kind: str = "adamw") -> None:
    """Six micro-batches, the third with a NaN; everything compared after every call."""
    case, rng = make_case(features, kind), np.random.default_rng(0)
    many = "vmap" in features
    members = 3 if many else 1
    params = [tree(rng, features) for _ in range(members)]
    batches = [[tree(rng, features) for _ in range(MICRO_BATCHES)] for _ in range(members)]
    kernel = batches[-1][BAD]["head"]["kernel"]
    batches[-1][BAD]["head"]["kernel"] = kernel.at[1, 0].set(jnp.nan)

    def create(params: Any, rate: Any) -> jr.TrainState:
        factory, _, options = KINDS[kind]
        options = options | case.optimizer | ({"learning_rate": rate} if many else {})
        options["weight_decay_mask" if factory is jr.lars else "mask"] = "weights"
        if kind in TRUST:
            options["trust_ratio_mask"] = "weights"
        optimizer = factory(backend=backend, **options)
        return jr.TrainState.create(params, optimizer, **case.create)

    def step(state: jr.TrainState, micro_batches: Any) -> Any:
        return whole_step(state, micro_batches, case)

    rates = [0.05 * (1 + i) for i in range(members)]
    if many:
        state = jax.jit(jax.vmap(create))(stack(params), jnp.asarray(rates))
        step = jax.jit(jax.vmap(step), donate_argnums=0)
    else:
        state = create(params[0], rates[0])
        step = jax.jit(step, donate_argnums=0)
    oracles = []
    for own, rate in zip(params, rates, strict=True):
        numbers = {"learning_rate": rate} if many else {}
        oracles.append(make_oracle(case, state.plan, own, numbers))
    in_a_step = 2 if "zero_gradients" in features else 1
    for first in range(0, MICRO_BATCHES, in_a_step):
        batch = [stack(own[first : first + in_a_step]) for own in batches]
        state, grads, seen = step(state, stack(batch) if many else batch[0])
        results = jax.tree.map(np.asarray, (state, grads, seen))
        for i, oracle in enumerate(oracles):
            own = jax.tree.map(lambda x, i=i: x[i], results) if many else results
            for j in range(in_a_step):
                oracle.add(trained(state.plan, jax.tree.map(lambda g, j=j: g[j], own[1])))
            oracle.finish(case.oracle.get("every", 1))
            assert_is_that_of_the_oracle(own[0], own[2], oracle, case)
    assert step._cache_size() == 1
    updates = MICRO_BATCHES // (2 if {"accumulate", "zero_gradients"} & set(features) else 1)
    assert [oracle.step for oracle in oracles] == [updates] * (members - 1) + [updates - 1]


@pytest.mark.parametrize("features", list(threes()), ids="-".join)
def test_pairs_are_right_on_the_xla_backend(features):
    with jax.enable_x64("float64" in features):
        run(features, "xla")


@native_backends
@pytest.mark.parametrize("features", ON_NATIVE_BACKENDS, ids="-".join)
def test_some_pairs_are_right_on_the_native_backends(features, backend):
    with jax.enable_x64("float64" in features):
        run(features, backend)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"adamw"}))
def test_every_optimizer_has_every_feature(kind, backend):
    features = ("loss_scale", "max_norm", "max_value", "ema", "accumulate", "groups", "metrics")
    run((*features, *(("stacked",) if kind in TRUST else ())), backend, kind)


@pytest.mark.parametrize("kind", ["adamw", *TRUST])
def test_everything_together_is_right(kind, backend):
    with jax.enable_x64(True):
        run(EVERYTHING, backend, kind)


@pytest.mark.parametrize("kind", TRUST)
def test_trust_ratios_of_sums_of_micro_batches_are_right(kind, backend):
    run(("loss_scale", "max_norm", "zero_gradients", "stacked"), backend, kind)
