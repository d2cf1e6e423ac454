r"""Trains a small convolutional network on scikit-learn's digits, its parameters in one arena.

    python examples/train_digits.py
    python examples/train_digits.py --optimizer nesterov --backend xla --epochs 10 --plot run.png
    python examples/train_digits.py --compute-dtype float16 --loss-scale dynamic --max-norm 1 \
        --ema-decay 0.98 --inject-overflow 100

Prints the memory plan and the time per step, draws loss and accuracy, and ends with the accuracy on
images that it was not trained on.
"""

import functools
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_net import evaluate, init, train_step
from digits_options import Options, parse_options
from digits_plot import save_plot
from digits_task import Arrays, batches, load_data
from tqdm import tqdm

import jaxrenaissance as jr

# name → (learning rate at the start, what makes the optimizer)
OPTIMIZERS = {
    "sgd": (0.3, jr.sgd),
    "momentum": (0.05, functools.partial(jr.sgd, momentum=0.9)),
    "nesterov": (0.05, functools.partial(jr.sgd, momentum=0.9, nesterov=True)),
    "adam": (3e-3, jr.adam),
    "adamw": (3e-3, functools.partial(jr.adamw, weight_decay=0.1, mask="weights")),
    "lars": (0.5, functools.partial(jr.lars, trust_coefficient=0.02)),
    "lars-nesterov": (0.5, functools.partial(jr.lars, trust_coefficient=0.02, nesterov=True)),
    "lamb": (0.02, functools.partial(jr.lamb, weight_decay=0.01, mask="weights")),
    "lion": (1e-3, functools.partial(jr.lion, weight_decay=0.1, mask="weights")),
}


LOSS_SCALES = {
    "none": None,
    "static": jr.StaticLossScale(1024),
    "dynamic": jr.DynamicLossScale(),
}

COMPILATIONS: list[str] = []


def initial_state(options: Options, num_updates: int) -> jr.TrainState:
    """Parameters and batch statistics, each in one buffer, and the optimizer's moments."""
    default_rate, factory = OPTIMIZERS[options.optimizer]
    learning_rate = options.learning_rate or default_rate
    optimizer = factory(
        optax.cosine_decay_schedule(learning_rate, num_updates),
        loss_scale=LOSS_SCALES[options.loss_scale],
        max_norm=options.max_norm,
        ema_decay=options.ema_decay,
        accumulate=jr.Accumulate(options.accumulate) if options.accumulate > 1 else None,
        backend=options.backend,
    )

    # Norm scales and biases stay in float32 where the rest is computed in 16 bits.
    return jr.TrainState.init(
        functools.partial(init, options.seed, options.backend),
        optimizer,
        has_extra=True,
        compute_dtype=None if options.compute_dtype == "float32" else options.compute_dtype,
        ema_extra=options.ema_decay is not None,
    )


def train(options: Options, training: Arrays, test: Arrays) -> float:
    """Trains, prints and draws; returns the accuracy on the test images."""
    num_steps = options.num_steps(len(training[0]))
    steps_per_epoch = num_steps // options.epochs
    state = initial_state(options, num_steps // options.accumulate)
    print(state.plan, state, sep="\n\n")

    dtype = jnp.dtype(options.compute_dtype)
    test = (test[0].astype(dtype), test[1])
    # The last of the steps that this update is the mean of.
    overflowing = (options.inject_overflow or 0) * options.accumulate
    rng = np.random.default_rng(options.seed)
    train_metrics, test_metrics, seconds, step = [], [], [], 0
    with tqdm(total=num_steps, unit="step") as bar:
        for _ in range(options.epochs):
            start, epoch_metrics = time.perf_counter(), []
            for images, labels in batches(*training, options.batch_size, rng):
                step += 1
                images = images.astype(dtype)
                if step == overflowing:
                    images.fill(np.inf)
                    bar.write(f"before the overflow: {progress(state)}")
                state, metrics = train_step(state, images, labels)
                if step == overflowing:
                    bar.write(f" after the overflow: {progress(state)}")
                epoch_metrics.append(metrics)
                bar.update()
            train_metrics.append(jax.device_get(epoch_metrics))  # waits for the last step
            seconds.append((time.perf_counter() - start) / steps_per_epoch)
            jr.check(state)  # raises where many steps in a row were skipped for a NaN
            averaged = state if options.ema_decay is None else state.with_ema()
            tested = evaluate(averaged.compute_params, averaged.extra.tree, *test)
            test_metrics.append(jax.device_get(tested))
            bar.set_postfix({"test accuracy": f"{test_metrics[-1]['accuracy']:.4f}"})

    final = test_metrics[-1]["accuracy"]
    note = "without the first, which compiles" if len(seconds) > 1 else "compiling included"
    median = statistics.median(seconds[1:] or seconds)
    print(f"time per step: {1e3 * median:.2f} ms (median over the epochs, {note})")
    title = f"Digits with {options.optimizer}: {final:.1%} of the test images right"
    save_plot(options.plot, train_metrics, test_metrics, title)
    print(f"loss and accuracy: {options.plot}")
    return final


def progress(state: jr.TrainState) -> str:
    """What an overflow changes, and what it does not."""
    return (
        f"updates {state.step}, skipped {state.skipped}, loss scale {state.loss_scale:g}, "
        f"compilations {len(COMPILATIONS)}"
    )


def note_compilation(event: str, *_: Any, **__: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILATIONS.append(event)


def served_device(backend: str | None) -> Any:
    """A device for a compiled backend; None, JAX's default, for the others."""
    return jax.devices(backend)[0] if backend in ("cpu", "cuda") else None


def main() -> None:
    jax.monitoring.register_event_duration_secs_listener(note_compilation)
    training, test = load_data()
    description = (__doc__ or "").splitlines()[0]
    options = parse_options(description, list(OPTIMIZERS), num_images=len(training[0]))
    try:
        with jax.default_device(served_device(options.backend)):
            print(f"test accuracy: {train(options, training, test):.4f}")
    except jr.BackendUnavailable as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
