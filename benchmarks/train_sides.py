"""Whole train steps: optax on leaves, ours in arenas, and ours in optax's place."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from train_tasks import Batch, Task, cross_entropy

import jaxrenaissance as jr
from jaxrenaissance.bench.sides import Compiled, compile_step

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1


def our_adamw() -> jr.Optimizer:
    """AdamW that decays every leaf, as optax's does."""
    return jr.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY, mask=True)


def optax_adamw() -> optax.GradientTransformation:
    return optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)


class TrainSide:
    """A jitted, donated train step that carries its state from call to call.

    Args:
        jitted: (*arguments, batch) → (*arguments, loss), or where it is in place → loss.
        arguments: what it starts from.
        batches: that it sees in turn.
        in_place: whether it changes its arguments, as `flax.nnx` does.
    """

    def __init__(
        self,
        jitted: Any,
        arguments: tuple[Any, ...],
        batches: Sequence[Batch],
        *,
        in_place: bool = False,
    ) -> None:
        self.jitted, self.arguments, self.in_place = jitted, arguments, in_place
        self.batches = itertools.cycle(batches)
        self.first_batch = batches[0]

    def compile(self) -> Compiled:
        """Compiles the step, which later calls find done."""
        return compile_step(self.jitted, *self.arguments, self.first_batch)

    def __call__(self) -> jax.Array:
        """Starts a step and returns its loss."""
        result = self.jitted(*self.arguments, next(self.batches))
        if self.in_place:
            return result
        *arguments, loss = result
        self.arguments = tuple(arguments)
        return loss


def leaf_side(task: Task, optimizer: optax.GradientTransformation) -> TrainSide:
    """Parameters, moments and batch statistics as leaves, as optax is mostly used."""

    def step(params: Any, opt_state: Any, batch_stats: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            logits, new = task.apply({"params": params, "batch_stats": batch_stats}, batch[0])
            return cross_entropy(logits, batch[1]), new

        (loss, new_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, new_stats, loss

    # The step donates its arguments, and the task's variables are for all sides.
    variables = jax.tree.map(jnp.copy, task.variables)
    params, batch_stats = variables["params"], variables.get("batch_stats", {})
    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    return TrainSide(jitted, (params, optimizer.init(params), batch_stats), task.batches)


def arena_side(task: Task, optimizer: jr.Optimizer) -> TrainSide:
    """Everything in a few buffers."""

    def step(state: jr.TrainState, batch: Batch) -> Any:
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.extra.tree}
            logits, new = task.apply(variables, batch[0])
            return cross_entropy(logits, batch[1]), new

        (loss, new_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.compute_params)
        return state.apply_gradients(grads, extra=state.extra.replace(new_stats)), loss

    state = jr.TrainState.create(
        task.variables["params"],
        optimizer,
        compute_dtype=task.compute_dtype,
        extra=jr.Packed(task.variables.get("batch_stats", {})),
    )
    return TrainSide(jax.jit(step, donate_argnums=0), (state,), task.batches)


def linen_sides(task: Task) -> dict[str, Callable[[], TrainSide]]:
    """By name, what makes a side."""
    return {
        "ours": lambda: arena_side(task, our_adamw()),
        "drop-in": lambda: leaf_side(task, our_adamw()),
        "optax": lambda: leaf_side(task, optax_adamw()),
    }
