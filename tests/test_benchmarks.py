"""The benchmarks run, and count our launches right; what they measure here means nothing."""

import json

import numpy as np
import pytest
from conftest import NATIVE
from scripts import ROOT, run_script


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
def _on_the_host(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


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


@pytest.mark.usefixtures("_on_the_host", "_compile_fast")
def test_the_optimizer_part_over_devices_is_two_collectives(tmp_path):
    arguments = ("--quick", "--parts", "optimizer", "--dtypes", "bfloat16", "--devices", "2")
    rows = run_benchmark("bench_sharded.py", *arguments, cwd=tmp_path)
    assert {(row["dtype"], row["devices"]) for row in rows} == {("bfloat16", 2)}
    by_side = {row["side"]: row for row in rows}
    for sums in ("float32", "bfloat16"):
        ours = by_side[f"ours zero1, {sums} sums"]
        assert ours["collectives"] == "1 all-gather, 1 reduce-scatter"
        bare, local = (by_side[f"{x}, {sums} sums"] for x in ("bare collectives", "local work"))
        rest = ours["step_us"] - local["step_us"]
        assert ours["collectives_us"] == pytest.approx(rest)
        assert ours["of_bare_rate"] == pytest.approx(bare["step_us"] / rest)
        assert by_side[f"ours replicated, {sums} sums"]["collectives"] == "1 all-reduce"
        assert by_side[f"ours replicated, {sums} sums"]["state_share"] == pytest.approx(2)
    assert ours["state_share"] == by_side["ours zero1, jit"]["state_share"] <= 1.02
    steps = {side: row for side, row in by_side.items() if "optimizer_us" in row}
    for row in steps.values():
        gradients = by_side["gradients alone"]["step_us"]
        assert row["optimizer_us"] == pytest.approx(row["step_us"] - gradients)
    ratios = [row["ratio_to_best_optax"] for side, row in steps.items() if side.startswith("optax")]
    assert max(ratios) == 1
    update = rows[-1]
    assert update["bytes_per_parameter"] == 28
    assert update["copy_fraction"] > 0


@pytest.mark.usefixtures("_on_the_host", "_compile_fast")
def test_train_steps_over_devices_lose_alike(tmp_path):
    sides = ["optax replicated", "ours zero1, jit", "ours zero1, bfloat16 sums"]
    pattern = "|".join(f"^{side}$" for side in sides)
    arguments = ("--quick", "--parts", "train", "--devices", "2", "--sides", pattern)
    rows = run_benchmark("bench_sharded.py", *arguments, cwd=tmp_path)
    assert [row["side"] for row in rows] == sides
    assert rows[0]["ratio_to_best_optax"] == 1
    for row in rows:
        np.testing.assert_allclose(row["losses"], rows[0]["losses"], rtol=2e-3)
        assert min(row["step_us"], row["state_mib"], row["collective_mib"]) > 0


def test_collectives_are_counted_in_the_text_of_a_program(monkeypatch):
    pytest.importorskip("flax")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from sharded_parts import crossing

    one = """
      %a = f32[4,8]{1,0} all-reduce(%x), to_apply=%add
      %b = (f32[8]{0}, /*index=1*/bf16[8]{0:S(1)}) all-reduce-start(%x, %y), to_apply=%add
      %c = (f32[8]{0}, bf16[8]{0}) all-reduce-done(%b)
      %d = f32[2]{0} reduce-scatter(%x), dimensions={0}
      %e = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%x), dimensions={0}
      ROOT %f = s32[4,1]{1,0} all-gather(%z), metadata={op_name="all-gather(x)"}
      %g = (bf16[2]{0}, bf16[8]{0}) all-gather-start(%z), dimensions={0}
      %h = f32[] add(%all-reduce, %b)
    """
    found = crossing(one, devices=4)
    assert found.kinds == "2 all-gather, 2 all-reduce, 2 reduce-scatter"
    assert found.nbytes == 128 + (32 + 16) + 32 + 32 + 16 + 16
    assert crossing("%a = f32[] add(%b, %c)", devices=4) == ("", 0)
