"""Timing shared by the benchmarks.

Sides alternate in one process; times are medians over rounds, with their spread.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

WARM_UP_CALLS = 4  # compilation, and what a runtime does after its first executions


class Seconds(NamedTuple):
    """The median of a time over rounds, and its spread: half the distance of the quartiles."""

    median: float
    spread: float


def alternate(
    sides: Mapping[str, Callable[[], Any]], *, rounds: int, seconds: float = 0.02
) -> dict[str, Seconds]:
    """Times the sides in turn, so that a machine that slows down slows all of them.

    Args:
      sides: by name, a function that starts the work and returns arrays to wait for.
      rounds: measured rounds.
      seconds: how long a round of a side lasts at least: calls follow each other without waiting,
        so that the time of one is the device's where that is longer than the host's.

    Returns:
      Seconds a call for each side.
    """
    repeats = {}
    for name, side in sides.items():
        single = min(_seconds_a_call(side, 1) for _ in range(WARM_UP_CALLS))
        repeats[name] = max(1, round(seconds / single))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(_seconds_a_call(side, repeats[name]))
    return {name: summary(values) for name, values in times.items()}


def _seconds_a_call(side: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats - 1):
        side()
    jax.block_until_ready(side())
    return (time.perf_counter() - start) / repeats


def summary(values: list[float]) -> Seconds:
    """The median of times and their spread."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return Seconds(middle, (high - low) / 2)


def copy_rate(nbytes: int, *, rounds: int = 9) -> float:
    """Bytes a second, read and written, of the device's own copy of ``nbytes`` in all.

    On a GPU that is XLA's copy, a memcpy of the driver; on a CPU, memcpy on all cores into memory
    that is there already.
    """
    source = np.random.default_rng(0).standard_normal(nbytes // 8, np.float32)
    if jax.default_backend() == "cpu":
        target = np.empty_like(source)
        parts = np.array_split(np.arange(source.size), os.cpu_count() or 1)
        slices = [slice(part[0], part[-1] + 1) for part in parts]
        with ThreadPoolExecutor(len(slices)) as pool:

            def copy_all() -> Any:
                return list(pool.map(lambda s: np.copyto(target[s], source[s]), slices))

            seconds = alternate({"copy": copy_all}, rounds=rounds)["copy"]
    else:
        on_device = jax.numpy.asarray(source)
        copy = jax.jit(jax.numpy.copy)
        seconds = alternate({"copy": lambda: copy(on_device)}, rounds=rounds)["copy"]
    return 2 * source.nbytes / seconds.median


def step_row(
    time: Seconds,
    optax_time: Seconds | None,
    bytes_per_parameter: int,
    num_parameters: int,
    rate: float,
) -> dict[str, Any]:
    """The columns that compare a step with optax's and with a copy at ``rate`` bytes a second."""
    return {
        "step_us": time.median * 1e6,
        "spread_us": time.spread * 1e6,
        "bytes_per_parameter": bytes_per_parameter,
        "copy_fraction": bytes_per_parameter * num_parameters / time.median / rate,
        "copy_gb_per_s": rate / 1e9,
        "ratio_to_optax": None if optax_time is None else optax_time.median / time.median,
    }


def machine() -> dict[str, Any]:
    """The device, the versions and the command of this run."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "platform": device.platform,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "optax": version("optax"),
        "numpy": np.__version__,
        "command": " ".join(["python", *(_without_folder(argument) for argument in sys.argv)]),
    }


def _without_folder(argument: str) -> str:
    """An absolute path says more of the machine than of the run."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def report(title: str, rows: list[dict[str, Any]], path: str | None) -> None:
    """Prints rows as a table, and writes them with the machine as JSON where a path is given.

    Lists are written alone.
    """
    print(f"\n{title}")
    items = [item for row in rows for item in row.items()]
    columns = list(dict.fromkeys(key for key, value in items if not isinstance(value, list)))
    cells = [columns, *([_cell(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
