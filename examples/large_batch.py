"""Momentum and LARS at larger and larger batches, on scikit-learn's digits.

    python examples/large_batch.py
    python examples/large_batch.py --epochs 40 --batches 64 1024 --plot large_batch.png

Each run sees as many epochs, from the same weights and in the same order. The learning rate grows
with the batch, after a warm-up (Goyal et al., https://arxiv.org/abs/1706.02677), and is the same
for both optimizers. LARS (You et al., https://arxiv.org/abs/1708.03888) was made for batches at
which such a rate makes momentum diverge.

What it shows is small, since the data are: of 1,437 images an epoch has one batch of 1024, and of
the 360 others, for the test, one is 0.3 %. Momentum does not diverge here, and is a little ahead at
1024, where LARS was at 256; what both lose there is for want of steps, of which they have 30.
"""

import argparse
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from digits_net import evaluate, init, train_step
from digits_options import image_file, integer
from digits_task import Arrays, batches, load_data
from tqdm import tqdm

import jaxrenaissance as jr

OPTIMIZERS = {
    "momentum": functools.partial(jr.sgd, momentum=0.9),
    "lars": functools.partial(jr.lars, trust_coefficient=0.02, trust_ratio_mask="weights"),
}
RATE_OF_AN_IMAGE = 0.05 / 64


class Run(NamedTuple):
    batch: int
    optimizer: str
    rate: float
    accuracies: np.ndarray
    """Of the test images, [seeds, epochs]."""
    losses: np.ndarray
    """Of training, the mean over an epoch, [seeds, epochs]."""


def train(
    batch: int, name: str, epochs: int, seeds: int, training: Arrays, test: Arrays, bar: tqdm
) -> Run:
    """One optimizer at one batch size, from every seed's weights."""
    rate = RATE_OF_AN_IMAGE * batch
    steps = epochs * (len(training[0]) // batch)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 5, steps)
    optimizer = OPTIMIZERS[name](schedule)
    accuracies, losses = [], []
    for seed in range(seeds):
        params, batch_stats = init(seed)
        state = jr.TrainState.create(params, optimizer, extra=batch_stats)
        rng = np.random.default_rng(seed)
        for _ in range(epochs):
            metrics = []
            for images, labels in batches(*training, batch, rng):
                state, step_metrics = train_step(state, images, labels)
                metrics.append(step_metrics)
            losses.append(np.mean([step["loss"] for step in jax.device_get(metrics)]))
            tested = evaluate(state.params, state.extra.tree, *test)
            accuracies.append(float(tested["accuracy"]))
            bar.update()
    shape = seeds, epochs
    return Run(batch, name, rate, np.reshape(accuracies, shape), np.reshape(losses, shape))


def save_plot(path: Path, runs: list[Run]) -> None:
    """Test accuracy by epoch, a panel a batch size; the band is from the worst seed to the best."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files and needs no display
    import matplotlib.pyplot as plt

    sizes = sorted({run.batch for run in runs})
    figure, panels = plt.subplots(
        1, len(sizes), figsize=(4 * len(sizes), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, batch in zip(panels[0], sizes, strict=True):
        for run in runs:
            if run.batch != batch:
                continue
            epochs = np.arange(1, run.accuracies.shape[1] + 1)
            axes.plot(epochs, run.accuracies.mean(0), label=run.optimizer)
            axes.fill_between(epochs, run.accuracies.min(0), run.accuracies.max(0), alpha=0.2)
        axes.set(title=f"batches of {batch}", xlabel="epoch")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("test accuracy")
    panels[0][0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    training, test = load_data()
    size = integer(1, len(training[0]))
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epochs", type=integer(1), default=30, metavar="N", help="passes over the images")
    add(
        "--batches",
        type=size,
        nargs="+",
        default=[64, 256, 1024],
        metavar="N",
        help="images a step",
    )
    add("--seeds", type=integer(1), default=3, metavar="N", help="runs of each, from other weights")
    add("--plot", type=image_file, metavar="FILE", help="where to draw (default: nowhere)")
    options = parser.parse_args()

    sides = [(batch, name) for batch in options.batches for name in OPTIMIZERS]
    runs = []
    with tqdm(total=len(sides) * options.seeds * options.epochs, unit="epoch") as bar:
        for batch, name in sides:
            bar.set_postfix({"batch": batch, "optimizer": name})
            runs.append(train(batch, name, options.epochs, options.seeds, training, test, bar))

    print(f"{options.epochs} epochs, {options.seeds} seeds: the mean, and the worst to the best")
    print("batch  optimizer  learning rate  steps  test accuracy          training loss")
    for run in runs:
        steps = options.epochs * (len(training[0]) // run.batch)
        last, loss = run.accuracies[:, -1], run.losses[:, -1].mean()
        print(
            f"{run.batch:5}  {run.optimizer:9}  {run.rate:13.3f}  {steps:5}  "
            f"{last.mean():.3f} ({last.min():.3f}–{last.max():.3f})    {loss:13.4f}"
        )
    if options.plot:
        save_plot(options.plot, runs)
        print(f"test accuracy by epoch: {options.plot}")


if __name__ == "__main__":
    main()
