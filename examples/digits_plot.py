"""The figure of train_digits.py: loss and accuracy by epoch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # draws into files and needs no display
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator, PercentFormatter

Metrics = Mapping[str, Any]
"""A loss and an accuracy, by these names."""


def save_plot(
    path: Path, training: Sequence[Sequence[Metrics]], test: Sequence[Metrics], title: str
) -> None:
    """Draws the metrics of a run. Steps whose loss is not finite are left out of the means.

    Args:
        path: the file; its ending says in which format.
        training: for each epoch, the metrics of each step.
        test: for each epoch, the metrics after it.
        title: above the figure.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    epochs = np.arange(1, len(test) + 1)
    step_losses = [step["loss"] for epoch in training for step in epoch]
    step_epochs = (np.arange(len(step_losses)) + 0.5) / len(training[0])
    left.plot(step_epochs, step_losses, color="C0", alpha=0.3, linewidth=0.8)
    for axes, name in ((left, "loss"), (right, "accuracy")):
        # An epoch's mean belongs to its middle, what is measured after it to its end.
        means = [
            np.mean([step[name] for step in epoch if np.isfinite(step["loss"])])
            for epoch in training
        ]
        axes.plot(epochs - 0.5, means, ".-", color="C0", label="training, mean of an epoch")
        values = [metrics[name] for metrics in test]
        axes.plot(epochs, values, ".-", color="C1", label="test, after an epoch")
        axes.set(title=name, xlabel="epoch", xlim=(0, 1.01 * len(test)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    left.legend()
    right.set_ylim(min(0.9, *(metrics["accuracy"] for metrics in test)) - 0.01, 1.003)
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    right.axhline(test[-1]["accuracy"], color="C1", linestyle=":", linewidth=1)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
