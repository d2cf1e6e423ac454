"""Data-parallel steps over several devices: optax on leaves against ours in arenas.

    NCCL_NVLS_ENABLE=0 python benchmarks/bench_sharded.py [--devices 2] [--json FILE]
    python benchmarks/bench_sharded.py --quick

The optimizer part is AdamW from each device's own gradients to weights in the compute dtype on
every device: gradients are reduced, weights and moments updated, and what the devices need of them
gathered. Gradients and compute params have one dtype. A pass over these makes the gradients of the
next step: `step_us` is with it, of several steps in one loop on the devices; `optimizer_us` is less
that pass alone, and `ratio_to_best_optax` is of that. Sides with `jit` in their name are plain
jitted ones, in which XLA reduces the gradients; the others run in a `jax.shard_map`. `sums` are
what ours adds gradients up in.

`collectives_us` is by how much a step of ours with zero1 takes longer than the same local work
without collectives, and `of_bare_rate` which part of that one reduce-scatter and one all-gather of
the same bytes take alone, all in one run. `copy_fraction` is of the update of a device's piece
alone, against a copy on one device.

`state_mib` is what a device holds of weights, moments and scalars; `state_share` is that times the
devices, over what one device alone would hold: 1 is a perfect cut. `peak_mib` is what XLA says that
a device needs at once. `collectives` are those of the compiled step, and `collective_mib` the whole
arrays that they reduce or gather. On a CPU the devices are threads of one processor, and times mean
nothing.
"""

import argparse
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from bench_train import difference, loss_curve
from jax.sharding import AxisType, Mesh
from sharded_parts import bare_collectives, crossing, local_work, update_alone
from sharded_sides import gradients_alone, make_work, our_name, our_state, sides_of
from sharded_train import train_sides
from train_tasks import gpt2

from jaxrenaissance.bench.data import shapes_of
from jaxrenaissance.bench.launches import count_launches
from jaxrenaissance.bench.loops import loop_times
from jaxrenaissance.bench.report import check_writable, report
from jaxrenaissance.bench.timing import Seconds, alternate, copy_rate

BYTES_UPDATE, HOST_DEVICES = 28, 8
GRADIENTS, UPDATE = "gradients alone", "update of a piece alone"
Row = dict[str, Any]
T = TypeVar("T")


def bench_optimizer(mesh: Mesh, dtype: str, args: argparse.Namespace) -> list[Row]:
    """The rows of the optimizer part, and of what it is made of."""
    work = make_work(shapes_of(args.model), mesh, dtype)
    sides: dict[str, Any] = chosen(sides_of(work), args.sides)
    programs = {
        name: describe(side.jitted, (side.state, side.gradients), side.state[0], mesh)
        for name, side in sides.items()
    }
    (layout,) = our_state(work, "zero1", None).plan.arenas
    sums = dict.fromkeys([np.dtype(np.float32), work.dtype])
    for each in sums:
        sides[f"bare collectives, {each} sums"] = bare_collectives(work, layout.size, each)
        sides[f"local work, {each} sums"] = local_work(work, each)
    sides |= {GRADIENTS: gradients_alone(work), UPDATE: update_alone(work, layout)}
    rate = copy_rate(BYTES_UPDATE * layout.size)
    parameters = sum(x.size for x in jax.tree.leaves(work.params))
    least = dict.fromkeys(sides, BYTES_UPDATE * parameters / rate)
    launches = {name: program["launches"] for name, program in programs.items()}
    times = loop_times(sides, launches, least, args.seconds, args.rounds)
    for name in programs:
        check_finite(name, sides[name].state[1])

    def row(name: str) -> Row:
        where = {"model": args.model, "dtype": dtype, "devices": mesh.size, "side": name}
        return where | step_columns(times[name])

    optimizer = {name: times[name].median - times[GRADIENTS].median for name in programs}
    best = best_optax(optimizer)
    rows = []
    for name, program in programs.items():
        columns = {
            "optimizer_us": optimizer[name] * 1e6,
            "ratio_to_best_optax": best and best / optimizer[name],
            "collectives_us": None,
            "of_bare_rate": None,
        }
        for each in sums:
            if name == our_name("zero1", each):
                bare = times[f"bare collectives, {each} sums"].median
                rest = times[name].median - times[f"local work, {each} sums"].median
                columns |= {"collectives_us": rest * 1e6, "of_bare_rate": bare / rest}
        rows.append(row(name) | columns | program | state_share(programs, name, mesh.size))
    for name in [*sides][len(programs) : -1]:
        rows.append(row(name))
    moved = BYTES_UPDATE * layout.size
    copied = {"copy_fraction": moved / times[UPDATE].median / rate, "copy_gb_per_s": rate / 1e9}
    return [*rows, row(UPDATE) | {"bytes_per_parameter": BYTES_UPDATE} | copied]


