"""Figures of rows of the bench command. The only place that needs matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws into files and needs no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .columns import row_name

Rows = Sequence[dict[str, Any]]


def check_ending(path: str) -> None:
    """Raises a `ValueError` for a file whose format is not known: now, not after a long run."""
    known = FigureCanvasAgg.filetypes
    if Path(path).suffix.removeprefix(".") not in known:
        raise ValueError(f"--plot: expected a file that ends in .{', .'.join(known)}; got {path!r}")


def save(path: str | Path, rows: Rows, sweep: str | None) -> None:
    """Draws rows into a file, whose ending says in which format.

    Args:
        path: the file.
        rows: of the bench command.
        sweep: "sizes": bandwidth against size; "leaves": time against the number of leaves; None:
            bars of the times of each model and optimizer.
    """
    figure = {"sizes": bandwidth, "leaves": leaves, None: bars}[sweep](rows)
    figure.suptitle(rows[0]["device"])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row_name(row) for row in rows))


def _by_optimizer(rows: Rows, draw: Callable[[Axes, Rows], None]) -> Figure:
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    figure, axes = plt.subplots(
        1,
        len(optimizers),
        figsize=(7 * len(optimizers), 4.5),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for optimizer, ax in zip(optimizers, axes[0], strict=True):
        draw(ax, [row for row in rows if row["optimizer"] == optimizer])
        ax.set_title(optimizer)
        ax.grid(alpha=0.3)
        ax.legend(fontsize="small")
    return figure


def _lines(
    ax: Axes, rows: Rows, x: str, y: Callable[[dict[str, Any]], float | None], style: str, what: str
) -> None:
    """A line for each library that has points, in its own colour."""
    for i, name in enumerate(_names(rows)):
        points = [(row[x], y(row)) for row in rows if row_name(row) == name and y(row) is not None]
        if points:
            label = f"{name}{what}"
            ax.plot(*zip(*sorted(points), strict=True), style, color=f"C{i}", ms=4, label=label)


def bandwidth(rows: Rows) -> Figure:
    """Bytes a second against size, with the copy as a line; a part for each optimizer."""

    def rate(row: dict[str, Any]) -> float | None:
        fraction = row["copy_fraction"]
        return None if fraction is None else fraction * row["copy_gb_per_s"]

    def draw(ax: Axes, rows: Rows) -> None:
        _lines(ax, rows, "parameters", rate, "o-", "")
        copies = sorted({row["parameters"]: row["copy_gb_per_s"] for row in rows}.items())
        ax.plot(*zip(*copies, strict=True), "k--", linewidth=1, label="copy")
        ax.set(xscale="log", yscale="log", xlabel="parameters", ylabel="GB/s, by a step's bytes")

    return _by_optimizer(rows, draw)


def leaves(rows: Rows) -> Figure:
    """Times of a step and of a call against the number of leaves."""

    def draw(ax: Axes, rows: Rows) -> None:
        _lines(ax, rows, "leaves", lambda row: row["device_us"], "o-", ": device")
        _lines(ax, rows, "leaves", lambda row: row["call_us"], "o:", ": call")
        ax.set(xscale="log", yscale="log", xlabel="leaves", ylabel="step, µs")

    return _by_optimizer(rows, draw)


def bars(rows: Rows) -> Figure:
    """Times of a step and of a call, a part for each optimizer and model."""
    names = _names(rows)
    models = list(dict.fromkeys(row["model"] for row in rows))
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    figure, axes = plt.subplots(
        len(optimizers),
        len(models),
        figsize=(3 + 4 * len(models), 1 + (1 + 0.3 * len(names)) * len(optimizers)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for i, optimizer in enumerate(optimizers):
        for ax, model in zip(axes[i], models, strict=True):
            for row in rows:
                if (row["model"], row["optimizer"]) == (model, optimizer):
                    place = names.index(row_name(row))
                    _bar(ax, place - 0.2, row, "call", "C0")
                    _bar(ax, place + 0.2, row, "device", "C1")
            ax.set(title=f"{model}, {optimizer}", yticks=range(len(names)), yticklabels=names)
            ax.set_xlim(left=0)
            ax.grid(axis="x", alpha=0.3)
    for ax in axes[-1]:
        ax.set_xlabel("µs")
    axes[0, 0].invert_yaxis()  # of all of them, since they share it
    handles = [Patch(color=color) for color in ("C0", "C1")]
    figure.legend(handles, ["call", "device"], loc="outside lower center", ncols=2)
    return figure


def _bar(ax: Axes, place: float, row: dict[str, Any], part: str, color: str) -> None:
    if row[f"{part}_us"] is not None:
        ax.barh(place, row[f"{part}_us"], 0.4, xerr=row[f"{part}_spread_us"], color=color)
