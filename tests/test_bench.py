"""The bench command: its rows, its ties, its errors.

What it measures here means nothing; seconds are compared with nothing.
"""

import importlib.util
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import NATIVE
from scripts import run_python

import jaxrenaissance as jr
from jaxrenaissance.__main__ import main
from jaxrenaissance.bench import command, launches, libraries, report, timing
from jaxrenaissance.bench.columns import bench_lines
from jaxrenaissance.bench.data import POOL, random_tree, random_values, shapes_of
from jaxrenaissance.bench.kinds import KINDS
from jaxrenaissance.bench.libraries import contestants, fits
from jaxrenaissance.bench.loops import Loop, loop_for, looped
from jaxrenaissance.bench.run import QUICK, ratio_columns, rivals_of
from jaxrenaissance.bench.sides import Side, optax_step, our_step
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
        assert row["versions"].keys() >= {"jaxrenaissance", "optax"}
        if row["device"] != jax.devices()[0].device_kind:  # a processor's name
            assert row["cores"] == len(os.sched_getaffinity(0))
            assert (row["instruction_set"] is None) == (not NATIVE)
        assert row["command"].startswith("python -m jaxrenaissance bench --quick --model mlp ")
    assert [row["bytes_per_parameter"] for row in rows] == [32, 28, 28, 28, 28, 28]