def bench_train(mesh: Mesh, args: argparse.Namespace) -> list[Row]:
    """The rows of whole train steps."""
    sides = chosen(train_sides(gpt2(args.quick), mesh), args.sides)
    programs = {
        name: describe(side.jitted, (*side.arguments, side.first_batch), side.arguments, mesh)
        for name, side in sides.items()
    }
    losses = {name: loss_curve(side, args.losses) for name, side in sides.items()}
    times = alternate(sides, rounds=args.rounds, seconds=args.seconds)
    for name, side in sides.items():
        check_finite(name, side())
    best = best_optax({name: time.median for name, time in times.items()})
    reference = losses.get("optax replicated")
    return [
        {
            "model": "gpt2, small" if args.quick else "gpt2",
            "devices": mesh.size,
            "side": name,
            **step_columns(times[name]),
            "ratio_to_best_optax": best and best / times[name].median,
            **programs[name],
            **state_share(programs, name, mesh.size),
            "loss_difference": reference and difference(losses[name], reference),
            "losses": losses[name],
        }
        for name in sides
    ]


def chosen(makers: Mapping[str, Callable[[], T]], pattern: str) -> dict[str, T]:
    """The sides whose names have the pattern."""
    return {name: make() for name, make in makers.items() if re.search(pattern, name)}


def best_optax(seconds: Mapping[str, float]) -> float | None:
    """The shortest time of optax."""
    return min((s for name, s in seconds.items() if name.startswith("optax")), default=None)


def describe(jitted: Any, arguments: tuple[Any, ...], state: Any, mesh: Mesh) -> Row:
    """What a device holds of a state, and what the compiled step does."""
    compiled = jitted.lower(*arguments).compile()
    memory, program = compiled.memory_analysis(), compiled.as_text()
    links = crossing(program, mesh.size)
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return {
        "state_mib": max(held_bytes(state, device) for device in mesh.devices.flat) / 2**20,
        "peak_mib": peak / 2**20,
        "collectives": links.kinds,
        "collective_mib": links.nbytes / 2**20,
        "launches": count_launches(program, on_gpu=jax.default_backend() == "gpu") or None,
    }


def held_bytes(state: Any, device: Any) -> int:
    """What a device holds of a state."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


def state_share(programs: dict[str, Row], name: str, devices: int) -> Row:
    """What the devices hold together, over what one alone would: a replicated state of the kind."""
    kind = name.split()[0]
    own = programs[name]["state_mib"]
    alone = [p["state_mib"] for other, p in programs.items() if f"{kind} replicated" in other]
    return {"state_share": own * devices / alone[0] if alone else None}


def step_columns(time: Seconds) -> Row:
    return {"step_us": time.median * 1e6, "spread_us": time.spread * 1e6}


def check_finite(name: str, tree: Any) -> None:
    """Raises where a number is not finite: times would flatter."""
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jnp.floating) and not jnp.isfinite(x).all():
            raise FloatingPointError(f"{name}: not finite after timing")


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2", help="of the optimizer part, such as 100x1e5")
    parser.add_argument("--parts", default="optimizer,train")
    parser.add_argument("--sides", default="", help="a regular expression of their names")
    parser.add_argument("--dtypes", help="of gradients (default: bfloat16,float32)")
    parser.add_argument("--devices", type=int, help="how many (default: all)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.03, help="that a round lasts about")
    parser.add_argument("--losses", type=int, default=20, help="steps whose losses are compared")
    parser.add_argument("--quick", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    check_writable(args.json)
    args.dtypes = args.dtypes or ("bfloat16" if args.quick else "bfloat16,float32")
    if args.quick:
        args.model, args.rounds, args.seconds, args.losses = "3x30000", 2, 0.0, 4
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", args.devices or HOST_DEVICES)
    devices = jax.devices()[: args.devices]
    if len(devices) < (args.devices or 1):
        parser.error(f"--devices: there are {len(devices)}, got {args.devices}")
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    rows = []
    for part in args.parts.split(","):
        for dtype in args.dtypes.split(",") if part == "optimizer" else [None]:
            rows += bench_train(mesh, args) if dtype is None else bench_optimizer(mesh, dtype, args)
            report(f"{mesh.size} devices", rows, args.json)  # for a run that is cut off later


if __name__ == "__main__":
    main()
