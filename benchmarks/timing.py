"""Timing shared by the benchmarks.

Sides alternate in one process; times are medians over rounds, with their spread.
"""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np


class Seconds(NamedTuple):
    """The median of a time over rounds, and its spread: half the distance of the quartiles."""

    median: float
    spread: float


def alternate(
    sides: Mapping[str, Callable[[], Any]], *, rounds: int, repeats: int = 1
) -> dict[str, Seconds]:
    """Times the sides in turn, so that a machine that slows down slows all of them.

    Args:
      sides: by name, a function that starts the work and returns arrays to wait for.
      rounds: measured rounds, after one that is not.
      repeats: calls in a round before it waits; the time is of one call.

    Returns:
      Seconds a call for each side.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            for _ in range(repeats - 1):
                side()
            jax.block_until_ready(side())
            if i:
                times[name].append((time.perf_counter() - start) / repeats)
    return {name: _summary(values) for name, values in times.items()}


def _summary(values: list[float]) -> Seconds:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return Seconds(middle, (high - low) / 2)


def copy_rate(nbytes: int, *, rounds: int = 7, repeats: int = 10) -> float:
    """Bytes a second, read and written, of the device's own copy of ``nbytes`` in all."""
    source = jax.numpy.asarray(np.random.default_rng(0).normal(size=nbytes // 8), np.float32)
    copy = jax.jit(jax.numpy.copy)
    seconds = alternate({"copy": lambda: copy(source)}, rounds=rounds, repeats=repeats)["copy"]
    return 2 * source.nbytes / seconds.median


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
        "command": " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def report(title: str, rows: list[dict[str, Any]], path: str | None) -> None:
    """Prints rows as a table, and writes them with the machine as JSON where a path is given."""
    print(f"\n{title}")
    columns = list(dict.fromkeys(key for row in rows for key in row))
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