@pytest.mark.parametrize("nbytes", [8, 24, 10**6])
def test_the_copy_has_a_rate_however_few_bytes(nbytes):
    assert 0 < timing.copy_rate(nbytes, rounds=1) < 1e15


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


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize("count", [None, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("least", [0.0, 1e-5, 1e-4, 1e-2])
def test_a_loop_has_whole_rounds_that_are_captured(on_gpu, count, least):
    loop = loop_for(count, least, 0.02)
    assert loop.steps % loop.unroll == 0
    assert loop.unroll * (count or 5) >= 5
    assert 2 <= loop.unroll <= 8
    assert 6 <= loop.steps < 960 + loop.unroll


def test_a_loop_is_as_long_as_was_asked(on_gpu):
    assert loop_for(3, 95e-6, 0.02) == (200, 2)
    assert loop_for(2, 95e-6, 0.02) == (201, 3)
    assert loop_for(3, 15e-6, 0.02) == (960, 5)
    assert loop_for(3, 0.1, 0.02) == (6, 2)


def test_a_round_on_a_cpu_is_one_step():
    assert loop_for(2, 95e-6, 0.001) == (10, 1)


class Machine:
    """A clock, and a device that works on its own behind a host that starts its calls."""

    def __init__(self):
        self.now, self.busy_until = 0.0, 0.0

    def perf_counter(self):
        return self.now

    def side(self, *, host, device):
        """Calls of which each takes so many seconds of either."""

        def call():
            self.now += host
            self.busy_until = max(self.now, self.busy_until) + device
            return {"state": (Pending(self, self.busy_until), 0)}

        return call


class Pending:
    """What a call of the machine returns."""

    def __init__(self, machine, ready):
        self.machine, self.ready = machine, ready

    def block_until_ready(self):
        self.machine.now = max(self.machine.now, self.ready)


@pytest.fixture
def machine(monkeypatch):
    """One whose clock the timing goes by."""
    machine = Machine()
    monkeypatch.setattr(timing.time, "perf_counter", machine.perf_counter)

    def pass_time(seconds):
        machine.now += seconds

    monkeypatch.setattr(timing, "_stay_awake", pass_time)
    return machine


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_the_device_time_holds_nothing_of_the_host(machine, seconds):
    sides = {
        "optax": machine.side(host=3e-3, device=7e-3),
        "ours": machine.side(host=1e-4, device=4e-3),
    }
    times = timing.device_times(sides, rounds=3, seconds=seconds)
    assert times["optax"].median == pytest.approx(7e-3)
    assert times["ours"].median == pytest.approx(4e-3)
    calls = timing.alternate(sides, rounds=3, seconds=0.0)
    assert calls["optax"].median == pytest.approx(10e-3)


def test_the_host_part_ends_before_the_device(machine):
    times = timing.call_times({"a": machine.side(host=2e-3, device=5e-3)}, 3)
    assert times["a"].median == pytest.approx(2e-3)


def test_a_call_returns_the_state_and_flattens_nothing(monkeypatch):
    side = Side(lambda state, x: {"a": state["a"] + x}, {"a": jnp.zeros(3)}, 1.0)
    loop = side.loop(Loop(6, 1))
    side(), loop()

    def never(*_, **__):
        raise AssertionError("flattened")

    with monkeypatch.context() as patch:
        patch.setattr(jax.tree, "leaves", never)
        state = side()
        assert side.state is state
        state = loop()
    assert side.state is state
    np.testing.assert_array_equal(state["a"], np.full(3, 14.0))


def entered(model, optimizer, rivals):
    """The contestants, all of them."""

    def failed(name, error):
        raise AssertionError(name) from error

    return contestants(shapes_of(model), KINDS[optimizer], rivals, failed)


@pytest.mark.parametrize("optimizer", KINDS)
def test_steps_in_a_loop_are_the_same_as_calls(optimizer):
    for alone, in_a_loop in zip(
        entered("3x100", optimizer, ["optax"]),
        entered("3x100", optimizer, ["optax"]),
        strict=True,
    ):
        for _ in range(6):
            alone.side()
        loop = in_a_loop.side.loop(Loop(6, 1))
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
    program = looped(optax_step(optimizer), Loop(4, 1)).lower(state, params).compile().as_text()
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
    (large,) = jax.tree.leaves(random_tree({"a": jax.ShapeDtypeStruct((2, POOL), "f4")}, 0, 0.5))
    np.testing.assert_array_equal(large, 0.5 * random_values(2 * POOL).reshape(2, POOL))


def test_what_does_not_fit_is_seen():
    assert fits(10**6, ["optax"])
    assert not fits(10**13, [])


def test_memory_that_is_not_known_holds_everything(monkeypatch):
    monkeypatch.setattr(libraries, "_memory", lambda: None)
    assert fits(10**13, ["optax", "torch"])


def test_those_that_do_not_run_need_no_memory():
    rivals = ["optax", "torch"]
    assert rivals_of(5, "adamw", rivals, QUICK) == rivals
    assert rivals_of(5, "lamb", rivals, QUICK) == ["optax"]
    assert rivals_of(QUICK.optax_leaves + 1, "adamw", rivals, QUICK) == ["torch"]


def test_optax_keeps_the_update_of_lamb():
    assert KINDS["lamb"].other_bytes == KINDS["adamw"].other_bytes + 3 * 4
    assert KINDS["lamb"].our_bytes + KINDS["lamb"].look_bytes == 48


@pytest.mark.skipif(not NATIVE, reason="its programs have no calls of ours")
@pytest.mark.parametrize(
    ("optimizer", "model", "on_gpu"),
    # The look for non-finite values and the update take 2,000 segments a launch, norms 1,280.
    [
        ("adamw", "many2000", 3),
        ("adamw", "2001x8", 2 + 1 + 2),
        ("lars", "1280x8", 3),
        ("lars", "many2000", 2 + 1 + 1),
        ("lars", "2001x8", 2 + 1 + 2),
        ("lamb", "2001x8", 2 + 1 + 2 + 1 + 2),
    ],
)
def test_more_segments_than_a_table_holds_are_more_launches(optimizer, model, on_gpu):
    params = random_tree(shapes_of(model), 0, 0.1)
    state = jr.TrainState.create(params, KINDS[optimizer].ours(True))
    program = jax.jit(our_step).lower(state, params).compile().as_text()
    calls = {"adamw": 3, "lars": 3, "lamb": 5}[optimizer]
    assert launches.count_launches(program, on_gpu=True) == on_gpu
    assert launches.count_launches(program, on_gpu=False) == calls


@pytest.mark.skipif(not NATIVE, reason="its programs have no calls of ours")
def test_changes_have_smaller_tables():
    params = random_tree(shapes_of("1000x8"), 0, 0.1)
    optimizer = jr.adamw(1e-3)
    update = jax.jit(optimizer.update)
    program = update.lower(params, optimizer.init(params), params).compile().as_text()
    assert launches.count_launches(program, on_gpu=False) == 3
    assert launches.count_launches(program, on_gpu=True) == 4


def test_table_sizes_are_those_of_the_kernels():
    text = (Path(__file__).parent.parent / "cuda/kernels/tuning.h").read_text()
    sizes = dict(re.findall(r"constexpr int k(\w+Table) = (\d+);", text))
    assert int(sizes["LargeTable"]) == launches.SEGMENTS_OF_OTHERS
    assert int(sizes["MediumTable"]) == launches.OF_OTHERS_IN_A_BATCH
    for op, most in launches.SEGMENTS_A_LAUNCH.items():
        name = "LargeTripleTable" if op == "changes" else "LargePartialTable"
        assert most == int(sizes[name])


@pytest.mark.skipif(not NATIVE, reason="its programs have no calls of ours")
def test_a_batch_has_smaller_tables():
    params = random_tree(shapes_of("500x8"), 0, 0.1)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    states = jax.vmap(lambda p: jr.TrainState.create(p, KINDS["adamw"].ours(False)))(many)
    program = jax.jit(jax.vmap(our_step)).lower(states, many).compile().as_text()
    assert launches.count_launches(program, on_gpu=True) == 1 + 2


def error(capsys, *arguments):
    """What a command that fails says."""
    assert main(["bench", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize("model", ["1x1e400", "1000x1e13"])
def test_a_model_of_too_many_parameters_is_an_error(capsys, model):
    assert f"{model} is more than any machine holds" in error(capsys, "--model", model)


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_measured(capsys, tmp_path):
    for option, name in (("--json", "x.json"), ("--plot", "x.png")):
        path = tmp_path / name
        path.mkdir()  # a folder is in its place
        assert str(path) in error(capsys, option, str(path))


def test_a_file_is_not_made_before_it_is_written(tmp_path):
    report.check_writable(str(tmp_path / "new" / "rows.json"))
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "old.json").write_text("old")
    report.check_writable(str(tmp_path / "old.json"))
    assert (tmp_path / "old.json").read_text() == "old"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (
            ["a.py", "--models", "a b", "--json=/home/x/y.json"],
            "python a.py --models 'a b' --json=y.json",
        ),
        (["/b/c.py", "--json", "/home/x/y.json"], "python c.py --json y.json"),
        (
            ["/x/jaxrenaissance/__main__.py", "bench", "--json=z/y"],
            "python -m jaxrenaissance bench --json=z/y",
        ),
    ],
)
def test_the_command_can_be_given_again(monkeypatch, given, shown):
    monkeypatch.setattr("sys.argv", given)
    assert report.command() == shown


def quick_rows(capsys, path, *arguments):
    """The rows of a quick run in this process, and what it says."""
    arguments = ("--quick", "--against", "optax", "--json", str(path), *arguments)
    assert main(["bench", *arguments]) == 0
    return json.loads(path.read_text()), capsys.readouterr()


def test_one_that_fails_is_a_note_and_the_others_go_on(capsys, tmp_path, monkeypatch):
    def no_memory(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nmore")

    monkeypatch.setattr(libraries, "_optax", no_memory)
    before = jax.config.jax_enable_compilation_cache
    rows, captured = quick_rows(capsys, tmp_path / "rows.json", "--model", "3x100,3x100")
    assert [row["variant"] for row in rows] == ["", "skip_nonfinite=False"]
    assert [row["ratio_to_optax"] for row in rows] == [None, None]
    note = (
        "3x100, adamw, optax failed and is left out: RuntimeError: RESOURCE_EXHAUSTED: no memory\n"
    )
    assert captured.err == note
    assert jax.config.jax_enable_compilation_cache == before


def test_a_case_that_fails_is_a_note_and_the_rows_of_others_are_kept(capsys, tmp_path, monkeypatch):
    bench, path = command.bench, tmp_path / "rows.json"

    def bench_small(model, *arguments):
        if model == "2x100":
            assert len(json.loads(path.read_text())) == 3  # those of the case before
            raise MemoryError
        return bench(model, *arguments)

    monkeypatch.setattr(command, "bench", bench_small)
    rows, captured = quick_rows(capsys, path, "--model", "1x100,2x100", "--optimizer", "sgd,sgd")
    assert [row["model"] for row in rows] == ["1x100"] * 3
    assert "2x100, sgd failed and is left out: MemoryError: no reason is given" in captured.err
    assert "1x100" in captured.out


def test_a_table_is_printed_before_files_that_fail(capsys, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(command, "write_json", full)
    path = str(tmp_path / "rows.json")
    arguments = ("--quick", "--against", "optax", "--model", "1x100", "--json", path)
    assert main(["bench", *arguments]) == 1
    captured = capsys.readouterr()
    assert "times optax" in captured.out
    assert captured.err == "error: no space left\n"


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
    assert "1x1e13, adamw does not fit into memory: left out" in message
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
    torch_sides = [e for e in entered("3x100", "adamw", ["torch"]) if e.library == "torch"]
    variants = [entry.variant for entry in torch_sides]
    on_gpu = jax.default_backend() == "gpu"
    assert variants == ["fused", "foreach", "fused, CUDA graph" if on_gpu else "default"]
    jax.block_until_ready([entry.side() for entry in torch_sides])
    assert [entry.bytes_per_parameter for entry in torch_sides] == [28] * len(torch_sides)


@pytest.mark.usefixtures("_environment_stays")
def test_torch_too_old_is_a_note(capsys, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    adamw = torch.optim.AdamW

    def older(*arguments, **options):
        if "fused" in options:
            raise TypeError("unexpected keyword argument 'fused'")
        return adamw(*arguments, **options)

    monkeypatch.setattr(torch.optim, "AdamW", older)
    arguments = ("--model", "1x8", "--against", "torch")
    rows, captured = quick_rows(capsys, tmp_path / "rows.json", *arguments)
    assert "1x8, adamw, torch, fused failed and is left out: TypeError: unexpected" in captured.err
    assert "foreach" in [row["variant"] for row in rows]
    if jax.default_backend() == "cpu":
        assert rows[0]["torch_threads"] == len(os.sched_getaffinity(0))
