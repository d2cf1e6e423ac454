"""The benchmarks run, and count our launches right; what they measure here means nothing."""

import json

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
