"""Several processes, each with devices of its own, train one state; one of them dies."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import process_worker as worker
import pytest
from flax import traverse_util
from jax.sharding import AxisType
from scripts import ROOT, environment

import jaxrenaissance as jr

FORMS = ["replicated", "zero1", "zero1-mapped"]


@contextlib.contextmanager
def started(folder, forms, dies_at=0, dies=0):
    """The processes of a job; whatever happens, none is left."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = []
    try:
        for i in range(worker.PROCESSES):
            arguments = [address, i, folder, ",".join(forms), dies_at, dies]
            with open(folder / f"{i}.out", "w") as out, open(folder / f"{i}.err", "w") as err:
                program = [sys.executable, ROOT / "tests" / "process_worker.py", *arguments]
                command = [*map(str, program)]
                processes.append(
                    subprocess.Popen(command, env=environment(), stdout=out, stderr=err)
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait(processes, folder):
    """Their exit codes; an error with what they have said where one does not end in time."""
    deadline = time.monotonic() + worker.TIMEOUT
    try:
        return [process.wait(max(0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        said = [(folder / f"{i}.err").read_text()[-2000:] for i in range(len(processes))]
        pytest.fail("\n".join(["a process does not end", *said]))


def steps(folder, process):
    """The lines of a process that say what a step gave, by form: [steps, (loss, norm)]."""
    lines = re.findall(
        r"^step (\S+) \d+ (\S+) (\S+)$", (folder / f"{process}.out").read_text(), re.M
    )
    return {
        form: np.array([[*map(float.fromhex, x)] for own, *x in lines if own == form])
        for form in dict.fromkeys(form for form, *_ in lines)
    }


@pytest.fixture(scope="module")
def on_one_device():
    """A state after each step, and losses and norms, of one process and device."""
    states, numbers = [], []
    with jax.default_device(jax.devices("cpu")[0]):
        step, state = jax.jit(worker.train_step), worker.make_state("replicated", None)
        for i in range(1, worker.STEPS + 2):
            state, metrics = step(state, worker.batch(i))
            states.append(state)
            numbers.append([float(x) for x in metrics.values()])
    return states, np.array(numbers)


def mesh_of(devices):
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def flat(state):
    return traverse_util.flatten_dict(state.to_leaves(host=True), sep="/")


def assert_close(state, wanted):
    got, wanted = flat(state), flat(wanted)
    assert got.keys() == wanted.keys()
    for path, x in wanted.items():
        np.testing.assert_allclose(got[path], x, rtol=1e-4, atol=1e-5, err_msg=path)


def restore_and_train(path, mesh, form, number, states):
    """A checkpoint of a step goes on, on other devices, as the run on one device does."""
    with np.load(path) as saved:
        leaves = dict(saved)
    state = jr.TrainState.from_leaves(leaves, like=worker.make_state(form, mesh))
    for name, x in flat(state).items():
        np.testing.assert_array_equal(x, leaves[name], err_msg=name)
    state, _ = jax.jit(worker.train_step)(state, worker.batch(number + 1))
    assert_close(state, states[number])


def test_processes_train_one_state_and_it_goes_on_elsewhere(tmp_path, host_devices, on_one_device):
    states, numbers = on_one_device
    with started(tmp_path, FORMS) as processes:
        codes = wait(processes, tmp_path)
    errors = [(tmp_path / f"{i}.err").read_text() for i in range(len(codes))]
    assert codes == [0] * worker.PROCESSES, errors
    seen = [steps(tmp_path, i) for i in range(worker.PROCESSES)]
    for form in FORMS:
        np.testing.assert_allclose(seen[0][form], numbers[: worker.STEPS], rtol=1e-4)
        for other in seen[1:]:  # bit for bit, also the norms of what no process has as a whole
            np.testing.assert_array_equal(other[form], seen[0][form])
    assert "zero1 over 4 devices" in (tmp_path / "0.out").read_text()
    assert f"step {worker.STEPS}, skipped 0" in (tmp_path / "0.out").read_text()
    for form, count in (("replicated", 8), ("zero1", 2), ("zero1-mapped", 1)):
        path = tmp_path / f"{form}_{worker.STEPS}.npz"
        restore_and_train(path, mesh_of(host_devices[:count]), "zero1", worker.STEPS, states)
    path = tmp_path / f"zero1_{worker.STEPS}.npz"
    restore_and_train(path, None, "replicated", worker.STEPS, states)


@pytest.mark.parametrize("dies", range(worker.PROCESSES), ids=["coordinator", "other"])
def test_a_process_that_dies_ends_the_job_and_fewer_devices_go_on(
    dies, tmp_path, host_devices, on_one_device
):
    with started(tmp_path, ["zero1"], dies_at=3, dies=dies) as processes:
        codes = wait(processes, tmp_path)
    assert codes.pop(dies) == -signal.SIGKILL
    assert all(code != 0 for code in codes)
    said = (tmp_path / f"{1 - dies}.err").read_text()
    assert "Terminating process because the JAX distributed service detected fatal errors" in said
    assert len(steps(tmp_path, dies)["zero1"]) == 3
    assert not (tmp_path / "zero1_3.npz").exists()
    restore_and_train(
        tmp_path / "zero1_2.npz", mesh_of(host_devices[:2]), "zero1", 2, on_one_device[0]
    )
