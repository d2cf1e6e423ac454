"""The example trains with every optimizer and on every backend."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PNG = b"\x89PNG\r\n\x1a\n"


def run_example(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # The checkout's package, as in the tests; a GPU's memory is mostly taken by the tests' process.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    environment.pop("XLA_FLAGS", None)  # the several host devices are for the tests
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_digits.py"), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )


def check_output(result: subprocess.CompletedProcess[str], plot: Path) -> float:
    """The accuracy, once all else that a run leaves is as it should be."""
    assert result.returncode == 0, result.stderr
    assert "W_FIRST_CONV" in result.stdout
    assert re.search(r"^time per step: \d+\.\d\d ms ", result.stdout, re.MULTILINE)
    assert "step/s" in result.stderr
    assert plot.read_bytes().startswith(PNG)
    last = re.fullmatch(r"test accuracy: ([01]\.\d{4})", result.stdout.splitlines()[-1])
    assert last is not None
    return float(last[1])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_digits_are_learned_by_every_optimizer_with_its_defaults(optimizer, tmp_path):
    result = run_example("--optimizer", optimizer, cwd=tmp_path)
    assert check_output(result, tmp_path / "train_digits.png") >= 0.97


def test_digits_train_on_every_backend(backend, tmp_path):
    plot = tmp_path / "two.png"
    arguments = ("--backend", backend, "--epochs", "2", "--batch-size", "128", "--seed", "1")
    result = run_example(*arguments, "--plot", str(plot), cwd=tmp_path)
    assert check_output(result, plot) > 0.5


@pytest.fixture
def example(monkeypatch):
    """The example as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("train_digits")


def test_a_nan_in_an_image_changes_neither_weights_nor_batch_statistics(example, tmp_path):
    options = example.Options("adamw", "auto", 1, 8, None, 0, tmp_path / "plot.png")
    state = example.initial_state(options, num_steps=10)
    images, labels = np.zeros((8, 8, 8, 1), np.float32), np.zeros(8, np.int32)
    state, _ = example.train_step(state, images, labels)
    before = jax.device_get((state.params, state.extra.tree))
    images[3, 4, 5, 0] = np.nan
    state, _ = example.train_step(state, images, labels)
    assert (state.step, state.skipped) == (1, 1)
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.extra.tree))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--optimizer", "rprop"), "argument --optimizer: invalid choice: 'rprop'"),
        (("--backend", "tpu"), "argument --backend: invalid choice: 'tpu'"),
        (("--epochs", "0"), "argument --epochs: expected 1 or more, got 0"),
        (("--batch-size", "1438"), "argument --batch-size: expected 1 to 1437, got 1438"),
        (("--learning-rate", "nan"), "argument --learning-rate: expected a positive number"),
        (("--plot", "nowhere/a.png"), "argument --plot: there is no folder nowhere"),
    ],
)
def test_bad_options_end_with_a_message(arguments, message, example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *arguments])
    with pytest.raises(SystemExit) as info:
        example.main()
    assert info.value.code == 2
    assert message in capsys.readouterr().err
