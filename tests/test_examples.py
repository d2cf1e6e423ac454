"""The examples train: with every optimizer, on every backend, and in float16."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from scripts import ROOT, run_script

PNG = b"\x89PNG\r\n\x1a\n"


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


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "lars", "lamb"])
def test_digits_are_learned_by_optimizers_with_their_defaults(optimizer, tmp_path):
    result = run_script("examples/train_digits.py", "--optimizer", optimizer, cwd=tmp_path)
    assert check_output(result, tmp_path / "train_digits.png") >= 0.97


def test_digits_train_on_every_backend(backend, tmp_path):
    plot = tmp_path / "two.png"
    arguments = ("--backend", backend, "--epochs", "2", "--batch-size", "128", "--seed", "1")
    result = run_script("examples/train_digits.py", *arguments, "--plot", str(plot), cwd=tmp_path)
    assert check_output(result, plot) > 0.5


def test_digits_are_learned_in_float16_and_survive_an_overflow(tmp_path):
    arguments = ("--compute-dtype", "float16", "--loss-scale", "dynamic", "--max-norm", "1")
    overflow = ("--ema-decay", "0.98", "--inject-overflow", "100")
    result = run_script("examples/train_digits.py", *arguments, *overflow, cwd=tmp_path)
    # What float32 reaches, less two of the 360 images.
    assert check_output(result, tmp_path / "train_digits.png") >= 0.985
    lines = [line for line in result.stdout.splitlines() if "the overflow: " in line]
    before, after = ([float(x) for x in re.findall(r" (\d[\d.e+]*)", line)] for line in lines)
    # Updates, skipped ones, the loss scale and compilations.
    assert after == [before[0], before[1] + 1, before[2] / 2, before[3]]
    assert before[0] + before[1] == 99


def test_digits_train_with_several_batches_an_update(tmp_path):
    arguments = ("--accumulate", "3", "--epochs", "3", "--inject-overflow", "2")
    result = run_script("examples/train_digits.py", *arguments, cwd=tmp_path)
    assert check_output(result, tmp_path / "train_digits.png") > 0.5
    assert "before the overflow: updates 1, skipped 0, loss scale 1, " in result.stdout
    assert " after the overflow: updates 1, skipped 1, loss scale 1, " in result.stdout


def test_adapters_learn_what_the_frozen_base_cannot_do(tmp_path):
    result = run_script("examples/lora.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "step/s" in result.stderr
    # Six matrices of rank 8 beside kernels of 64·256, 256·256 and 256·10, and 522 biases.
    assert "parameters: 8,784 trained, 85,002 frozen in bfloat16\n" in result.stdout
    assert "the base kept its bits: True\n" in result.stdout
    accuracy = r"^test accuracy, (.*?): +([01]\.\d{4})$"
    found = {name: float(x) for name, x in re.findall(accuracy, result.stdout, re.MULTILINE)}
    assert found["upright digits"] >= 0.96
    assert found["turned digits, before"] < 0.3
    assert found["turned digits, after"] >= 0.93


def test_large_batches_are_compared(tmp_path):
    arguments = ("--epochs", "2", "--batches", "256", "--seeds", "1", "--plot", "batches.png")
    result = run_script("examples/large_batch.py", *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "epoch/s" in result.stderr
    assert (tmp_path / "batches.png").read_bytes().startswith(PNG)
    rows = re.findall(r"^ +256 +(\w+) +0\.200 +10 +([01]\.\d{3}) ", result.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == ["momentum", "lars"]
    assert all(0 < float(accuracy) < 1 for _, accuracy in rows)


@pytest.fixture
def example(monkeypatch):
    """The example as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("train_digits")


def test_a_nan_in_an_image_changes_neither_weights_nor_batch_statistics(example):
    state = example.initial_state(example.Options(batch_size=8), num_updates=10)
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
        (("--compute-dtype", "int8"), "argument --compute-dtype: invalid choice: 'int8'"),
        (("--max-norm", "0"), "argument --max-norm: expected a positive number, got 0"),
        (("--ema-decay", "1"), "argument --ema-decay: expected a number from 0 to less than 1"),
        (("--accumulate", "441"), "argument --accumulate: there are 440 steps"),
        (("--inject-overflow", "441"), "argument --inject-overflow: there are 440 updates"),
        (("--plot", "nowhere/a.png"), "argument --plot: there is no folder nowhere"),
    ],
)
def test_bad_options_end_with_a_message(arguments, message, example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *arguments])
    with pytest.raises(SystemExit) as info:
        example.main()
    assert info.value.code == 2
    assert message in capsys.readouterr().err
