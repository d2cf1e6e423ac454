r"""Trains the digits network on several devices, each with a part of every batch.

    python examples/data_parallel.py
    python examples/data_parallel.py --gpus --batch-size 256

Without --gpus the devices are eight of the host, which shows what is stored where; times of real
links need real ones. Three ways with the same result but for rounding:

- replicated: every device holds the whole state.
- zero1: each holds a part of the weights and moments, and updates it. The step is the same.
- zero1, shard_map: the step is written as one device sees it. Gradients are then its own until
  `apply_gradients` takes their mean, of which each device gets its part.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from digits_net import DigitsNet, evaluate, init, step, train_step
from digits_options import integer
from digits_task import Arrays, batches, load_data
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

import jaxrenaissance as jr

FORMS = {  # name → (sharding, whether the step is in shard_map)
    "replicated": ("replicated", False),
    "zero1": ("zero1", False),
    "zero1, shard_map": ("zero1", True),
}


class Run(NamedTuple):
    bytes_per_device: int
    seconds: float
    loss: float
    accuracy: float


def step_of_each_device(state: jr.TrainState, mesh: Mesh) -> Callable[..., Any]:
    """The step as a program of one device, on its part of the batch."""

    def local_step(state: jr.TrainState, images: jax.Array, labels: jax.Array) -> Any:
        state, metrics = step(state, images, labels, DigitsNet(axis_name="data"))
        return state, jax.lax.pmean(metrics, "data")

    specs = state.partition_specs
    batch, all_devices = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        local_step, mesh=mesh, in_specs=(specs, batch, batch), out_specs=(specs, all_devices)
    )
    return jax.jit(mapped, donate_argnums=0)


def bytes_per_device(state: jr.TrainState) -> int:
    """What the first device holds of a state."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))


def train(
    name: str, mesh: Mesh, epochs: int, batch_size: int, training: Arrays, test: Arrays, bar: tqdm
) -> Run:
    """All epochs in one of the forms."""
    sharding, is_mapped = FORMS[name]
    steps = epochs * (len(training[0]) // batch_size)
    optimizer = jr.adamw(
        optax.cosine_decay_schedule(3e-3, steps), weight_decay=0.1, mask="weights", max_norm=1.0
    )
    params, batch_stats = init(seed=0)
    state = jr.TrainState.create(params, optimizer, extra=batch_stats, mesh=mesh, sharding=sharding)
    run_step = step_of_each_device(state, mesh) if is_mapped else train_step

    rng, over_devices = np.random.default_rng(0), NamedSharding(mesh, PartitionSpec("data"))
    seconds, metrics = [], {}
    for _ in range(epochs):
        for batch in batches(*training, batch_size, rng):
            images, labels = jax.device_put(batch, over_devices)
            start = time.perf_counter()
            state, metrics = jax.block_until_ready(run_step(state, images, labels))
            seconds.append(time.perf_counter() - start)
            bar.update()
    tested = evaluate(state.params, state.extra.tree, *test)
    return Run(
        bytes_per_device(state),
        statistics.median(seconds),
        float(metrics["loss"]),
        float(tested["accuracy"]),
    )


def main() -> None:
    training, test = load_data()
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--gpus", action="store_true", help="all GPUs, in place of eight devices of the host")
    add("--epochs", type=integer(1), default=8, metavar="N", help="passes over the images")
    size = integer(1, len(training[0]))
    add("--batch-size", type=size, default=128, metavar="N", help="images a step, of all devices")
    options = parser.parse_args()

    if not options.gpus:  # before JAX starts
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices("gpu" if options.gpus else "cpu")
    if options.batch_size % len(devices):
        parser.error(f"argument --batch-size: there are {len(devices)} devices to share a batch")
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)

    steps = options.epochs * (len(training[0]) // options.batch_size)
    runs = {}
    with tqdm(total=len(FORMS) * steps, unit="step") as bar:
        for name in FORMS:
            bar.set_postfix({"form": name})
            runs[name] = train(name, mesh, options.epochs, options.batch_size, training, test, bar)

    print(f"{len(devices)} devices ({devices[0].device_kind}), {steps} steps of each form")
    print("form              bytes a device   ms a step   last loss   test accuracy")
    for name, run in runs.items():
        print(
            f"{name:16}  {run.bytes_per_device:14,}  {1e3 * run.seconds:10.2f}  "
            f"{run.loss:10.4f}  {run.accuracy:14.4f}"
        )


if __name__ == "__main__":
    main()
