"""The command line of train_digits.py."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

BACKENDS = ("auto", "cpu", "cuda", "xla")
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
LOSS_SCALES = ("none", "static", "dynamic")
IMAGE_FORMATS = (".png", ".pdf", ".svg")


class Options(NamedTuple):
    optimizer: str = "adamw"
    backend: str | None = None
    epochs: int = 20
    batch_size: int = 64
    learning_rate: float | None = None
    compute_dtype: str = "float32"
    loss_scale: str = "none"
    max_norm: float | None = None
    ema_decay: float | None = None
    accumulate: int = 1
    inject_overflow: int | None = None
    seed: int = 0
    plot: Path = Path("train_digits.png")

    def num_steps(self, num_images: int) -> int:
        """Steps in all epochs: batches; what does not fill one is left out."""
        return self.epochs * (num_images // self.batch_size)


def parse_options(description: str, optimizers: Sequence[str], num_images: int) -> Options:
    """The options given on the command line; ends the program where one is wrong."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    # The help shows these; the others say in words what is done without them.
    defaults = Options()._asdict().items()
    parser.set_defaults(**{name: value for name, value in defaults if value is not None})
    add = parser.add_argument
    add("--optimizer", choices=optimizers, help="what trains")
    add(
        "--backend",
        type=_backend,
        choices=BACKENDS,
        help="where updates run (default: JAXRENAISSANCE_BACKEND, else auto)",
    )
    add("--epochs", type=integer(1), metavar="N", help="passes over the images")
    add("--batch-size", type=integer(1, num_images), metavar="N", help="images a step")
    add(
        "--learning-rate",
        type=_positive,
        metavar="RATE",
        help="at the start (default: the optimizer's own)",
    )
    add("--compute-dtype", choices=COMPUTE_DTYPES, help="of the forward and backward pass")
    add("--loss-scale", choices=LOSS_SCALES, help="what float16 gradients are kept in range by")
    add(
        "--max-norm",
        type=_positive,
        metavar="NORM",
        help="clip gradients to this global norm (default: no clipping)",
    )
    add(
        "--ema-decay",
        type=_decay,
        metavar="DECAY",
        help="test with an average of the weights (default: with the weights themselves)",
    )
    add("--accumulate", type=integer(1), metavar="N", help="steps an update")
    add(
        "--inject-overflow",
        type=integer(1),
        metavar="UPDATE",
        help="make the gradients of this update infinite, and show what happens (default: none)",
    )
    add("--seed", type=integer(0, 2**31 - 1), metavar="N", help="of weights and order")
    add("--plot", type=image_file, metavar="FILE", help="where to draw")
    options = Options(**vars(parser.parse_args()))
    updates = options.num_steps(num_images) // options.accumulate
    if updates < 1:
        parser.error(f"argument --accumulate: there are {options.num_steps(num_images)} steps")
    if (options.inject_overflow or 1) > updates:
        parser.error(f"argument --inject-overflow: there are {updates} updates")
    return options


def _backend(text: str) -> str:
    if text == "cuda" and not any(d.platform == "gpu" for d in jax.devices()):
        raise argparse.ArgumentTypeError("JAX sees no GPU; see `python -m jaxrenaissance info`")
    return text


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Reads an integer in a range, for argparse."""

    def parse(text: str) -> int:
        number = int(text)
        if number < low or (high is not None and number > high):
            wanted = f"{low} to {high}" if high is not None else f"{low} or more"
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text}")
        return number

    parse.__name__ = "int"  # argparse names it where the text is no number
    return parse


def _positive(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return number


def _decay(text: str) -> float:
    decay = float(text)
    if not 0 <= decay < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to less than 1, got {text}")
    return decay


def image_file(text: str) -> Path:
    """Reads where to draw to, for argparse."""
    path = Path(text)
    if path.suffix not in IMAGE_FORMATS:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(IMAGE_FORMATS)}, got {text}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path
