"""What the tests of states over several devices share: a tree, its gradients, meshes and steps."""

import functools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from conftest import NATIVE
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrenaissance as jr

FORMS = ("replicated", "zero1", "leaves")
HOW = ("jit", "shard_map", "shard_map without checks")
ROWS = 48
"""Of a batch: as many for each of 1, 2, 3 or 8 devices."""

# One leaf is larger than an even part of them all for each of 8 devices, and some are smaller than
# the number of devices.
SHAPES = {
    "bias": (31,),
    "kernel": (5, 48),
    "large": {"kernel": (48, 60)},
    "odd": (11, 3),
    "one": (1,),
    "scalar": (),
    "stack": (3, 24, 5),
    "three": (3,),
}
STACKED = {"stack": 1}
SPECS = {
    "kernel": P(None, "data"),
    "large/kernel": P("data"),
    "stack": P(None, "data"),
}
"""How the leaves lie with "leaves"; those of other paths are on all devices."""


def tree(seed, shapes=None, dtype=np.float32):
    """Normal leaves of these shapes."""
    rng, shapes = np.random.default_rng(seed), SHAPES if shapes is None else shapes
    is_shape = {"is_leaf": lambda x: isinstance(x, tuple)}
    return jax.tree.map(lambda x: np.asarray(rng.normal(size=x), dtype), shapes, **is_shape)


def batch(step):
    """A number for each row."""
    return np.random.default_rng(100 + step).normal(size=ROWS).astype(np.float32)


def loss_fn(params, waves, xs):
    """The mean over rows; each row's gradient differs in every element."""
    total = 0.0
    for p, wave in zip(jax.tree.leaves(params), jax.tree.leaves(waves), strict=True):
        rows = xs.astype(p.dtype).reshape(-1, *(1,) * p.ndim)
        total += jnp.sum(jnp.cos(p + wave * rows)) / len(xs)
    return total


def exact_gradients(weights, waves, xs):
    """Of `loss_fn`, in float64."""
    rows = [np.float64(xs).reshape(-1, *(1,) * w.ndim) for w in weights]
    return [
        -np.sin(w + np.float64(wave) * x).mean(0)
        for w, wave, x in zip(weights, waves, rows, strict=True)
    ]


def averaged(grads, specs, mesh):
    """Inside of `jax.shard_map`, where devices have copies of a part of a leaf: their mean."""

    def of_leaf(g, spec):
        named = jax.tree.leaves(tuple(spec))
        return jax.lax.pmean(g, [axis for axis in mesh.axis_names if axis not in named])

    return jax.tree.map(of_leaf, grads, specs)


def train_step(state, waves, xs, axes=(), mean=lambda grads: grads):
    """A step over the rows, whose mean of any statistic is that over these axes, too."""
    trained = state.trainable_params
    grads = mean(jax.grad(lambda p: state.scale_loss(loss_fn(p, waves, xs)))(trained))
    if state.extra is None:
        return state.apply_gradients(grads)
    mean = jnp.mean(xs)
    mean = jax.lax.pmean(mean, axes) if axes else mean
    stats = jax.tree.map(lambda x: 0.5 * x + 0.5 * mean, state.extra.tree)
    return state.apply_gradients(grads, extra=state.extra.replace(stats))


def devices_of(backend, count):
    """So many devices that a backend serves; the test is skipped where there are fewer."""
    devices = jax.devices("cuda" if backend == "cuda" else "cpu")
    if len(devices) < count:
        pytest.skip(f"needs {count} devices, and {backend} has {len(devices)}")
    return devices[:count]


def make_mesh(backend, shape=(8,), axes=("data",), kind=AxisType.Auto):
    devices = devices_of(backend, int(np.prod(shape)))
    return jax.make_mesh(shape, axes, (kind,) * len(axes), devices=devices)


def on_backends(names, values, on_xla):
    """Runs a test with all of these values on native backends; and where the compiled modules are
    switched off, with some on the xla backend, which compiles each for seconds."""
    native = {"cpu": [pytest.mark.native], "cuda": [pytest.mark.native, pytest.mark.gpu]}
    found = [] if NATIVE else [pytest.param("xla", *own) for own in on_xla]
    for backend, marks in native.items():
        found += [pytest.param(backend, *own, marks=marks) for own in values]
    return pytest.mark.parametrize(("backend", *names), found, indirect=["backend"])


