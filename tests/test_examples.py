"""The examples train: with every optimizer, on every backend, in float16, and in every library."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
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
    return last_number(result, "test accuracy")


@pytest.mark.parametrize("optimizer", ["adamw", "lars"])
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


def test_devices_share_a_state_and_learn_the_same(tmp_path):
    result = run_script("examples/data_parallel.py", "--epochs", "2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "step/s" in result.stderr
    assert result.stdout.startswith("8 devices (cpu), 22 steps of each form\n")
    row = r"^(\w.*?)  +([\d,]+) +([\d.]+) +([\d.]+) +([01]\.\d{4})$"
    rows = {
        name: [float(x.replace(",", "")) for x in numbers]
        for name, *numbers in re.findall(row, result.stdout, re.MULTILINE)
    }
    assert rows.keys() == {"replicated", "zero1", "zero1, shard_map"}
    stored, _, loss, accuracy = rows["replicated"]
    assert accuracy > 0.5
    for name in rows.keys() - {"replicated"}:
        # Besides an eighth, a line more of each of 11 leaves, and what is not cut.
        assert stored / 8 < rows[name][0] < stored / 8 + 3 * 11 * 128 + 2048
        assert rows[name][2] == pytest.approx(loss, abs=1e-3)
        assert rows[name][3] == pytest.approx(accuracy, abs=1.5 / 360)


@pytest.mark.parametrize(
    ("script", "epochs", "said"),
    [
        ("flax_linen.py", "3", "buffers of the state: 6\n"),
        ("flax_nnx.py", "3", "buffers of the state, moments included: 8\n"),
        ("equinox_mlp.py", "5", "8 trained leaves, 42,634 parameters\n"),
    ],
    ids=["linen", "nnx", "equinox"],
)
def test_digits_are_learned_in_other_libraries(script, epochs, said, tmp_path):
    result = run_script(f"examples/{script}", "--epochs", epochs, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "step/s" in result.stderr
    assert said in result.stdout
    assert last_number(result, "test accuracy") > 0.85


def test_a_gpt_learns_to_write(tmp_path):
    arguments = ("--steps", "60", "--sample", "20", "--plot", "gpt.png")
    result = run_script("examples/train_gpt.py", *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "step/s" in result.stderr
    assert "computed in bfloat16, float32" in result.stdout
    assert (tmp_path / "gpt.png").read_bytes().startswith(PNG)
    written = re.search(r"^--- and might go on\n(.{20})\n---$", result.stdout, re.M | re.DOTALL)
    assert written is not None
    by_frequency = re.search(r"^guessing by frequency: ([\d.]+)$", result.stdout, re.MULTILINE)
    assert by_frequency is not None
    # 600 steps reach half of it.
    assert last_number(result, "validation loss") < float(by_frequency[1])


def test_policies_of_many_seeds_and_learning_rates_learn_at_once(tmp_path):
    arguments = ("--updates", "70", "--seeds", "2", "--learning-rates", "1e-6", "3e-3")
    result = run_script("examples/rl_seeds.py", *arguments, "--plot", "seeds.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("4 policies, 70 updates each: ")
    assert (tmp_path / "seeds.png").read_bytes().startswith(PNG)
    row = r"^ +(\S+) +([\d.]+) +([\d.]+) +([\d.]+)$"
    rows = {rate: float(mean) for rate, mean, *_ in re.findall(row, result.stdout, re.MULTILINE)}
    assert rows.keys() == {"1e-06", "0.003"}
    # Pushing at random, the pole falls after 22 steps or so.
    assert 15 < rows["1e-06"] < 35
    assert rows["0.003"] > 60


def test_a_run_that_was_stopped_ends_as_if_it_was_not(tmp_path):
    result = run_script("examples/resume.py", "--epochs", "4", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    pattern = (
        r"^stopped after step (\d+) of 44\nresumed from step (\d+)\nbit for bit as in one go: True$"
    )
    steps = re.search(pattern, result.stdout, re.MULTILINE)
    assert steps is not None
    assert 0 < int(steps[2]) < int(steps[1]) < 44
    assert last_number(result, "test accuracy") > 0.5


def test_a_run_switches_from_optax_and_back(tmp_path):
    result = run_script("examples/migrate_from_optax.py", "--epochs", "6", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    moved = re.search(r"^the largest change of .*: ([\d.e-]+)$", result.stdout, re.MULTILINE)
    assert moved is not None
    pattern = r"^(.*): the largest difference to optax all the way: ([\d.e+-]+)$"
    far = {name: float(x) for name, x in re.findall(pattern, result.stdout, re.MULTILINE)}
    assert far.keys() == {"switched", "switched and back"}
    assert max(far.values()) < 1e-3 * float(moved[1])
    assert last_number(result, "test accuracy, switched and back") > 0.8


def last_number(result: subprocess.CompletedProcess[str], name: str) -> float:
    """What the last line says."""
    last = re.fullmatch(rf"{name}: (\d\.\d+)", result.stdout.splitlines()[-1])
    assert last is not None
    return float(last[1])


@pytest.fixture
def module(monkeypatch):
    """Imports an example."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


