"""The optimizer part of a data-parallel step: optax on leaves, and ours in arenas.

A step goes from each device's own gradients to weights in the compute dtype on every device. The
gradients are made of the step's compute params and of numbers that each device has of its own, by
one pass over them, so that no step can start before the one before it has ended.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from train_sides import LEARNING_RATE, WEIGHT_DECAY, optax_adamw

import jaxrenaissance as jr
from jaxrenaissance.bench.data import random_tree
from jaxrenaissance.bench.sides import Side

EACH, SAME = PartitionSpec("data"), PartitionSpec()
PULL = 0.01  # of the compute params in the gradients


class Work(NamedTuple):
    """What the sides start from.

    Attributes:
        mesh: of one axis, "data".
        params: in float32, on every device.
        noise: of each leaf [devices, *shape] in the compute dtype, each device's own part on it.
        dtype: of compute params and gradients.
    """

    mesh: Mesh
    params: Any
    noise: Any
    dtype: np.dtype

    @property
    def devices(self) -> int:
        return self.mesh.size


def make_work(shapes: Any, mesh: Mesh, dtype: Any) -> Work:
    """Random weights and gradients of these shapes."""
    of_each = jax.tree.map(lambda x: jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype), shapes)
    params = jax.device_put(random_tree(shapes, 0, 0.1), NamedSharding(mesh, SAME))
    noise = jax.device_put(random_tree(of_each, 1, 0.01, dtype), NamedSharding(mesh, EACH))
    return Work(mesh, params, noise, np.dtype(dtype))


def sides_of(work: Work) -> dict[str, Callable[[], Side]]:
    """By name, what makes a side. Of ours, `sums` are what crosses the links as gradients."""
    sides = {
        "optax replicated": lambda: optax_replicated(work),
        "optax sharded moments, jit": lambda: optax_sharded(work, weights_too=False),
        "optax sharded, jit": lambda: optax_sharded(work, weights_too=True),
    }
    dtypes = dict.fromkeys([np.dtype(np.float32), work.dtype])
    for dtype in dtypes:
        for form in ("replicated", "zero1"):
            sides[our_name(form, dtype)] = lambda form=form, dtype=dtype: in_shard_map(
                work, our_state(work, form, dtype)
            )
    sides[our_name("zero1", work.dtype) + ", skip_nonfinite"] = lambda: in_shard_map(
        work, our_state(work, "zero1", work.dtype, skip_nonfinite=True)
    )
    sides["ours zero1, jit"] = lambda: in_jit(work, our_state(work, "zero1", None))
    return sides


def our_name(form: str, sums: np.dtype) -> str:
    """Of a side of ours in `jax.shard_map`."""
    return f"ours {form}, {sums} sums"


def optax_replicated(work: Work) -> Side:
    """Every device has all weights and moments; gradients are averaged leaf by leaf."""
    optimizer = optax_adamw()

    def local(carry: Any, noise: Any) -> Any:
        (params, opt_state), compute = carry
        grads = jax.lax.pmean(own_gradients(compute, noise), "data")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), in_dtype(params, work.dtype)

    params = jax.tree.map(jnp.copy, work.params)
    opt_state = jax.device_put(optimizer.init(params), NamedSharding(work.mesh, SAME))
    return Side(_mapped(work, local, SAME), _start(work, (params, opt_state)), work.noise)


def optax_sharded(work: Work, *, weights_too: bool) -> Side:
    """Moments, or the weights in float32 too, cut along each leaf's first axis that divides.

    XLA decides what crosses the links, with the gradients asked for as the moments lie. Compute
    params are gathered in their own dtype where the weights are cut.
    """
    optimizer = optax_adamw()

    def step(carry: Any, noise: Any) -> Any:
        (params, opt_state), compute = carry
        params = place(params)  # or in a loop XLA would keep them in another way than asked for
        grads = cut(work.mesh, mean_gradients(compute, noise))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        opt_state = cut(work.mesh, opt_state)
        params = place(optax.apply_updates(params, updates))
        compute = gathered(work.mesh, place(in_dtype(params, work.dtype)))
        return (params, opt_state), compute

    def place(tree: Any) -> Any:
        return cut(work.mesh, tree) if weights_too else gathered(work.mesh, tree)

    params = jax.jit(lambda: place(jax.tree.map(jnp.copy, work.params)))()
    state = (params, jax.jit(lambda params: cut(work.mesh, optimizer.init(params)))(params))
    return Side(step, _start(work, state), work.noise)


def our_state(
    work: Work, form: str, reduce_dtype: Any, *, skip_nonfinite: bool = False
) -> jr.TrainState:
    """AdamW that decays every leaf and, as optax's, does not look for non-finite gradients."""
    optimizer = jr.adamw(
        LEARNING_RATE, weight_decay=WEIGHT_DECAY, mask=True, skip_nonfinite=skip_nonfinite
    )
    return jr.TrainState.create(
        work.params,
        optimizer,
        compute_dtype=work.dtype,
        mesh=work.mesh,
        sharding=form,
        reduce_dtype=reduce_dtype,
    )


