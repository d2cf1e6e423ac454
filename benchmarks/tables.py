"""The tables and plots of README.md, made from the files in results/.

    python benchmarks/tables.py
    python benchmarks/tables.py --check

What is between `<!-- table: FILE -->`, `<!-- plot: FILE sizes -->` or `<!-- plot: FILE leaves -->`
and `<!-- end -->` is made anew from results/FILE; a plot is drawn into a file beside it. `--check`
writes nothing and fails where a table is not what its file says.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrenaissance.bench.columns import bench_lines

HERE = Path(__file__).parent
BLOCK = re.compile(
    r"(?P<start><!-- (?P<kind>table|plot): (?P<file>\S+)(?: (?P<sweep>sizes|leaves))? -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)
PLOTS = {
    "sizes": "Bandwidth of a step against the number of parameters, in one leaf",
    "leaves": "Time of a step against the number of leaves of 10⁷ parameters in all",
}

Rows = list[dict[str, Any]]


def fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def microseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "model": ("model", str),
    "dtype": ("gradients", str),
    "devices": ("devices", str),
    "leaves": ("leaves", str),
    "side": ("side", str),
    "kernel": ("kernels", str),
    "a_step": ("a step", "{:.0f}".format),
    "us": ("time a step, µs", microseconds),
    "alone_us": ("alone, µs", microseconds),
    "of_the_busy_time": ("of the busy time", fixed(4)),
    "buffers": ("buffers", str),
    "step_us": ("step, µs", microseconds),
    "host_us": ("host, µs", microseconds),
    "spread_us": ("spread", microseconds),
    "host_spread_us": ("spread of host", microseconds),
    "optimizer_us": ("without making gradients, µs", microseconds),
    "collectives_us": ("collectives, µs", microseconds),
    "of_bare_rate": ("of the bare rate", fixed(2)),
    "bytes_per_parameter": ("bytes a parameter", str),
    "copy_fraction": ("of the copy rate", fixed(2)),
    "ratio_to_optax": ("times optax", fixed(2)),
    "ratio_to_identity": ("of the identity", fixed(2)),
    "ratio_to_best_optax": ("times the best of optax", fixed(2)),
    "launches": ("launches", str),
    "collectives": ("collectives", str),
    "collective_mib": ("of them, MiB", fixed(1)),
    "state_mib": ("state, MiB", fixed(1)),
    "state_share": ("times one device's share", fixed(3)),
    "compile_s": ("compile, s", fixed(2)),
    "peak_mib": ("peak, MiB", fixed(1)),
    "loss_difference": ("difference of losses", "{:.0e}".format),
}
"""Of the programs here, in this order; `python -m jaxrenaissance bench` has its own."""


def generated(page: str, results: Path) -> str:
    """A page with its tables and the links to its plots as the files in a folder say."""

    def block(match: re.Match[str]) -> str:
        path = results / match["file"]
        content = plot_link(path, match["sweep"]) if match["kind"] == "plot" else tables(path)
        return f"{match['start']}{content}\n{match['end']}"

    return BLOCK.sub(block, page)


def read(path: Path) -> tuple[Rows, str]:
    """The rows of a file, and in a line what they were measured on."""
    content = json.loads(path.read_text())
    if isinstance(content, list):  # of the bench command: every row says it
        first = content[0]
        rows, machine = content, {**first["versions"], **first}
    else:
        rows, machine = content["rows"], content["machine"]
    packages = ", ".join(f"{name} {machine[name]}" for name in ("jax", "optax"))
    return rows, f"{machine['device']}, {packages}: `{machine['command']}`"


def tables(path: Path) -> str:
    """A file's rows as tables of Markdown, one for each kind of row."""
    rows, origin = read(path)
    parts = [f"[{path.name}](results/{path.name}), {origin}"]
    if "library" in rows[0]:
        parts.append(markdown(bench_lines(rows)))
    else:
        for keys, group in itertools.groupby(
            rows, key=lambda row: [k for k in COLUMNS if k in row]
        ):
            lines = [[COLUMNS[key][0] for key in keys]]
            lines += [[shown(key, row[key]) for key in keys] for row in group]
            parts.append(markdown(lines))
    return "\n\n".join(parts)


def shown(key: str, value: Any) -> str:
    return "" if value is None else COLUMNS[key][1](value)


def markdown(lines: list[list[str]]) -> str:
    """A table, headings first, without the columns that are empty in all rows."""
    used = [any(cells) for cells in zip(*lines[1:], strict=True)]
    kept = [list(itertools.compress(line, used)) for line in lines]
    kept.insert(1, ["---"] * sum(used))
    return "\n".join(f"| {' | '.join(line)} |" for line in kept)


def plot_link(path: Path, sweep: str) -> str:
    _, origin = read(path)
    picture = f"![{PLOTS[sweep]}](results/{path.stem}.png)"
    return f"{picture}\n\n[{path.name}](results/{path.name}), {origin}"


def draw_plots(page: str, results: Path) -> None:
    """Draws the plots of a page into files beside the results."""
    for match in BLOCK.finditer(page):
        if match["kind"] == "plot":
            # Matplotlib is not needed for tables alone.
            from jaxrenaissance.bench import plot

            path = results / match["file"]
            plot.save(path.with_suffix(".png"), read(path)[0], match["sweep"])


def main() -> int:
    """Writes the page, or compares it with what would be written."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    args = parser.parse_args()
    readme, results = HERE / "README.md", HERE / "results"
    old = readme.read_text()
    new = generated(old, results)
    if args.check:
        if new != old:
            print("README.md: run python benchmarks/tables.py", file=sys.stderr)
        return int(new != old)
    readme.write_text(new)
    draw_plots(new, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
