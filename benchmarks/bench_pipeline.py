"""All that lies between the backward pass and the new weights, against optax and a plain copy.

    python benchmarks/bench_pipeline.py [--models gpt2,resnet50] [--json FILE]
    python benchmarks/bench_pipeline.py --quick

Unscaling, the look for non-finite values, clipping by the global norm, AdamW and an average of the
weights. Steps follow each other in one loop on the device, so that the times are the device's; the
copy is measured in the same run. Bytes are what a step must move, each read or written once: for
AdamW 28 a parameter, 4 more where the gradients are looked at before the update, 8 more for the
average, and 2 less for each reading of bfloat16 gradients. Launches are those of our kernels in one
step of the compiled program.
"""

import argparse
from typing import Any, NamedTuple

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

LOSS_SCALE, MAX_NORM, EMA_DECAY = 1024.0, 1.0, 0.999
OPTAX = "optax: apply_if_finite, clip, adamw"
BYTES_UPDATE, BYTES_OPTAX = 28, 32


class Variant(NamedTuple):
    """A step of ours: options of `jr.adamw`, the gradients' dtype, and what it must move."""

    options: dict[str, Any]
    dtype: Any
    bytes_per_parameter: int


CLIP = {"loss_scale": jr.DynamicLossScale(LOSS_SCALE), "max_norm": MAX_NORM}
EMA = {**CLIP, "ema_decay": EMA_DECAY}
VARIANTS = {
    "ours: adamw": Variant({"skip_nonfinite": False}, jnp.float32, BYTES_UPDATE),
    "ours: skip, adamw": Variant({}, jnp.float32, BYTES_UPDATE + 4),
    "ours: unscale, skip, clip, adamw": Variant(CLIP, jnp.float32, BYTES_UPDATE + 4),
    "ours: the same and ema": Variant(EMA, jnp.float32, BYTES_UPDATE + 4 + 8),
    "ours: the same, bf16 gradients": Variant(EMA, jnp.bfloat16, BYTES_UPDATE + 4 + 8 - 4),
}


def bench(model: str, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """The rows of one model."""
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(named_shapes(model)))
    rate = copy_rate(BYTES_UPDATE * num_parameters)  # before the sides take their memory
    params = random_tree(named_shapes(model), 0, 0.1)
    gradients = {
        dtype: random_tree(named_shapes(model), 1, 0.01 * LOSS_SCALE, dtype)
        for dtype in (jnp.float32, jnp.bfloat16)
    }
    sides: dict[str, Side] = {}
    for name, variant in VARIANTS.items():
        optimizer = jr.adamw(
            LEARNING_RATE, weight_decay=WEIGHT_DECAY, mask="weights", **variant.options
        )
        state = jr.TrainState.create(params, optimizer)
        sides[name] = Side(our_step, state, gradients[variant.dtype])
    counts = {name: side.compile().launches for name, side in sides.items()}
    optimizer = optax.apply_if_finite(
        optax.chain(
            optax.clip_by_global_norm(MAX_NORM),
            optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        ),
        max_consecutive_errors=20,
    )
    sides[OPTAX] = Side(
        optax_step(optimizer), (params, optimizer.init(params)), gradients[jnp.float32]
    )
    moved = {name: variant.bytes_per_parameter for name, variant in VARIANTS.items()}
    moved[OPTAX] = BYTES_OPTAX
    least = {name: nbytes * num_parameters / rate for name, nbytes in moved.items()}
    times = loop_times(sides, counts, least, seconds, rounds)
    return [
        {
            "model": model,
            "parameters": num_parameters,
            "leaves": len(jax.tree.leaves(params)),
            "side": name,
            **step_row(time, times[OPTAX], moved[name], num_parameters, rate),
            "launches": counts.get(name),
        }
        for name, time in times.items()
    ]


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="gpt2,resnet50")
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
        rows += bench(model, args.seconds, args.rounds)
        print(f"{model} done", flush=True)
    report("From gradients to new weights", rows, args.json)


if __name__ == "__main__":
    main()
