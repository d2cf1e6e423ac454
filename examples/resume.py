"""Trains a network on the digits, stops in the middle, and resumes from an Orbax checkpoint.

    python examples/resume.py
    python examples/resume.py --epochs 4 --folder checkpoints

The run that was stopped ends bit for bit as the one that was not. While it trains, Orbax writes its
checkpoints in the background: `to_leaves` copies what it saves, so that the next step may update
the state in place.
"""

import argparse
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from digits_net import evaluate, init, train_step
from digits_task import Arrays, batches, load_data
from tqdm import tqdm

import jaxrenaissance as jr

BATCH_SIZE = 128


def initial_state(num_steps: int) -> jr.TrainState:
    """What a run starts from; one that resumes needs the shapes alone."""
    optimizer = jr.adamw(
        optax.cosine_decay_schedule(3e-3, num_steps),
        weight_decay=0.1,
        mask="weights",
        max_norm=1.0,
        ema_decay=0.98,
    )
    make = functools.partial(init, 0)
    return jr.TrainState.init(make, optimizer, has_extra=True, compute_dtype="bfloat16")


def stream(data: Arrays, epochs: int) -> Iterator[Arrays]:
    """All batches of a run, in an order that depends on the epoch alone."""
    for epoch in range(epochs):
        yield from batches(*data, BATCH_SIZE, np.random.default_rng(epoch))


def train(
    state: jr.TrainState,
    data: Arrays,
    epochs: int,
    manager: ocp.CheckpointManager | None,
    *,
    stop: int | None,
    name: str,
) -> jr.TrainState:
    """Trains to the end, or stops after a number of calls; saves on the way."""
    done = int(state.calls)  # what the state has seen of the stream
    for step, (images, labels) in enumerate(tqdm(stream(data, epochs), desc=name, unit="step"), 1):
        if step <= done:
            continue
        state, _ = train_step(state, images.astype("bfloat16"), labels)
        if manager is not None:
            # Of the steps it is asked for it saves one in twenty.
            manager.save(step, args=ocp.args.StandardSave(state.to_leaves()))
        if step == stop:
            break
    return state


def restore(folder: Path, num_steps: int) -> jr.TrainState:
    """The last state that was saved."""
    like = jax.eval_shape(functools.partial(initial_state, num_steps))  # computes nothing
    leaves = jax.eval_shape(lambda state: state.to_leaves(), like)
    with ocp.CheckpointManager(folder) as manager:
        restored = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(leaves))
    return jr.TrainState.from_leaves(restored, like)


def same_bits(a: jr.TrainState, b: jr.TrainState) -> bool:
    leaves = [jax.tree.leaves(state.to_leaves(host=True)) for state in (a, b)]
    return all(x.tobytes() == y.tobytes() for x, y in zip(*leaves, strict=True))


def run(folder: Path, epochs: int) -> None:
    training, test = load_data()
    num_steps = epochs * (len(training[1]) // BATCH_SIZE)
    state = initial_state(num_steps)
    whole = train(state, training, epochs, None, stop=None, name="in one go")

    stop = num_steps // 2 + 3  # in the middle of an epoch, and some steps after a checkpoint
    options = ocp.CheckpointManagerOptions(save_interval_steps=20, max_to_keep=2)
    with ocp.CheckpointManager(folder, options=options) as manager:
        state = initial_state(num_steps)
        train(state, training, epochs, manager, stop=stop, name="stopped")
    print(f"stopped after step {stop} of {num_steps}")

    state = restore(folder, num_steps)
    print(f"resumed from step {state.calls}")
    state = train(state, training, epochs, None, stop=None, name="resumed")

    print(f"bit for bit as in one go: {same_bits(state, whole)}")
    averaged = state.with_ema()
    tested = evaluate(averaged.params, averaged.extra.tree, *test)
    print(f"test accuracy: {tested['accuracy']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="for the checkpoints; a temporary one if none")
    options = parser.parse_args()
    if options.epochs < 4:
        parser.error("argument --epochs: expected 4 or more, for a checkpoint to resume from")
    if options.folder is not None:
        if options.folder.exists() and any(options.folder.iterdir()):
            parser.error("argument --folder: expected one that is empty")
        run(options.folder.absolute(), options.epochs)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), options.epochs)


if __name__ == "__main__":
    main()