def in_shard_map(work: Work, state: jr.TrainState) -> Side:
    """Ours with each device's own gradients."""

    def local(carry: Any, noise: Any) -> Any:
        state, compute = carry
        state = state.apply_gradients(own_gradients(compute, noise))
        return state, state.compute_params

    return Side(_mapped(work, local, state.partition_specs), _start(work, state), work.noise)


def in_jit(work: Work, state: jr.TrainState) -> Side:
    """Ours with gradients that XLA has averaged."""

    def step(carry: Any, noise: Any) -> Any:
        state, compute = carry
        state = state.apply_gradients(mean_gradients(compute, noise))
        return state, state.compute_params

    return Side(step, _start(work, state), work.noise)


def gradients_alone(work: Work) -> Side:
    """The pass that makes the gradients, which is in every side."""
    step = _mapped(work, lambda carry, noise: ((), own_gradients(carry[1], noise)), SAME)
    return Side(step, _start(work, ()), work.noise)


def own_gradients(compute: Any, noise: Any) -> Any:
    """Each device's own, inside of `jax.shard_map`."""
    return jax.tree.map(lambda w, x: x[0] + PULL * w, compute, noise)


def mean_gradients(compute: Any, noise: Any) -> Any:
    """Their mean, as a loss that is a mean over a sharded batch gives it.

    It is added up in the gradients' own dtype, as a product of matrices in this dtype would be.
    """
    return jax.tree.map(
        lambda w, x: jax.lax.reduce_sum((x + PULL * w) / x.shape[0], axes=(0,)), compute, noise
    )


def in_dtype(tree: Any, dtype: np.dtype) -> Any:
    """The weights as the forward pass takes them."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def cut(mesh: Mesh, tree: Any) -> Any:
    """Under jit: each leaf cut over the devices along its first axis that they divide."""

    def constrain(x: jax.Array) -> jax.Array:
        axes = [i for i, size in enumerate(x.shape) if size % mesh.size == 0]
        spec = PartitionSpec(*[None] * axes[0], "data") if axes else SAME
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(constrain, tree)


def gathered(mesh: Mesh, tree: Any) -> Any:
    """Under jit: every leaf whole on every device."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, SAME))


def _start(work: Work, state: Any) -> Any:
    compute = jax.tree.map(lambda x: jnp.array(x, work.dtype, copy=True), work.params)
    return state, compute


def _mapped(work: Work, local: Callable[..., Any], specs: Any) -> Callable[..., Any]:
    # What is gathered is the same on all devices, which JAX's checks would not see.
    return jax.shard_map(
        local,
        mesh=work.mesh,
        in_specs=((specs, SAME), EACH),
        out_specs=(specs, SAME),
        check_vma=False,
    )
