"""Rows of a benchmark: as a table, and as JSON with what they were measured on."""

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from .. import native
from .timing import Seconds, num_cores


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


def device_name() -> str:
    """The device's kind, or the processor's name."""
    device = jax.devices()[0]
    return device.device_kind if device.platform != "cpu" else _processor()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> dict[str, Any]:
    """Of a CPU: how many cores the process may run on, and the instruction set of our module."""
    if jax.default_backend() != "cpu":
        return {}
    instructions = native.build_info("cpu")["instruction_set"] if native.available("cpu") else None
    return {"cores": num_cores(), "instruction_set": instructions}


def versions(*more: str) -> dict[str, str]:
    """Of Python, of the packages that are always used, and of others."""
    packages = ("jaxrenaissance", "jax", "jaxlib", "optax", "numpy", *more)
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def command() -> str:
    """The command of this run."""
    script, *arguments = sys.argv
    program = [_without_folder(script)]
    if Path(script).name == "__main__.py":
        program = ["-m", Path(script).parent.name]
    return shlex.join(["python", *program, *map(_without_folder, arguments)])


def _without_folder(argument: str) -> str:
    """An absolute path says more of the machine than of the run."""
    option, equals, value = argument.rpartition("=")
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)


def table(title: str, lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, headings first, in columns under a title."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([title, *text])


def check_writable(path: str | None) -> None:
    """Raises an `OSError` where the file cannot be written: now, not after a long run."""
    if path is None:
        return
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    existed = file.exists()
    file.open("a").close()
    if not existed:
        file.unlink()


def write_json(path: str, content: Any) -> None:
    """Writes a file, and the folder that it is in."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def report(title: str, rows: list[dict[str, Any]], path: str | None) -> None:
    """Prints rows as a table, and writes them with the machine as JSON where a path is given.

    Lists are written alone.
    """
    items = [item for row in rows for item in row.items()]
    columns = list(dict.fromkeys(key for key, value in items if not isinstance(value, list)))
    print("\n" + table(title, [columns, *([cell(row.get(c)) for c in columns] for row in rows)]))
    if path:
        machine = {"device": device_name(), "platform": jax.default_backend(), **cores()}
        machine = {**machine, **versions(), "command": command()}
        write_json(path, {"machine": machine, "rows": rows})


def cell(value: Any) -> str:
    """A value with as many digits as a measurement has."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