@pytest.fixture
def example(module):
    """The example as a module."""
    return module("train_digits")


def test_a_gpt_looks_at_what_was_before(module):
    net = module("gpt_net")
    model = net.GPT(net.Size(layers=1, heads=2, width=8, context=6), vocabulary=5)
    tokens = jnp.asarray([[0, 1, 2, 3, 4, 0]])
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    apply = jax.jit(model.apply)
    before, after = apply(variables, tokens), apply(variables, tokens.at[0, 3].set(1))
    assert before.shape == (1, 6, 5)
    np.testing.assert_array_equal(before[0, :3], after[0, :3])
    assert np.all(np.any(before[0, 3:] != after[0, 3:], axis=-1))
    # The residuals of a layer, 0.02 / √2; all others 0.02.
    deviation = float(variables["params"]["h_0"]["mlp_out"]["kernel"].std())
    assert deviation == pytest.approx(0.02 / 2**0.5, rel=0.15)


def test_the_text_is_all_of_the_help_and_windows_are_pieces_of_it(module):
    gpt_text = module("gpt_text")
    text = gpt_text.load_text()
    whole = text.decode(np.concatenate([text.training, text.validation]))
    wanted = "\n\n".join(topics[name] for name in sorted(topics))
    assert whole == wanted.encode("ascii", "ignore").decode()
    assert len(text.validation) == pytest.approx(len(whole) / 10, abs=1)
    tokens = np.arange(5, dtype=np.int32)
    windows = gpt_text.random_windows(tokens, 50, 3, np.random.default_rng(0))
    assert set(map(tuple, windows.tolist())) == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}


def test_the_pole_falls_by_its_equation_of_motion(module):
    rl_seeds = module("rl_seeds")
    state = np.asarray([0.1, -0.2, 0.15, 0.3])
    cart = rl_seeds.CartPole(jnp.asarray(state, jnp.float32), jnp.int32(4))
    _, velocity, angle, turning = state
    # Two equations for the accelerations of cart and pole: (M + m) a + m l α cos = F + m l ω² sin,
    # and m l a cos + (4/3) m l² α = m g l sin; m = 0.1, M = 1, l = 0.5.
    matrix = [[1.1, 0.05 * np.cos(angle)], [0.05 * np.cos(angle), 0.1 / 3]]
    sides = [-10 + 0.05 * turning**2 * np.sin(angle), 0.1 * 9.8 * 0.5 * np.sin(angle)]
    accelerated, turned = np.linalg.solve(matrix, sides)
    moved, fallen = rl_seeds.advance(cart, jnp.int32(0))
    wanted = state + 0.02 * np.asarray([velocity, accelerated, turning, turned])
    np.testing.assert_allclose(moved.state, wanted, rtol=1e-5)
    assert (int(moved.steps), bool(fallen)) == (5, False)
    tilted = cart._replace(state=jnp.asarray([0.0, 0.0, 0.21, 1.0]))
    assert rl_seeds.advance(tilted, jnp.int32(1))[1]


def test_advantages_are_sums_of_later_surprises(module):
    rl_seeds = module("rl_seeds")
    rng = np.random.default_rng(0)
    shape = 6, rl_seeds.ENVIRONMENTS
    value, next_value = rng.normal(size=(2, *shape)).astype(np.float32)
    ended = rng.random(shape) < 0.3
    unused = np.zeros(shape)
    seen = rl_seeds.Seen(unused, unused, value, next_value, ended, unused)
    surprise = 0.01 + 0.99 * next_value - value
    wanted = np.zeros(shape)
    for first in range(6):
        weight = np.ones(shape[1])
        for step in range(first, 6):
            wanted[first] += weight * surprise[step]
            weight = weight * 0.99 * 0.95 * ~ended[step]
    np.testing.assert_allclose(rl_seeds.advantages(seen), wanted, rtol=1e-4, atol=1e-5)


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
