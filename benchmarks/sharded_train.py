"""Whole data-parallel train steps: optax on leaves, and ours in arenas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from sharded_sides import EACH, SAME, cut, gathered, our_name
from train_sides import TrainSide, optax_adamw, our_adamw
from train_tasks import Batch, Task, cross_entropy

import jaxrenaissance as jr


def train_sides(task: Task, mesh: Mesh) -> dict[str, Callable[[], TrainSide]]:
    """By name, what makes a side. A batch is the same for any number of devices."""
    shard = NamedSharding(mesh, EACH)
    task = task._replace(batches=jax.device_put(task.batches, shard))
    sides: dict[str, Callable[[], TrainSide]] = {
        "optax replicated, jit": lambda: optax_side(task, mesh, moments=gathered),
        "optax sharded moments, jit": lambda: optax_side(task, mesh, moments=cut),
        "optax replicated": lambda: optax_in_shard_map(task, mesh),
    }
    for form in ("replicated", "zero1"):
        sides[f"ours {form}, jit"] = lambda form=form: our_side(task, mesh, form)
        for sums in ("float32", "bfloat16") if form == "zero1" else ("float32",):
            name = our_name(form, np.dtype(sums))
            sides[name] = lambda form=form, sums=sums: our_side(task, mesh, form, sums)
    return sides


def optax_side(task: Task, mesh: Mesh, moments: Callable[[Mesh, Any], Any]) -> TrainSide:
    """Plain jit: XLA adds up the gradients, and moves what does not lie where it is needed."""
    optimizer = optax_adamw()

    def step(params: Any, opt_state: Any, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(_loss(task, batch))(params)
        updates, opt_state = optimizer.update(moments(mesh, grads), opt_state, params)
        params = gathered(mesh, optax.apply_updates(params, updates))
        return params, moments(mesh, opt_state), loss

    params = _params(task, mesh)
    opt_state = jax.jit(lambda params: moments(mesh, optimizer.init(params)))(params)
    return TrainSide(jax.jit(step, donate_argnums=(0, 1)), (params, opt_state), task.batches)


def optax_in_shard_map(task: Task, mesh: Mesh) -> TrainSide:
    """Every device has all weights and moments; gradients are averaged leaf by leaf."""
    optimizer = optax_adamw()

    def local(params: Any, opt_state: Any, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(_loss(task, batch))(params)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = _params(task, mesh)
    opt_state = jax.device_put(optimizer.init(params), NamedSharding(mesh, SAME))
    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(SAME, SAME, EACH),
        out_specs=SAME,
        check_vma=False,  # or JAX would add up the gradients by itself
    )
    return TrainSide(jax.jit(step, donate_argnums=(0, 1)), (params, opt_state), task.batches)


def our_side(task: Task, mesh: Mesh, form: str, sums: str | None = None) -> TrainSide:
    """In arenas; in plain jit, or with `sums` in `jax.shard_map`."""

    def step(state: jr.TrainState, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(_loss(task, batch))(state.compute_params)
        if sums is not None:
            loss = jax.lax.pmean(loss, "data")
        return state.apply_gradients(grads), loss

    state = jr.TrainState.create(
        task.variables["params"],
        our_adamw(),
        compute_dtype=task.compute_dtype,
        mesh=mesh,
        sharding=form,
        reduce_dtype=sums,
    )
    if sums is not None:
        specs = state.partition_specs
        step = jax.shard_map(step, mesh=mesh, in_specs=(specs, EACH), out_specs=(specs, SAME))
    return TrainSide(jax.jit(step, donate_argnums=0), (state,), task.batches)


def _loss(task: Task, batch: Batch) -> Callable[[Any], jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        logits, _ = task.apply({"params": params}, batch[0])
        return cross_entropy(logits, batch[1])

    return loss_fn


def _params(task: Task, mesh: Mesh) -> Any:
    # The step donates its arguments, and the task's variables are for all sides.
    params = jax.tree.map(jnp.copy, task.variables["params"])
    return jax.device_put(params, NamedSharding(mesh, SAME))
