"""The command line of train_digits.py."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

BACKENDS = ("auto", "cpu", "cuda", "xla")
IMAGE_FORMATS = (".png", ".pdf", ".svg")


class Options(NamedTuple):
    optimizer: str
    backend: str | None
    epochs: int
    batch_size: int
    learning_rate: float | None
    seed: int
    plot: Path


def parse_options(description: str, optimizers: Sequence[str], max_batch_size: int) -> Options:
    """The options given on the command line; ends the program where one is wrong."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--optimizer", choices=optimizers, default="adamw", help="what trains")
    add(
        "--backend",
        type=_backend,
        choices=BACKENDS,
        default=argparse.SUPPRESS,
        help="where updates run (default: JAXRENAISSANCE_BACKEND, else auto)",
    )
    add("--epochs", type=_int(1), default=20, metavar="N", help="passes over the images")
    add("--batch-size", type=_int(1, max_batch_size), default=64, metavar="N", help="images a step")
    add(
        "--learning-rate",
        type=_rate,
        default=argparse.SUPPRESS,
        metavar="RATE",
        help="at the start (default: the optimizer's own)",
    )
    add("--seed", type=_int(0, 2**31 - 1), default=0, metavar="N", help="of weights and order")
    add("--plot", type=_image, default="train_digits.png", metavar="FILE", help="where to draw")
    unset = argparse.Namespace(backend=None, learning_rate=None)
    return Options(**vars(parser.parse_args(namespace=unset)))


def _backend(text: str) -> str:
    if text == "cuda" and not any(d.platform == "gpu" for d in jax.devices()):
        raise argparse.ArgumentTypeError("JAX sees no GPU; see `python -m jaxrenaissance info`")
    return text


def _int(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if number < low or (high is not None and number > high):
            wanted = f"{low} to {high}" if high is not None else f"{low} or more"
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text}")
        return number

    parse.__name__ = "int"  # argparse names it where the text is no number
    return parse


def _rate(text: str) -> float:
    rate = float(text)
    if not (math.isfinite(rate) and rate > 0):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return rate


def _image(text: str) -> Path:
    path = Path(text)
    if path.suffix not in IMAGE_FORMATS:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(IMAGE_FORMATS)}, got {text}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path
