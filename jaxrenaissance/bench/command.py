"""The optimizer step of this library beside optax's and torch's, on this machine."""

import argparse
import contextlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from ..models import MODELS
from .columns import MEANING, bench_lines
from .data import SWEEPS, shapes_of
from .kinds import KINDS
from .libraries import OPTAX, OURS, RIVALS, TORCH, contestants, fits, free_memory, why_not_torch
from .report import check_writable, command, cores, device_name, table, versions, write_json
from .run import FULL, PHASES, QUICK, bench, rivals_of


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
    models = SWEEPS[options.sweep] if options.sweep else _once(options.model)
    sizes = {model: [leaf.size for leaf in jax.tree.leaves(shapes_of(model))] for model in models}
    optimizers = _among("--optimizer", options.optimizer, KINDS)
    save_plot = _plotter(options.plot) if options.plot else None
    for path in (options.json, options.plot):
        check_writable(path)
    rivals = _rivals(options.against)
    effort = QUICK if options.quick else FULL

    cases = []
    for model, optimizer in itertools.product(models, optimizers):
        running = rivals_of(len(sizes[model]), optimizer, rivals, effort)
        if not fits(sum(sizes[model]), running):
            _note(f"{model}, {optimizer} does not fit into memory: left out")
            continue
        if OPTAX in rivals and OPTAX not in running:
            _note(f"{model}, {optimizer}: without optax, whose step takes XLA minutes to compile")
        cases.append((model, optimizer, running))
    if not cases:
        raise ValueError("--model: nothing is left to measure")

    rows, origin = [], _origin(rivals)
    with _programs_compiled_anew(), _Progress(PHASES * len(cases)) as progress:
        # What JAX does for its first program is no part of the first side's compilation.
        contestants(shapes_of("1x8"), KINDS[optimizers[0]], [], _note_failed)
        for model, optimizer, running in cases:
            case = f"{model}, {optimizer}"
            try:
                rows += bench(
                    model,
                    optimizer,
                    running,
                    effort,
                    lambda phase, case=case: progress.step(f"{case}: {phase}"),
                    lambda name, error, case=case: _note_failed(f"{case}, {name}", error),
                )
            except Exception as error:  # such as no memory; the other cases go on
                _note_failed(case, error)
            free_memory(rivals)
            if options.json:
                with contextlib.suppress(OSError):  # which is raised below, after the table
                    write_json(options.json, [{**row, **origin} for row in rows])
    if not rows:
        raise ValueError("nothing could be measured")
    title = ", ".join([device_name(), *(f"{k} {v}" for k, v in origin["versions"].items())])
    print(table(title, bench_lines(rows)), flush=True)
    if options.json:
        write_json(options.json, [{**row, **origin} for row in rows])
    if save_plot is not None:
        save_plot(options.plot, rows, options.sweep)
    return f"\n{MEANING}"


def _origin(rivals: Sequence[str]) -> dict[str, Any]:
    """What all rows say of this run."""
    origin = {"versions": versions(*[TORCH] if TORCH in rivals else []), "command": command()}
    if TORCH in rivals and jax.default_backend() == "cpu":
        from .torch_sides import use_all_cores

        origin["torch_threads"] = use_all_cores()
    return {**origin, **cores()}


@contextlib.contextmanager
def _programs_compiled_anew() -> Iterator[None]:
    """Without JAX's cache on disk: a program found there would seem to compile at once."""
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    compilation_cache.reset_cache()  # JAX looks at the setting once
    try:
        yield
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()


def _plotter(path: str) -> Callable[..., None]:
    """What draws rows into a file; an error now if it could not."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'jaxrenaissance[plots]'")
    from . import plot

    plot.check_ending(path)
    return plot.save


def _among(option: str, given: str, known: Any) -> list[str]:
    names = _once(given)
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: expected some of {', '.join(known)}; got {name!r}")
    return names


def _once(given: str) -> list[str]:
    return list(dict.fromkeys(given.split(",")))


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


def _note_failed(name: str, error: Exception) -> None:
    reason = str(error).splitlines()[0] if str(error) else "no reason is given"
    _note(f"{name} failed and is left out: {type(error).__name__}: {reason}")


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
