"""Trains a GPT on the characters of Python's own help, its parameters in one arena.

    python examples/train_gpt.py
    python examples/train_gpt.py --size small --plot gpt.png
    python examples/train_gpt.py --size gpt2 --batch-size 32

Kernels in bfloat16, gradients clipped by their norm, a cosine schedule after a warm-up, and an
average of the weights, which is what is tested and what writes the sample at the end. The default
size takes less than a minute on two CPU cores; the others want a GPU.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_options import image_file, integer
from digits_task import cross_entropy
from gpt_net import GPT, KERNELS_IN_BFLOAT16, Size
from gpt_text import Text, frequency_loss, load_text, random_windows
from tqdm import tqdm

import jaxrenaissance as jr

TEMPERATURE = 0.8  # of the sample: below 1, likely characters become likelier
VALIDATION_WINDOWS = 64


class Preset(NamedTuple):
    size: Size
    steps: int
    batch_size: int
    learning_rate: float


PRESETS = {  # 0.2, 11 and 86 million parameters
    "tiny": Preset(Size(layers=2, heads=4, width=96, context=64), 600, 16, 6e-3),
    "small": Preset(Size(layers=6, heads=6, width=384, context=256), 2000, 64, 1e-3),
    "gpt2": Preset(Size(layers=12, heads=12, width=768, context=1024), 2000, 16, 6e-4),
}


def initial_state(model: GPT, preset: Preset, seed: int) -> jr.TrainState:
    """Parameters, moments and the average of the weights, a buffer each."""
    rate, steps = preset.learning_rate, preset.steps
    optimizer = jr.adamw(
        optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps, 0.1 * rate),
        b2=0.99,
        weight_decay=0.1,
        mask="weights",
        max_norm=1.0,
        ema_decay=0.98,
    )

    def init() -> Any:
        tokens = jnp.zeros((1, preset.size.context), jnp.int32)
        return model.init(jax.random.key(seed), tokens)["params"]

    return jr.TrainState.init(init, optimizer, compute_dtype=KERNELS_IN_BFLOAT16)


def loss_of(model: GPT, params: Any, windows: jax.Array) -> jax.Array:
    """How well each character of the windows [n, context + 1] is told by those before it."""
    return cross_entropy(model.apply({"params": params}, windows[:, :-1]), windows[:, 1:])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(
    model: GPT, state: jr.TrainState, windows: jax.Array
) -> tuple[jr.TrainState, jax.Array]:
    """One step of the optimizer, in place: the state that was given is used up."""
    loss_fn = functools.partial(loss_of, model)
    loss, grads = jax.value_and_grad(loss_fn)(state.compute_params, windows)
    return state.apply_gradients(grads), loss


@functools.partial(jax.jit, static_argnums=0)
def evaluate(model: GPT, state: jr.TrainState, windows: jax.Array) -> jax.Array:
    """The loss with the average of the weights."""
    return loss_of(model, state.with_ema().compute_params, windows)


@functools.partial(jax.jit, static_argnums=(0, 3))
def write(
    model: GPT, state: jr.TrainState, window: jax.Array, length: int, key: jax.Array
) -> jax.Array:
    """What follows a window [context], character by character: tokens [length]."""
    params = state.with_ema().compute_params

    def next_token(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits: Any = model.apply({"params": params}, window[None])
        token = jax.random.categorical(key, logits[0, -1].astype(jnp.float32) / TEMPERATURE)
        return jnp.append(window[1:], token.astype(window.dtype)), token

    return jax.lax.scan(next_token, window, jax.random.split(key, length))[1]


class Losses(NamedTuple):
    training: np.ndarray
    """Of each step."""
    tested_after: list[int]
    validation: list[float]


def train(model: GPT, preset: Preset, text: Text, seed: int) -> tuple[jr.TrainState, Losses]:
    """Trains, with a progress bar."""
    state = initial_state(model, preset, seed)
    print(state)
    length, rng = preset.size.context + 1, np.random.default_rng(seed)
    validation = random_windows(text.validation, VALIDATION_WINDOWS, length, rng)
    every = max(1, preset.steps // 10)
    losses, tested_after, tested = [], [], []
    with tqdm(total=preset.steps, unit="step") as bar:
        for step in range(1, preset.steps + 1):
            windows = random_windows(text.training, preset.batch_size, length, rng)
            state, loss = train_step(model, state, windows)
            losses.append(loss)
            bar.update()
            if step % every == 0 or step == preset.steps:
                jr.check(state)  # raises where many steps in a row were skipped for a NaN
                tested_after.append(step)
                tested.append(float(evaluate(model, state, validation)))
                bar.set_postfix({"loss": f"{float(loss):.3f}", "validation": f"{tested[-1]:.3f}"})
    return state, Losses(np.asarray(jax.device_get(losses)), tested_after, tested)


def save_plot(path: Path, losses: Losses, by_frequency: float) -> None:
    """Draws the losses."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files and needs no display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = np.arange(1, len(losses.training) + 1)
    axes.plot(steps, losses.training, alpha=0.5, linewidth=0.8, label="training")
    label = "validation, average of the weights"
    axes.plot(losses.tested_after, losses.validation, ".-", label=label)
    axes.axhline(by_frequency, color="gray", linestyle=":", label="guessing by frequency")
    axes.set(xlabel="step", ylabel="loss of a character, nats", xlim=(0, len(steps)))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=PRESETS, default="tiny", help="0.2, 11 or 86 million parameters")
    add("--steps", type=integer(1), metavar="N", help="of training (default: the size's own)")
    add("--batch-size", type=integer(1), metavar="N", help="pieces of text a step (likewise)")
    add(
        "--sample", type=integer(1), default=400, metavar="N", help="characters to write at the end"
    )
    add("--seed", type=integer(0, 2**31 - 1), default=0, metavar="N", help="of weights and order")
    add("--plot", type=image_file, metavar="FILE", help="where to draw (default: nowhere)")
    options = parser.parse_args()
    preset = PRESETS[options.size]
    preset = preset._replace(
        steps=options.steps or preset.steps, batch_size=options.batch_size or preset.batch_size
    )

    text = load_text()
    model = GPT(preset.size, len(text.alphabet), jnp.bfloat16)
    start = time.perf_counter()
    state, losses = train(model, preset, text, options.seed)
    print(f"{preset.steps} steps in {time.perf_counter() - start:.1f} s, compiling included")

    window = text.validation[: preset.size.context]
    written = write(model, state, window, options.sample, jax.random.key(options.seed))
    print(f"--- the validation text begins\n{text.decode(window)}")
    print(f"--- and might go on\n{text.decode(np.asarray(written))}\n---")
    by_frequency = frequency_loss(text)
    if options.plot:
        save_plot(options.plot, losses, by_frequency)
        print(f"losses: {options.plot}")
    print(f"guessing by frequency: {by_frequency:.3f}")
    print(f"validation loss: {losses.validation[-1]:.3f}")


if __name__ == "__main__":
    main()
