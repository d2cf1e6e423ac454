"""How the rows of the bench command are shown: headings and cells."""

from collections.abc import Sequence
from typing import Any

from .libraries import label
from .report import cell

HEADINGS = (
    "model",
    "optimizer",
    "library",
    "backend",
    "leaves",
    "call, µs",
    "host, µs",
    "device, µs",
    "launches",
    "bytes",
    "of copy",
    "compile, s",
    "peak, MiB",
    "times optax",
    "on the device",
)
MEANING = """\
call: a jitted, donated step, called from Python again and again; torch's step likewise
host: of that the host's part, which is until a call returns while the device is idle; on a CPU
  that is the step itself wherever the library runs it inside of the call
call and host are of a bare step, without a backward pass: where it has fewer than five launches,
  XLA does not capture it into a CUDA graph, as it does whole train steps
device: a step of many in one compiled loop, or in one CUDA graph, without the host's part
launches: of our kernels in a step, counted in the compiled program
bytes: those that a step must move for each parameter; of copy: at which part of the copy's rate;
  on a CPU the copy also reads what it overwrites, which is not counted, so 1.5 is possible, and
  more where caches hold part of it
times optax: of the call, above 1 is faster; on the device: of the loop; tie: within the spreads"""


def bench_lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Headings, and the cells of each row."""
    return [list(HEADINGS), *(_cells(row) for row in rows)]


def row_name(row: dict[str, Any]) -> str:
    """The library, with the variant where there are several."""
    return label(row["library"], row["variant"])


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["model"],
        row["optimizer"],
        row_name(row),
        row["backend"],
        str(row["leaves"]),
        *(
            _time(row[f"{part}_us"], row[f"{part}_spread_us"])
            for part in ("call", "host", "device")
        ),
        cell(row["launches"]),
        str(row["bytes_per_parameter"]),
        _fixed(row["copy_fraction"], 2),
        _fixed(row["compile_s"], 2),
        _fixed(row["peak_mib"], 1),
        _ratio(row["ratio_to_optax"], row["tie"]),
        _ratio(row["device_ratio_to_optax"], row["device_tie"]),
    ]


def _time(median: float | None, spread: float | None) -> str:
    if median is None or spread is None:
        return ""
    digits = 0 if median >= 100 else 1
    return f"{median:.{digits}f} ± {spread:.{digits}f}"


def _fixed(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _ratio(ratio: float | None, tie: bool | None) -> str:
    return _fixed(ratio, 2) + " (tie)" * bool(tie)
