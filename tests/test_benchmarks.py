"""The benchmarks run, and count our launches right; what they measure here means nothing."""

import json

import numpy as np
import pytest
from conftest import NATIVE
from scripts import run_script


def run_benchmark(name, *arguments, cwd):
    """The rows that a benchmark writes."""
    result = run_script(f"benchmarks/{name}", *arguments, "--json", "rows.json", cwd=cwd)
    assert result.returncode == 0, result.stderr
    written = json.loads((cwd / "rows.json").read_text())
    assert {"device", "jax", "jaxlib", "optax", "command"} <= written["machine"].keys()
    for row in written["rows"]:
        assert row["side"] in result.stdout
    return written["rows"]


def test_the_pipeline_is_three_launches_at_most(tmp_path):
    rows = run_benchmark("bench_pipeline.py", "--quick", cwd=tmp_path)
    assert [row["bytes_per_parameter"] for row in rows] == [28, 32, 32, 40, 36, 32]
    ours, optax = rows[:-1], rows[-1]
    assert [row["launches"] for row in ours] == ([2, 3, 3, 3, 3] if NATIVE else [0] * 5)
    assert optax["launches"] is None
    assert optax["ratio_to_optax"] == 1
    for row in rows:
        assert row["step_us"] > 0
        moved = row["bytes_per_parameter"] * row["parameters"]
        fraction = moved / (row["step_us"] * 1e-6) / (row["copy_gb_per_s"] * 1e9)
        assert row["copy_fraction"] == pytest.approx(fraction)


def test_the_update_alone_runs(tmp_path):
    arguments = ("--models", "mlp", "--steps", "2", "--rounds", "2")
    rows = run_benchmark("bench_update.py", *arguments, cwd=tmp_path)
    assert [row["bytes_per_parameter"] for row in rows] == [28, 28, 32, 26, 28]


def test_trust_ratios_are_five_launches_at_most(tmp_path):
    rows = run_benchmark("bench_trust.py", "--quick", cwd=tmp_path)
    assert [row["side"] for row in rows if row["launches"] is None] == [
        "optax: lars",
        "optax: lamb",
        "optax: lion",
    ]
    ours = [row for row in rows if row["launches"] is not None]
    assert [row["bytes_per_parameter"] for row in ours] == [28, 48, 24]
    assert [row["launches"] for row in ours] == ([3, 5, 3] if NATIVE else [0] * 3)


def test_the_host_time_of_a_call_is_measured(tmp_path):
    arguments = ("--models", "mlp", "--seeds", "2", "--rounds", "4")
    rows = run_benchmark("bench_host.py", *arguments, cwd=tmp_path)
    assert [row["model"] for row in rows] == ["mlp"] * 3 + ["mlp of 2 seeds"] * 3


@pytest.fixture
def _compile_fast(monkeypatch):
    """XLA takes most of the time of a few small steps."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.mark.usefixtures("_compile_fast")
def test_train_steps_of_linen_and_nnx_lose_alike(tmp_path):
    models = "mlp,resnet50_32,gpt2,nnx_resnet50_32"
    arguments = ("--quick", "--models", models, "--sides", "ours,optax")
    rows = run_benchmark("bench_train.py", *arguments, cwd=tmp_path)
    assert [row["model"] for row in rows[::2]] == [f"{name}, small" for name in models.split(",")]
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert (ours["side"], theirs["side"]) == ("ours", "optax")
        assert ours["buffers"] < theirs["buffers"]
        assert min(ours["compile_s"], ours["peak_mib"], ours["host_us"]) > 0
        ratio = theirs["step_us"] / ours["step_us"]
        assert (ours["ratio_to_optax"], theirs["ratio_to_optax"]) == (pytest.approx(ratio), 1)
        assert len(ours["losses"]) == len(theirs["losses"]) == 8
        np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=2e-3)
        assert min(theirs["losses"][4:]) < theirs["losses"][0]  # batches come again after four
        gap = max(abs(a / b - 1) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
        assert ours["loss_difference"] == pytest.approx(gap)


@pytest.mark.usefixtures("_compile_fast")
def test_a_train_step_may_keep_its_leaves(tmp_path):
    arguments = ("--quick", "--models", "mlp", "--sides", "drop-in,optax")
    drop_in, optax = run_benchmark("bench_train.py", *arguments, cwd=tmp_path)
    assert drop_in["side"] == "drop-in"
    np.testing.assert_allclose(drop_in["losses"], optax["losses"], rtol=1e-5)