def specs_like(params, specs):
    """For each leaf its spec, by its path."""
    return jtu.tree_map_with_path(
        lambda path, _: specs.get(jtu.keystr(path, simple=True, separator="/"), P()), params
    )


def on_mesh(params, mesh, specs=SPECS):
    """The leaves as they lie with "leaves"."""
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
        params,
        specs_like(params, specs),
    )


def stepper(state, waves, how, *, specs=SPECS, data_axis="data"):
    """A function (state, xs) → state: a plain jitted step, or one in a `jax.shard_map`.

    With "leaves" inside of it every device has the whole batch.
    """
    placement = state.plan.placement
    if placement is None:
        alone = jax.jit(train_step)
        return lambda state, xs: alone(state, waves, xs)
    mesh, own, rows = placement.mesh, specs if placement.form == "leaves" else {}, P(data_axis)
    is_explicit = mesh.axis_types[0] == AxisType.Explicit
    if placement.form == "leaves" and (how != "jit" or is_explicit):
        rows = P()  # The axis is taken by the leaves.
    placed = on_mesh(waves, mesh, own)
    if how == "jit":
        step = jax.jit(train_step)
    else:
        of_waves = specs_like(waves, own)
        if placement.form == "leaves":
            own_mean = {"mean": lambda grads: averaged(grads, of_waves, mesh)}
        else:
            own_mean = {"axes": data_axis}
        step = jax.jit(
            jax.shard_map(
                functools.partial(train_step, **own_mean),
                mesh=mesh,
                in_specs=(state.partition_specs, of_waves, rows),
                out_specs=state.partition_specs,
                check_vma=how == "shard_map",
            )
        )
    return lambda state, xs: step(state, placed, jax.device_put(xs, NamedSharding(mesh, rows)))


def trained(state, waves, how="jit", *, steps=4, **options):
    """The state after some steps."""
    step = stepper(state, waves, how, **options)
    for i in range(steps):
        state = step(state, batch(i))
    return state


def assert_same_training(got, wanted, rtol=2e-5, atol=4e-6):
    """Everything that a checkpoint holds, with the metrics: counters to the bit."""
    both = [(x.to_leaves(host=True), x.metrics) for x in (got, wanted)]
    if got.spec.trust:
        both = [(*x, state.trust_ratios()) for x, state in zip(both, (got, wanted), strict=True)]
    entries = [jtu.tree_flatten_with_path(x)[0] for x in both]
    assert [path for path, _ in entries[0]] == [path for path, _ in entries[1]]
    for (path, a), (_, b) in zip(*entries, strict=True):
        exact = jnp.issubdtype(b.dtype, jnp.integer)
        close = {} if exact else {"rtol": rtol, "atol": atol}
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, err_msg=jtu.keystr(path), **({"rtol": 0} | close))


def assert_replicas_agree(arrays):
    """What several devices hold of the same elements has the same bits."""
    for path, x in jtu.tree_leaves_with_path(arrays):
        found = {}
        for shard in x.addressable_shards:
            own = np.ascontiguousarray(shard.data).view(np.uint8)
            first = found.setdefault(str(shard.index), own)
            np.testing.assert_array_equal(own, first, err_msg=jtu.keystr(path))


def assert_lies_as_its_form_says(state):
    """Arenas are cut, or whole on every device; all else is whole."""
    placement = state.plan.placement
    arenas = jax.tree.leaves((state.weights, state.moments, state.ema, state.accumulator))
    for x in arenas:
        wanted = NamedSharding(placement.mesh, placement.arena_spec)
        assert x.sharding.is_equivalent_to(wanted, 1)
        parts = 1 if placement.form == "replicated" else placement.devices
        assert x.addressable_shards[0].data.size * parts == x.size
    for x in (*state.norms, *state.ratios, state.floats, state.ints):
        assert x.sharding.is_fully_replicated


def make(optimizer, mesh=None, sharding="replicated", *, specs=SPECS, params=None, **options):
    """A state for the shared tree, or another."""
    params = tree(0) if params is None else params
    if mesh is None:
        return jr.TrainState.create(params, optimizer, **options)
    if sharding == "leaves":
        params = on_mesh(params, mesh, specs)
    return jr.TrainState.create(params, optimizer, mesh=mesh, sharding=sharding, **options)
