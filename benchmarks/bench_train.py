"""Whole train steps: optax on leaves against the same in arenas.

    python benchmarks/bench_train.py [--models mlp,resnet50_32,gpt2] [--json FILE]
    python benchmarks/bench_train.py --models resnet50_32 --sides ours
    python benchmarks/bench_train.py --quick

Forward pass, backward pass and AdamW, jitted and donated, from the same weights and on the same
random batches; kernels in bfloat16 on every side but for the MLP. "ours" is `TrainState` (of NNX
`NNXState`); "drop-in" is `jr.adamw` in optax's place, with everything left in leaves. Both look for
non-finite gradients, which optax does not. "optax split" is what Flax advises where `nnx.jit` costs
too much.

`step_us` is of calls that follow each other, `host_us` of a call alone while the device is idle.
`compile_s` is of tracing and compiling. Every side compiles once before, since on a GPU that tunes
matrix products and convolutions, for all sides alike and for the rest of the process. `peak_mib` is
what XLA says that a step needs at once, the batch and the state included.
`loss_difference` is the largest relative one to optax's over the first steps, whose losses are
written with the rows.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from train_nnx import nnx_sides
from train_sides import TrainSide, linen_sides
from train_tasks import gpt2, mlp, resnet

from jaxrenaissance.bench.report import check_writable, report
from jaxrenaissance.bench.timing import alternate, call_times

Sides = dict[str, Callable[[], TrainSide]]

MODELS: dict[str, Callable[[bool], Sides]] = {
    "mlp": lambda quick: linen_sides(mlp(quick)),
    "resnet50_32": lambda quick: linen_sides(resnet(32, quick)),
    "resnet50_224": lambda quick: linen_sides(resnet(224, quick)),
    "gpt2": lambda quick: linen_sides(gpt2(quick)),
    "nnx_resnet50_32": lambda quick: nnx_sides(32, quick),
}


def bench(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model."""
    wanted = args.sides and args.sides.split(",")
    makers = MODELS[model](args.quick)
    sides = {name: make() for name, make in makers.items() if not wanted or name in wanted}
    for side in sides.values():
        side.compile()
    jax.clear_caches()
    compiled = {name: side.compile() for name, side in sides.items()}
    losses = {name: loss_curve(side, args.losses) for name, side in sides.items()}
    times = alternate(sides, rounds=args.rounds, seconds=args.seconds)
    host_times = call_times(sides, args.rounds)
    for name, side in sides.items():
        if not np.isfinite(side()):
            raise FloatingPointError(f"{model}, {name}: the loss is not finite after timing")
    reference = times.get("optax")
    return [
        {
            "model": f"{model}, small" if args.quick else model,
            "side": name,
            "buffers": compiled[name].buffers,
            "step_us": times[name].median * 1e6,
            "spread_us": times[name].spread * 1e6,
            "ratio_to_optax": reference and reference.median / times[name].median,
            "host_us": host_times[name].median * 1e6,
            "host_spread_us": host_times[name].spread * 1e6,
            "compile_s": compiled[name].seconds,
            "peak_mib": compiled[name].peak_bytes / 2**20,
            "first_loss": losses[name][0],
            "last_loss": losses[name][-1],
            "loss_difference": reference and difference(losses[name], losses["optax"]),
            "losses": losses[name],
        }
        for name in sides
    ]


def loss_curve(side: TrainSide, steps: int) -> list[float]:
    """The losses of the first steps."""
    return [float(loss) for loss in jax.device_get([side() for _ in range(steps)])]


def difference(losses: list[float], reference: list[float]) -> float:
    """The largest relative one."""
    return float(np.max(np.abs(np.divide(losses, reference) - 1)))


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sides", help="only these, such as ours,optax (default: all)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.1, help="that a round lasts at least")
    parser.add_argument("--losses", type=int, default=40, help="steps whose losses are compared")
    parser.add_argument("--quick", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    check_writable(args.json)
    if args.quick:
        args.rounds, args.seconds, args.losses = 2, 0.0, 8
    rows = []
    for model in args.models.split(","):
        rows += bench(model, args)
        report("Train steps", rows, args.json)  # at once, for a run that is cut off later


if __name__ == "__main__":
    main()
