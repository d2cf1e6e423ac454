"""The command line: `python -m jaxrenaissance info | plan | bench`."""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from . import native
from .bench import command as bench_command
from .models import MODELS, named_shapes
from .plan import MemoryPlan, PlanConfig
from .planning import NO_TRUST
from .shapes import checkpoint_shapes

OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "lars", "lamb", "lion")
_WITH_TRUST_RATIOS = ("lars", "lamb")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        print(options.run(options))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def info(options: argparse.Namespace) -> str:
    """Which backends work here and, for each that does not, why and what mends it."""
    versions = ", ".join(f"{name} {_version(name)}" for name in ("jax", "jaxlib", "optax", "numpy"))
    lines = [
        f"jaxrenaissance {_version('jaxrenaissance')}, Python {platform.python_version()} on "
        f"{platform.system()} {platform.machine()}",
        versions,
        _platform(),
    ]
    for diagnosis in native.diagnose():
        state = "works" if diagnosis.works else f"does not work: {diagnosis.reason}"
        lines += ["", f"{diagnosis.backend:<6}{state}"]
        lines += [f"      {fact}" for fact in diagnosis.facts]
        if diagnosis.remedy is not None:
            lines.append(f"      to mend it: {diagnosis.remedy}")
    return "\n".join(lines)


def _platform() -> str:
    try:
        return f"JAX's default platform: {jax.default_backend()}, {jax.device_count()} device(s)"
    except Exception as error:  # JAX raises errors of several kinds here, assertions among them
        chosen = os.environ.get("JAX_PLATFORMS", "not set")
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"JAX's platforms do not start: {reason} (JAX_PLATFORMS is {chosen})"


def plan(options: argparse.Namespace) -> str:
    """The memory plan of a model or of a checkpoint."""
    if options.model in MODELS:
        shapes = named_shapes(options.model)
    elif Path(options.model).exists():
        shapes = checkpoint_shapes(Path(options.model))
    else:
        raise ValueError(
            f"expected a model ({', '.join(MODELS)}) or a checkpoint that exists; got "
            f"{options.model!r}"
        )
    memory = MemoryPlan.build(
        shapes,
        trainable=options.trainable,
        stacked=_stacked(options.stacked),
        trust_ratio_mask=None if options.optimizer in _WITH_TRUST_RATIOS else NO_TRUST,
        shards=options.shards,
    )
    config = PlanConfig.for_kind(options.optimizer, ema=options.ema, accumulator=options.accumulate)
    total = memory.total_bytes(config)
    more = ", EMA" * config.ema + ", sum of gradients" * config.accumulator
    return (
        f"{memory.table(all=options.all)}\n{total:,} bytes ({total / 2**20:,.1f} MiB) for "
        f"{options.optimizer}: weights, {config.moments} moment(s){more}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxrenaissance", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("info", help=info.__doc__, description=info.__doc__)
    command.set_defaults(run=info)

    command = commands.add_parser("plan", help=plan.__doc__, description=plan.__doc__)
    command.set_defaults(run=plan)
    command.add_argument(
        "model",
        help=f"{', '.join(MODELS)}, or a checkpoint: .safetensors, .npz, a folder of Orbax",
    )
    command.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="whose memory to add up, and whose groups to show",
    )
    command.add_argument("--ema", action="store_true", help="with an average of the weights")
    command.add_argument(
        "--accumulate", action="store_true", help="with a sum of gradients over several calls"
    )
    command.add_argument(
        "--shards", type=int, default=1, help="devices that share each leaf (zero1)"
    )
    command.add_argument(
        "--trainable", action="append", metavar="PATTERN", help='leaves to train, such as "*lora*"'
    )
    command.add_argument(
        "--stacked",
        action="append",
        metavar="PATTERN=AXES",
        help='leaves stacked by a scan or vmap over layers, such as "layers/*=1"',
    )
    command.add_argument("--all", action="store_true", help="every leaf, however many")

    bench = bench_command.run
    command = commands.add_parser("bench", help=bench.__doc__, description=bench_command.__doc__)
    command.set_defaults(run=bench)
    bench_command.add_arguments(command)
    return parser


def _stacked(options: Sequence[str] | None) -> dict[str, int] | None:
    if options is None:
        return None
    stacked = {}
    for option in options:
        pattern, _, axes = option.rpartition("=")
        if not pattern or not axes.isdecimal():
            raise ValueError(f'--stacked: expected "PATTERN=AXES", got {option!r}')
        stacked[pattern] = int(axes)
    return stacked


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
