"""LARS, LAMB and Lion against optax's, and against a plain copy.

    python benchmarks/bench_trust.py [--models resnet50,many2000] [--json FILE]
    python benchmarks/bench_trust.py --quick

Steps follow each other in one loop on the device, see bench_pipeline.py. Bytes are what a step must
move: for LARS 28 a parameter (weights and gradients for the norms, then weights, momentum and
gradients), 48 for LAMB (a look at the gradients, the norms of the update, the update), 24 for Lion
after its look at the gradients. optax's LAMB, which keeps its update, moves 40 at least.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from bench_update import LEARNING_RATE, WEIGHT_DECAY

import jaxrenaissance as jr
from jaxrenaissance.bench.data import random_tree
from jaxrenaissance.bench.loops import loop_times
from jaxrenaissance.bench.report import check_writable, report, step_row
from jaxrenaissance.bench.sides import Side, optax_step, our_step
from jaxrenaissance.bench.timing import copy_rate
from jaxrenaissance.models import named_shapes

FACTORIES = {
    "lars": (jr.lars, optax.lars),
    "lamb": (jr.lamb, optax.lamb),
    "lion": (jr.lion, optax.lion),
}
MOST_LEAVES = 1000  # of optax's side: more take it minutes to compile
BYTES = {"lars": 28, "lamb": 48, "lion": 24}
BYTES_OPTAX = {"lars": 28, "lamb": 40, "lion": 20}


def bench(model: str, kind: str, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """The rows of one model and optimizer."""
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(named_shapes(model)))
    rate = copy_rate(BYTES[kind] * num_parameters)  # before the sides take their memory
    params = random_tree(named_shapes(model), 0, 0.1)
    gradients = random_tree(named_shapes(model), 1, 0.01, jnp.float32)
    ours, theirs = FACTORIES[kind]
    state = jr.TrainState.create(params, ours(LEARNING_RATE, weight_decay=WEIGHT_DECAY))
    optimizer = theirs(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    names = f"ours: {kind}", f"optax: {kind}"
    sides = {names[0]: Side(our_step, state, gradients)}
    if len(jax.tree.leaves(params)) <= MOST_LEAVES:
        sides[names[1]] = Side(optax_step(optimizer), (params, optimizer.init(params)), gradients)
    counts = {names[0]: sides[names[0]].compile().launches}
    moved = dict(zip(names, (BYTES[kind], BYTES_OPTAX[kind]), strict=True))
    least = {name: nbytes * num_parameters / rate for name, nbytes in moved.items()}
    times = loop_times(sides, counts, least, seconds, rounds)
    return [
        {
            "model": model,
            "parameters": num_parameters,
            "leaves": len(jax.tree.leaves(gradients)),
            "side": name,
            **step_row(time, times.get(names[1]), moved[name], num_parameters, rate),
            "launches": counts.get(name),
        }
        for name, time in times.items()
    ]


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="resnet50,many2000")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a loop, at the copy's rate")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    check_writable(args.json)
    if args.quick:
        args.models, args.seconds, args.rounds = "mlp", 0.0, 2
    rows = []
    for model in args.models.split(","):
        for kind in FACTORIES:
            rows += bench(model, kind, args.seconds, args.rounds)
            print(f"{model}, {kind} done", flush=True)
    report("Trust ratios and signs", rows, args.json)


if __name__ == "__main__":
    main()
