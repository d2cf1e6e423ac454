"""The bench command: its rows, its ties, its errors.

What it measures here means nothing; seconds are compared with nothing.
"""

import importlib.util
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import NATIVE
from scripts import run_python

from jaxrenaissance.__main__ import main
from jaxrenaissance.bench import command
from jaxrenaissance.bench.columns import bench_lines
from jaxrenaissance.bench.data import POOL, random_tree, random_values, shapes_of
from jaxrenaissance.bench.kinds import KINDS
from jaxrenaissance.bench.libraries import contestants, fits
from jaxrenaissance.bench.run import ratio_columns, steps_in_a_loop
from jaxrenaissance.bench.sides import looped, optax_step
from jaxrenaissance.bench.timing import Seconds

WORDS = ("model", "optimizer", "library", "backend", "device")
NUMBERS = ("call_us", "host_us", "device_us", "bytes_per_parameter", "copy_fraction", "compile_s")
NUMBERS += ("peak_mib", "ratio_to_optax")


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """What `bench --quick` of a small model prints, the rows it writes, and where."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = "-m jaxrenaissance bench --quick --model mlp --optimizer adamw,lars --against optax"
    files = "--json rows.json --plot bars.png"
    result = run_python("-W", "error", *arguments.split(), *files.split(), cwd=folder)
    assert result.returncode == 0, result.stderr
    return result, json.loads((folder / "rows.json").read_text()), folder


def test_rows_have_all_keys_and_positive_numbers(quick_run):
    _, rows, _ = quick_run
    assert [(row["optimizer"], row["library"], row["variant"]) for row in rows] == [
        (optimizer, library, variant)
        for optimizer in ("adamw", "lars")
        for library, variant in (
            ("jaxrenaissance", ""),
            ("jaxrenaissance", "skip_nonfinite=False"),
            ("optax", ""),
        )
    ]
    for row in rows:
        assert {*WORDS, *NUMBERS, "launches"} <= row.keys()
        assert all(row[key] for key in WORDS)
        assert all(row[key] > 0 for key in NUMBERS), row
        moved = row["bytes_per_parameter"] * row["parameters"]
        rate = moved / (row["device_us"] * 1e-6)
        assert row["copy_fraction"] == pytest.approx(rate / (row["copy_gb_per_s"] * 1e9))
        assert row["versions"]["jax"] == jax.__version__
        assert row["command"].startswith("python -m jaxrenaissance bench --quick --model mlp ")
    assert [row["bytes_per_parameter"] for row in rows] == [32, 28, 28, 28, 28, 28]


def test_launches_are_ours_alone(quick_run):
    _, rows, _ = quick_run
    expected = [3, 2, None, 3, 3, None] if NATIVE else [None] * 6
    assert [row["launches"] for row in rows] == expected
    for row in rows:
        assert (row["backend"] == "xla") == (row["launches"] is None)


def test_ratios_and_ties_are_those_of_the_times(quick_run):
    _, rows, _ = quick_run
    for *ours, optax in (rows[:3], rows[3:]):
        assert (optax["ratio_to_optax"], optax["tie"]) == (1, False)
        for part, prefix in (("call", ""), ("device", "device_")):
            theirs, their_spread = optax[f"{part}_us"], optax[f"{part}_spread_us"]
            for row in ours:
                time, spread = row[f"{part}_us"], row[f"{part}_spread_us"]
                assert row[f"{prefix}ratio_to_optax"] == pytest.approx(theirs / time)
                assert row[f"{prefix}tie"] == (abs(time - theirs) <= spread + their_spread)


def test_the_table_has_a_line_a_row_and_the_plot_is_drawn(quick_run):
    result, rows, folder = quick_run
    lines = result.stdout.splitlines()
    assert rows[0]["device"] in lines[0]
    for line, cells in zip(lines[1:], bench_lines(rows), strict=False):
        assert line.split() == " ".join(cells).split()
    assert (folder / "bars.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio", "tie"),
    [
        (Seconds(1.0, 0.1), Seconds(2.0, 0.1), 2.0, False),
        (Seconds(2.0, 0.1), Seconds(1.0, 0.1), 0.5, False),
        (Seconds(1.0, 0.1), Seconds(1.25, 0.1), 1.25, False),
        (Seconds(1.0, 0.1), Seconds(1.25, 0.2), 1.25, True),
        (Seconds(1.25, 0.2), Seconds(1.0, 0.1), 0.8, True),
        (Seconds(1.0, 0.0), Seconds(1.0, 0.0), 1.0, True),
        (Seconds(1.0, 0.0), None, None, None),
        (None, Seconds(1.0, 0.0), None, None),
    ],
)
def test_a_ratio_within_the_spreads_is_a_tie(ours, theirs, ratio, tie):
    assert ratio_columns("", ours, theirs) == {"ratio_to_optax": ratio, "tie": tie}


def test_a_loop_has_an_even_number_of_steps_within_bounds():
    for call in (1e-7, 1e-3, 3.3e-3, 0.1, 10.0):
        steps = steps_in_a_loop(Seconds(call, 0.0), 0.05)
        assert steps % 2 == 0
        assert 4 <= steps <= 100
    assert steps_in_a_loop(Seconds(1e-3, 0.0), 0.05) == 50


@pytest.mark.parametrize("optimizer", KINDS)
def test_steps_in_a_loop_are_the_same_as_calls(optimizer):
    for alone, in_a_loop in zip(
        contestants(shapes_of("3x100"), KINDS[optimizer], ["optax"]),
        contestants(shapes_of("3x100"), KINDS[optimizer], ["optax"]),
        strict=True,
    ):
        for _ in range(4):
            alone.side()
        loop = in_a_loop.side.loop(4)
        assert loop is not None
        loop()
        for a, b in zip(
            jax.tree.leaves(alone.side.state), jax.tree.leaves(in_a_loop.side.state), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_xla_makes_no_single_pass_of_two_steps():
    optimizer = KINDS["sgd"].optax()
    params = random_tree(shapes_of("1x1000"), 0, 0.1)
    state = (params, optimizer.init(params))
    program = looped(optax_step(optimizer), 4).lower(state, params).compile().as_text()
    fusions = program.split("\n\n")
    updates = [text for text in fusions if "f32[1000]{0} add(" in text]
    assert updates
    for text in updates:
        assert text.count("f32[1000]{0} add(") == 1


def test_models_of_equal_leaves():
    assert [leaf.shape for leaf in jax.tree.leaves(shapes_of("3x25e2"))] == [(2500,)] * 3
    assert len(jax.tree.leaves(shapes_of("resnet50"))) == 161


def test_values_are_random_and_large_arrays_repeat_them():
    values = random_values(POOL + 5)
    assert np.count_nonzero(values) == values.size
    np.testing.assert_array_equal(values[POOL:], values[:5])
    assert values.std() == pytest.approx(1, rel=0.01)
    leaves = jax.tree.leaves(random_tree(shapes_of("2x100"), 0, 0.1))
    assert not jnp.array_equal(*leaves)


def test_what_does_not_fit_is_seen():
    assert fits(10**6, ["optax"])
    assert not fits(10**13, [])


def error(capsys, *arguments):
    """What a command that fails says."""
    assert main(["bench", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize("model", ["mpl", "3x", "0x10", "10x0", "3x1e-2", "mlp,"])
def test_an_unknown_model_is_an_error(capsys, model):
    message = error(capsys, "--model", model)
    assert "expected mlp, resnet50, gpt2, many2000, or leaves and their size" in message
    assert repr(model.split(",")[-1]) in message


def test_unknown_optimizers_and_libraries_are_errors(capsys):
    assert "--optimizer: expected some of sgd, momentum," in error(capsys, "--optimizer", "adan")
    assert "got 'apex'" in error(capsys, "--against", "optax,apex")


def test_nothing_to_measure_is_an_error(capsys):
    message = error(capsys, "--against", "optax", "--model", "1x1e13")
    assert "1x1e13 does not fit into memory: left out" in message
    assert "nothing is left to measure" in message


@pytest.fixture
def _environment_stays(monkeypatch):
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.mark.usefixtures("_environment_stays")
def test_torch_is_an_error_only_where_it_was_asked_for(capsys, monkeypatch):
    monkeypatch.setattr(command, "why_not_torch", lambda: "torch is not installed")
    assert "--against: torch is not installed" in error(capsys, "--against", "torch")
    assert "torch is not installed: left out" in error(capsys, "--model", "1x1e13")


def test_a_plot_without_matplotlib_names_the_extra(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    message = error(capsys, "--plot", "x.png")
    assert "--plot needs matplotlib: pip install 'jaxrenaissance[plots]'" in message


def test_a_plot_of_unknown_format_is_an_error(capsys):
    message = error(capsys, "--plot", "x.txt")
    assert "--plot: expected a file that ends in" in message
    assert ".png" in message
    assert "got 'x.txt'" in message


def test_torch_takes_part_where_it_is_installed():
    pytest.importorskip("torch")
    entered = contestants(shapes_of("3x100"), KINDS["adamw"], ["torch"])
    torch_sides = [entry for entry in entered if entry.library == "torch"]
    variants = [entry.variant for entry in torch_sides]
    on_gpu = jax.default_backend() == "gpu"
    assert variants == ["fused", "foreach"] + ["fused, CUDA graph"] * on_gpu
    jax.block_until_ready([entry.side() for entry in torch_sides])
    assert [entry.bytes_per_parameter for entry in torch_sides] == [28] * len(torch_sides)
