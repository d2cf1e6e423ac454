"""A program of one of several processes that train together; test_processes.py starts them.

    python process_worker.py ADDRESS PROCESS FOLDER FORM,FORM STEP OTHER

A state after each step goes to the folder. After STEP, if it is not 0, the process of
number OTHER kills itself.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxrenaissance as jr

PROCESSES, DEVICES = 2, 2
"""Processes, and devices of each."""

STEPS, BATCH = 4, 16

HEARTBEAT = 10
"""Seconds after which a process that says nothing is taken for dead."""

TIMEOUT = 180
"""Seconds within which all have ended, one way or the other."""


def initial_params():
    """Of the host: a leaf that no four devices share evenly, and one smaller than they are many."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (7, 45), "bias": (45,), "scale": (3,)}
    return {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def batch(step):
    """Of all processes together."""
    rng = np.random.default_rng(step)
    return rng.normal(size=(BATCH, 7)).astype(np.float32)


def loss_fn(params, x):
    out = jnp.tanh(x @ params["kernel"] + params["bias"])
    return jnp.mean((out.reshape(len(x), -1, 3) * params["scale"] - 1) ** 2)


def make_state(form, mesh):
    optimizer = jr.adamw(0.03, mask="weights", weight_decay=0.1, max_norm=0.05, ema_decay=0.9)
    over = {} if mesh is None else {"mesh": mesh, "sharding": form}
    return jr.TrainState.create(initial_params(), optimizer, **over)


def train_step(state, x):
    loss, grads = jax.value_and_grad(loss_fn)(state.compute_params, x)
    state = state.apply_gradients(grads)
    return state, {"loss": loss, "grad_norm": state.metrics["grad_norm"]}


def step_of_each_device(state, mesh):
    def local_step(state, x):
        state, metrics = train_step(state, x)
        return state, metrics | {"loss": jax.lax.pmean(metrics["loss"], "data")}

    specs = state.partition_specs
    return jax.shard_map(
        local_step,
        mesh=mesh,
        in_specs=(specs, PartitionSpec("data")),
        out_specs=(specs, PartitionSpec()),
    )


def save(path, state):
    """All processes put the state together, and the first writes it."""
    leaves = traverse_util.flatten_dict(state.to_leaves(host=True), sep="/")
    if jax.process_index() == 0:
        part = path.with_name(f"part_of_{path.name}")
        np.savez(part, **leaves)
        part.rename(path)


def train(form, mesh, folder, dies_at, dies):
    state = make_state(form.removesuffix("-mapped"), mesh)
    step = step_of_each_device(state, mesh) if form.endswith("-mapped") else train_step
    step = jax.jit(step, donate_argnums=0)
    over_devices = NamedSharding(mesh, PartitionSpec("data"))
    for i in range(1, STEPS + 1):
        own = np.split(batch(i), PROCESSES)[jax.process_index()]
        state, metrics = step(state, jax.make_array_from_process_local_data(over_devices, own))
        jr.check(state)
        print("step", form, i, *(float(x).hex() for x in metrics.values()), flush=True)
        if i == dies_at and jax.process_index() == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        save(folder / f"{form}_{i}.npz", state)
    print(state)


def try_local_arrays(mesh):
    """What a process has by itself goes to all devices, and what lies on all to no host."""
    params = jax.device_put(initial_params(), jax.local_devices()[1])
    extra = {"key": jax.random.key(7)}
    state = jr.TrainState.create(params, jr.sgd(1.0), extra=extra, mesh=mesh, sharding="zero1")
    for name, x in state.params.items():
        np.testing.assert_array_equal(x, params[name])
    assert jax.random.key_data(state.extra["key"]).tolist() == [0, 7]

    leaf = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, PartitionSpec("data")))
    state = jr.TrainState.create(leaf, jr.sgd(1.0), mesh=mesh, sharding="leaves")
    with pytest.raises(ValueError, match="global arrays, which Orbax writes"):
        state.to_leaves(host=True)
    assert state.to_leaves()["params"].sharding == leaf.sharding


def main():
    address, process, folder, forms, dies_at, dies = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        PROCESSES,
        int(process),
        initialization_timeout=TIMEOUT,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=60,  # busy processes end one after the other
    )
    assert (jax.device_count(), jax.local_device_count()) == (PROCESSES * DEVICES, DEVICES)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    if not int(dies_at):
        try_local_arrays(mesh)
    for form in forms.split(","):
        train(form, mesh, Path(folder), int(dies_at), int(dies))


if __name__ == "__main__":
    main()
