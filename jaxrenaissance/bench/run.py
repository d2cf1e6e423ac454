"""One model and one optimizer: all libraries in turn, and a row for each."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .data import shapes_of
from .kinds import KINDS
from .libraries import OPTAX, Contestant, contestants, those_with
from .loops import loop_for
from .report import device_name
from .timing import Seconds, alternate, call_times, copy_rate, device_times, wait

MOST_LEAVES_IN_A_LOOP = 1000  # of programs with an operation a leaf: more take XLA minutes


class Effort(NamedTuple):
    """How long to measure."""

    rounds: int
    call_seconds: float
    """That a round of calls lasts at least."""
    loop_seconds: float
    """That a loop of steps lasts about, where they go at the copy's rate."""
    optax_leaves: int
    """With more, optax is left out: XLA takes minutes to compile its step."""


FULL = Effort(rounds=15, call_seconds=0.05, loop_seconds=0.02, optax_leaves=2000)
QUICK = Effort(rounds=5, call_seconds=0.02, loop_seconds=0.005, optax_leaves=1000)

PHASES = 4
"""How often `bench` says what it does next."""


def rivals_of(leaves: int, optimizer: str, rivals: Sequence[str], effort: Effort) -> list[str]:
    """Those of the rivals that have the optimizer, and whose program is compiled in short time."""
    running = those_with(KINDS[optimizer], rivals)
    return [name for name in running if name != OPTAX or leaves <= effort.optax_leaves]


def bench(
    model: str,
    optimizer: str,
    rivals: Sequence[str],
    effort: Effort,
    phase: Callable[[str], Any],
    failed: Callable[[str, Exception], Any],
) -> list[dict[str, Any]]:
    """The rows of one model and optimizer, one for each library and variant that runs.

    Args:
        model: a name for `shapes_of`.
        optimizer: a name in `KINDS`.
        rivals: the libraries to compare with, of `rivals_of`.
        effort: how long to measure.
        phase: called with what is done next, `PHASES` times.
        failed: told the name of each that fails, and why; the others go on.
    """
    shapes, kind = shapes_of(model), KINDS[optimizer]
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes)]

    phase("copy")  # before the sides take their memory
    rate = copy_rate(kind.other_bytes * sum(sizes))
    phase("compiling")
    entered = {entry.name: entry for entry in contestants(shapes, kind, rivals, failed)}
    sides = {name: entry.side for name, entry in entered.items()}
    phase("calls")
    calls = alternate(sides, rounds=effort.rounds, seconds=effort.call_seconds)
    hosts = call_times(sides, effort.rounds)
    phase("loops")
    started, loops = {}, {}
    for name, entry in entered.items():
        if entry.facts.backend == "xla" and len(sizes) > MOST_LEAVES_IN_A_LOOP:
            continue
        least = entry.bytes_per_parameter * sum(sizes) / rate
        loop = loop_for(entry.facts.launches, least, effort.loop_seconds)
        try:
            if (start := entry.side.loop(loop)) is not None:
                wait(start())
                started[name], loops[name] = start, loop
        except Exception as error:  # no memory for it; the times of calls are there
            failed(f"{name}, loop", error)
    whole = device_times(started, rounds=effort.rounds, seconds=effort.call_seconds)
    devices = {name: time.over(loops[name].steps) for name, time in whole.items()}

    rows = []
    for name, entry in entered.items():
        rows.append(
            {
                "model": model,
                "optimizer": optimizer,
                "library": entry.library,
                "variant": entry.variant,
                "backend": entry.facts.backend,
                "device": device_name(),
                "parameters": sum(sizes),
                "leaves": len(sizes),
                **time_columns("call", calls[name]),
                **time_columns("host", hosts[name]),
                **time_columns("device", devices.get(name)),
                **memory_columns(entry, devices.get(name), sum(sizes), rate),
                **ratio_columns("", calls[name], calls.get(OPTAX)),
                **ratio_columns("device_", devices.get(name), devices.get(OPTAX)),
            }
        )
    return rows


def time_columns(name: str, time: Seconds | None) -> dict[str, float | None]:
    """A time and its spread in microseconds."""
    return {
        f"{name}_us": None if time is None else time.median * 1e6,
        f"{name}_spread_us": None if time is None else time.spread * 1e6,
    }


def memory_columns(
    entry: Contestant, device: Seconds | None, parameters: int, rate: float
) -> dict[str, Any]:
    """What a step needs and moves, and how fast, where its time on the device is known."""
    moved = entry.bytes_per_parameter * parameters
    return {
        "launches": entry.facts.launches,
        "bytes_per_parameter": entry.bytes_per_parameter,
        "copy_fraction": None if device is None else moved / device.median / rate,
        "copy_gb_per_s": rate / 1e9,
        "compile_s": entry.facts.compile_s,
        "peak_mib": entry.facts.peak_mib,
    }


def ratio_columns(prefix: str, time: Seconds | None, optax: Seconds | None) -> dict[str, Any]:
    """How many times faster than optax, and whether that is within the spreads of both."""
    ratio, tie = None, None
    if time is not None and optax is not None:
        ratio, tie = optax.median / time.median, time is not optax and time.ties(optax)
    return {f"{prefix}ratio_to_optax": ratio, f"{prefix}tie": tie}
