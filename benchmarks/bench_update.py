"""The optimizer step alone: our ops against optax and against the device's own copy.

    python benchmarks/bench_update.py [--models arena100m,gpt2,resnet50] [--json FILE]

Several steps run in one compiled program, and several calls are in flight, so that the times are
the device's wherever the host takes less for a call. The copy is measured in the same run. Bytes
are what the step must move, each read or written once: for AdamW 28 a parameter, and 4 more where
the gradients are looked at before the update.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrenaissance import ops, scalars
from jaxrenaissance.arena_layout import ArenaLayout
from jaxrenaissance.bench.data import random_tree
from jaxrenaissance.bench.report import check_writable, report, step_row
from jaxrenaissance.bench.sides import Side
from jaxrenaissance.bench.timing import copy_rate, device_times
from jaxrenaissance.models import named_shapes
from jaxrenaissance.plan import MemoryPlan

LEARNING_RATE, WEIGHT_DECAY, BYTES_UPDATE, BYTES_STATISTICS = 1e-3, 0.1, 28, 4
OPTAX_STEPS = 3  # in one program: XLA compiles each of them anew


def shapes_of(model: str) -> Any:
    """The leaves of a named model; "arena100m" is one leaf of 2²⁷ elements."""
    if model == "arena100m":
        return {"kernel": jax.ShapeDtypeStruct((128 * 1024, 1024), jnp.float32)}
    return named_shapes(model)


def initial_floats() -> np.ndarray:
    """The scalars of AdamW for both groups."""
    floats = scalars.initial_floats(2, np.dtype(np.float32))
    for group in range(2):
        floats[scalars.float_index(group, scalars.LEARNING_RATE)] = LEARNING_RATE
        floats[scalars.float_index(group, scalars.WEIGHT_DECAY)] = WEIGHT_DECAY * (group == 0)
        floats[scalars.float_index(group, scalars.ONE_MINUS_B1)] = 0.1
        floats[scalars.float_index(group, scalars.ONE_MINUS_B2)] = 0.001
        floats[scalars.float_index(group, scalars.EPS)] = 1e-8
    return floats


def arena_steps(layout: ArenaLayout, skip: bool, steps: int, state: Any, gradients: Any) -> Any:
    """``steps`` AdamW steps on arenas."""
    floats, ints, weights, moments = state
    for _ in range(steps):
        if skip:
            ints = ops.statistics(layout, ints, gradients, backend="auto")
        floats, ints = ops.prologue(floats, ints, backend="auto")
        weights, moments, _ = ops.update(
            "adam", layout, floats, weights, moments, gradients, backend="auto"
        )
    return floats, ints, weights, moments


def optax_steps(
    optimizer: optax.GradientTransformation, steps: int, state: Any, gradients: Any
) -> Any:
    """``steps`` steps of optax on leaves; a barrier keeps XLA from fusing all steps into one."""
    params, opt_state = state
    for _ in range(steps):
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        params, opt_state = jax.lax.optimization_barrier((params, opt_state))
    return params, opt_state


def bench(model: str, steps: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of one model."""
    shapes = shapes_of(model)
    plan = MemoryPlan.build(shapes)
    (layout,) = plan.arenas

    def in_arena_order(tree: Any) -> list[jax.Array]:
        flat = jax.tree.leaves(tree)
        return [flat[i] for i in layout.leaves]

    leaves = in_arena_order(random_tree(shapes, 0, 0.1))
    gradients: dict[str, Any] = {
        "leaves": in_arena_order(random_tree(shapes, 1, 0.01)),
        "bf16 leaves": in_arena_order(random_tree(shapes, 1, 0.01, jnp.bfloat16)),
    }
    gradients["arena"] = ops.pack(layout, gradients["leaves"], backend="auto")

    def state() -> Any:
        weights = ops.pack(layout, leaves, backend="auto")
        moments = (jnp.zeros_like(weights), jnp.zeros_like(weights))
        return jnp.asarray(initial_floats()), jnp.asarray(scalars.initial_ints()), weights, moments

    def ours(source: str, skip: bool) -> Side:
        return Side(functools.partial(arena_steps, layout, skip, steps), state(), gradients[source])

    sides: dict[str, Any] = {
        "ours, arena": ours("arena", False),
        "ours, leaves": ours("leaves", False),
        "ours, leaves, skip_nonfinite": ours("leaves", True),
        "ours, bf16 leaves": ours("bf16 leaves", False),
    }
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    params = jax.tree.map(jnp.copy, leaves)
    optax_in_one = min(steps, OPTAX_STEPS)
    sides["optax.adamw, leaves"] = Side(
        functools.partial(optax_steps, optimizer, optax_in_one),
        (params, optimizer.init(params)),
        gradients["leaves"],
    )
    seconds = device_times(sides, rounds=rounds)
    del sides
    rate = copy_rate(BYTES_UPDATE * plan.num_parameters)
    times = {}
    for name, time in seconds.items():
        in_one = optax_in_one if name.startswith("optax") else steps
        times[name] = time.over(in_one)
    rows = []
    for name, time in times.items():
        per_parameter = BYTES_UPDATE + BYTES_STATISTICS * ("skip" in name) - 2 * ("bf16" in name)
        rows.append(
            {
                "model": model,
                "parameters": plan.num_parameters,
                "leaves": len(leaves),
                "side": name,
                **step_row(
                    time, times["optax.adamw, leaves"], per_parameter, plan.num_parameters, rate
                ),
            }
        )
    return rows


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="arena100m,gpt2,resnet50")
    parser.add_argument("--steps", type=int, default=10, help="steps in one program")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    check_writable(args.json)
    rows = []
    for model in args.models.split(","):
        rows += bench(model, args.steps, args.rounds)
        print(f"{model} done", flush=True)
    report("AdamW step", rows, args.json)


if __name__ == "__main__":
    main()
