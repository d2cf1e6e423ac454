"""What a jitted, donated train step costs the host, and many small states in one step.

    python benchmarks/bench_host.py [--json FILE]

The host time is that of the call alone, which follows one of the same step: that one has ended
when it starts, and its own end is not waited for. The floor is a jitted, donated function of as
many tiny buffers.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from bench_update import LEARNING_RATE, WEIGHT_DECAY

import jaxrenaissance as jr
from jaxrenaissance.bench.data import random_tree
from jaxrenaissance.bench.report import check_writable, report
from jaxrenaissance.bench.sides import Side, optax_step, our_step
from jaxrenaissance.bench.timing import alternate, call_times
from jaxrenaissance.models import named_shapes


def arena_step(state: jr.TrainState, x: jax.Array) -> jr.TrainState:
    """A step in arenas whose gradients, 0.01 w + x, are made by two launches for any model.

    So what is timed grows with the number of leaves only if the step itself does.
    """
    gradients = tuple(0.01 * w + x.astype(w.dtype) for w in state.weights)
    return state.apply_gradients(dataclasses.replace(state, weights=gradients).params)


def optax_host_step(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """A step of optax on leaves, with the same gradients."""
    step = optax_step(optimizer)

    def with_made_gradients(state: Any, x: jax.Array) -> Any:
        params, _ = state
        return step(state, jax.tree.map(lambda p: 0.01 * p + x.astype(p.dtype), params))

    return with_made_gradients


def bench_calls(model: str, rounds: int) -> list[dict[str, Any]]:
    """Host time of a step of one model, and of optax where that compiles in reasonable time."""
    params = random_tree(named_shapes(model), 0, 0.1)
    state = jr.TrainState.create(params, jr.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY))
    buffers = len(jax.tree.leaves(state))
    x = jnp.float32(1e-3)
    floor = [jnp.zeros(8) + i for i in range(buffers)]
    sides = {
        "ours": Side(arena_step, state, x),
        "identity": Side(lambda buffers, x: [b + x for b in buffers], floor, x),
    }
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    leaves = len(jax.tree.leaves(params))
    if leaves < 1000:
        sides["optax"] = Side(optax_host_step(optimizer), (params, optimizer.init(params)), x)
    seconds = call_times(sides, rounds)
    return [
        {
            "model": model,
            "leaves": leaves,
            "side": name,
            "buffers": len(jax.tree.leaves(sides[name].state)),
            "host_us": time.median * 1e6,
            "spread_us": time.spread * 1e6,
            "ratio_to_identity": time.median / seconds["identity"].median,
        }
        for name, time in seconds.items()
    ]


def bench_seeds(seeds: int, rounds: int) -> list[dict[str, Any]]:
    """A step of many small states at once, vmap over seeds: call and device together.

    Gradients are arguments: both sides read them from leaves, as after a backward pass.
    """
    shapes = {
        f"Dense_{i}": {
            "kernel": jax.ShapeDtypeStruct((seeds, *shape), jnp.float32),
            "bias": jax.ShapeDtypeStruct((seeds, shape[1]), jnp.float32),
        }
        for i, shape in enumerate([(8, 64), (64, 64), (64, 4)])
    }
    params, gradients = random_tree(shapes, 0, 0.1), random_tree(shapes, 1, 0.01)

    def ours(skip_nonfinite: bool) -> Side:
        optimizer = jr.adamw(
            LEARNING_RATE, weight_decay=WEIGHT_DECAY, skip_nonfinite=skip_nonfinite
        )
        state = jax.vmap(lambda p: jr.TrainState.create(p, optimizer))(params)
        return Side(jax.vmap(our_step), state, gradients)

    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    sides = {
        "ours": ours(True),
        "ours, skip_nonfinite=False": ours(False),
        "optax": Side(
            jax.vmap(optax_step(optimizer)), (params, jax.vmap(optimizer.init)(params)), gradients
        ),
    }
    seconds = alternate(sides, rounds=rounds)
    return [
        {
            "model": f"mlp of {seeds} seeds",
            "side": name,
            "step_us": time.median * 1e6,
            "spread_us": time.spread * 1e6,
            "ratio_to_optax": seconds["optax"].median / time.median,
        }
        for name, time in seconds.items()
    ]


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="mlp,resnet50,many2000")
    parser.add_argument("--seeds", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    check_writable(args.json)
    rows = []
    for model in args.models.split(","):
        rows += bench_calls(model, args.rounds)
    rows += bench_seeds(args.seeds, max(args.rounds // 10, 3))
    report("Host time of a call, and vmap over seeds", rows, args.json)


if __name__ == "__main__":
    main()
