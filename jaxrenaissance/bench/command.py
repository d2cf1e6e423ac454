"""The optimizer step of this library beside optax's and torch's, on this machine."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..models import MODELS
from .columns import MEANING, bench_lines
from .data import SWEEPS, shapes_of
from .kinds import KINDS
from .libraries import OPTAX, OURS, RIVALS, TORCH, fits, why_not_torch
from .report import command, device_name, table, versions, write_json
from .run import FULL, PHASES, QUICK, bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--model",
        default="resnet50",
        help=f"of {', '.join(MODELS)}, or leaves and their size such as 100x1e5; several with "
        "commas (default: resnet50)",
    )
    what.add_argument(
        "--sweep",
        choices=SWEEPS,
        help="instead of models: sizes from 1e4 to 1e9, or 1e7 parameters in 1 to 5000 leaves",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        help=f"of {', '.join(KINDS)}; several with commas (default: adamw)",
    )
    parser.add_argument(
        "--against",
        help=f"of {', '.join(RIVALS)} (default: optax, and torch where it is installed and sees "
        "the device)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw them; needs matplotlib")


def run(options: argparse.Namespace) -> str:
    """Time, launches, memory and compilation of a step, ours and others', side by side."""
    models = SWEEPS[options.sweep] if options.sweep else options.model.split(",")
    shapes = {model: jax.tree.leaves(shapes_of(model)) for model in models}
    optimizers = _among("--optimizer", options.optimizer, KINDS)
    save_plot = _plotter(options.plot) if options.plot else None
    rivals = _rivals(options.against)
    effort = QUICK if options.quick else FULL

    cases = []
    for model, leaves in shapes.items():
        if not fits(sum(leaf.size for leaf in leaves), rivals):
            _note(f"{model} does not fit into memory: left out")
            continue
        if OPTAX in rivals and len(leaves) > effort.optax_leaves:
            _note(f"{model}: without optax, whose step takes XLA minutes to compile")
        cases += [(model, optimizer) for optimizer in optimizers]
    if not cases:
        raise ValueError("--model: nothing is left to measure")
    # A program that was found in a cache would seem to compile at once.
    jax.config.update("jax_enable_compilation_cache", False)

    rows = []
    with _Progress(PHASES * len(cases)) as progress:
        for model, optimizer in cases:
            rows += bench(
                model,
                optimizer,
                rivals,
                effort,
                lambda phase, case=f"{model}, {optimizer}": progress.step(f"{case}: {phase}"),
            )
    used = versions(*[TORCH] if TORCH in rivals else [])
    if options.json:
        origin = {"versions": used, "command": command()}
        write_json(options.json, [{**row, **origin} for row in rows])
    if save_plot is not None:
        save_plot(options.plot, rows, options.sweep)
    title = f"{device_name()}, " + ", ".join(f"{k} {v}" for k, v in used.items())
    return f"{table(title, bench_lines(rows))}\n\n{MEANING}"


def _plotter(path: str) -> Callable[..., None]:
    """What draws rows into a file; an error now if it could not."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'jaxrenaissance[plots]'")
    from . import plot

    plot.check_ending(path)
    return plot.save


def _among(option: str, given: str, known: Any) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: expected some of {', '.join(known)}; got {name!r}")
    return names


def _rivals(given: str | None) -> Sequence[str]:
    rivals = RIVALS if given is None else _among("--against", given, RIVALS)
    if TORCH not in rivals:
        return rivals
    # Two libraries share the machine, so neither may take all of the device's memory, and torch's
    # threads may not keep the cores busy after a step. Both are read when the libraries start,
    # which is below.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    reason = why_not_torch()
    if reason is None:
        return rivals
    if given is not None:
        raise ValueError(f"--against: {reason}; leave it out to compare {OURS} with optax alone")
    _note(f"{reason}: left out")
    return [name for name in rivals if name != TORCH]


def _note(text: str) -> None:
    print(text, file=sys.stderr)


class _Progress:
    """A bar where tqdm is installed and stderr is a terminal; else nothing."""

    def __init__(self, total: int) -> None:
        self.bar, self.begun = None, 0
        if importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self.bar = tqdm(total=total, disable=None, leave=False)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def step(self, text: str) -> None:
        """Says what is done next, and counts what was done before."""
        if self.bar is not None:
            self.bar.update(self.begun)
            self.bar.set_description(text)
            self.begun = 1
