"""Tables and plots of benchmarks' rows; and that the README's say what the files say."""

import importlib.util
import json

import numpy as np
import pytest
from scripts import ROOT

from jaxrenaissance.bench import plot
from jaxrenaissance.bench.columns import bench_lines


def row(library="jaxrenaissance", **values):
    """A row as the command writes it, of made-up numbers."""
    times = {f"{part}_us": 100.0 for part in ("call", "host", "device")}
    spreads = {f"{part}_spread_us": 2.0 for part in ("call", "host", "device")}
    return {
        "model": "1x1e6",
        "optimizer": "adamw",
        "library": library,
        "variant": "",
        "backend": "cuda",
        "device": "NVIDIA H200",
        "parameters": 10**6,
        "leaves": 1,
        **times,
        **spreads,
        "launches": 3,
        "bytes_per_parameter": 32,
        "copy_fraction": 0.5,
        "copy_gb_per_s": 4000.0,
        "compile_s": 0.5,
        "peak_mib": 15.0,
        "ratio_to_optax": 1.5,
        "tie": False,
        "device_ratio_to_optax": 1.01,
        "device_tie": True,
        "versions": {"jax": "0.11.2", "optax": "0.2.8"},
        "command": "python -m jaxrenaissance",
        **values,
    }


def test_a_tie_is_called_one_in_the_table():
    headings, cells = bench_lines([row()])
    assert dict(zip(headings, cells, strict=True)) == {
        "model": "1x1e6",
        "optimizer": "adamw",
        "library": "jaxrenaissance",
        "backend": "cuda",
        "leaves": "1",
        "call, µs": "100 ± 2",
        "host, µs": "100 ± 2",
        "device, µs": "100 ± 2",
        "launches": "3",
        "bytes": "32",
        "of copy": "0.50",
        "compile, s": "0.50",
        "peak, MiB": "15.0",
        "times optax": "1.50",
        "on the device": "1.01 (tie)",
    }


def test_bandwidth_is_drawn_against_size_with_the_copy_as_a_line():
    rows = [row(parameters=10**i, copy_fraction=0.1 * i, copy_gb_per_s=1000.0) for i in (6, 7)]
    rows += [row("torch", device_us=None, copy_fraction=None, copy_gb_per_s=1000.0)]
    (axes,) = plot.bandwidth(rows).axes
    ours, copy = axes.get_lines()
    np.testing.assert_allclose(ours.get_xydata(), [(1e6, 600), (1e7, 700)])
    np.testing.assert_allclose(copy.get_xydata(), [(1e6, 1000), (1e7, 1000)])
    assert [line.get_label() for line in axes.get_lines()] == ["jaxrenaissance", "copy"]


def test_times_are_drawn_against_the_number_of_leaves():
    rows = [row("torch", device_us=None, leaves=i) for i in (1, 10)]
    rows += [row(leaves=i, device_us=10.0 * i, call_us=20.0 * i) for i in (10, 1)]
    (axes,) = plot.leaves(rows).axes
    device, torch, call = axes.get_lines()
    np.testing.assert_allclose(device.get_xydata(), [(1, 10), (10, 100)])
    np.testing.assert_allclose(call.get_xydata(), [(1, 20), (10, 200)])
    assert device.get_label() == "jaxrenaissance: device"
    assert call.get_label() == "jaxrenaissance: call"
    assert device.get_color() == call.get_color() != torch.get_color()


@pytest.fixture
def tables():
    """`benchmarks/tables.py`, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_says_what_the_files_say(tables):
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text()
    assert tables.generated(page, folder / "results") == page
    shown = {match["file"] for match in tables.BLOCK.finditer(page)}
    assert shown == {path.name for path in (folder / "results").glob("*.json")}


def test_a_stale_table_is_made_anew(tables, tmp_path):
    machine = {"device": "a", "jax": "1", "optax": "2", "command": "python x.py"}
    older = [
        {"model": "mlp", "side": "ours", "step_us": 12.34, "launches": None, "losses": [1.0]},
        {"model": "mlp", "side": "optax", "step_us": 1234.5, "launches": None, "losses": [1.0]},
        {"model": "mlp", "host_us": 5.0},
    ]
    (tmp_path / "old.json").write_text(json.dumps({"machine": machine, "rows": older}))
    (tmp_path / "new.json").write_text(json.dumps([row(launches=None)]))
    page = "<!-- table: {} -->\nstale\n<!-- end -->"
    old = tables.generated("above\n" + page.format("old.json") + "\nbelow", tmp_path)
    assert old == (
        "above\n<!-- table: old.json -->\n[old.json](results/old.json), a, jax 1, optax 2: "
        "`python x.py`\n\n| model | side | step, µs |\n| --- | --- | --- |\n"
        "| mlp | ours | 12.3 |\n| mlp | optax | 1234 |\n\n"
        "| model | host, µs |\n| --- | --- |\n| mlp | 5.0 |\n<!-- end -->\nbelow"
    )
    new = tables.generated(page.format("new.json"), tmp_path)
    assert "NVIDIA H200, jax 0.11.2, optax 0.2.8: `python -m jaxrenaissance`" in new
    assert "| 0.50 | 0.50 | 15.0 | 1.50 | 1.01 (tie) |" in new
    assert "launches" not in new
    assert "stale" not in old + new


def test_plots_are_drawn_beside_their_files(tables, tmp_path):
    rows = [row(parameters=10**i, leaves=i) for i in (4, 5)]
    (tmp_path / "sweep.json").write_text(json.dumps(rows))
    for sweep in ("sizes", "leaves"):
        page = f"<!-- plot: sweep.json {sweep} -->\n<!-- end -->"
        page = tables.generated(page, tmp_path)
        assert f"![{tables.PLOTS[sweep]}](results/sweep.png)\n\n[sweep.json](results" in page
        tables.draw_plots(page, tmp_path)
        assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "sweep.png").unlink()
