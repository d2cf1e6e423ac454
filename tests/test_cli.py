"""The command line."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jaxrenaissance as jr
from jaxrenaissance.__main__ import main
from jaxrenaissance.shapes import checkpoint_shapes


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_info_says_what_works_and_what_mends_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    output = run(capsys, "info")
    assert f"jax {jax.__version__}" in output
    for section in output.split("\n\n")[1:]:
        name, state = section.splitlines()[0].split(maxsplit=1)
        assert name in ("xla", "cpu", "cuda")
        if state != "works":
            assert state.startswith("does not work: ")
            assert "to mend it: " in section


def test_it_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxrenaissance", "plan", "mlp"],
        cwd=Path(__file__).parent.parent,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "Dense_0/kernel" in result.stdout


def test_plan_of_a_named_model(capsys: pytest.CaptureFixture[str]) -> None:
    output = run(capsys, "plan", "gpt2", "--optimizer", "sgd")
    assert "148 trained leaves" in output
    assert "0 moment(s)" in output
    assert "more" in output
    assert len(run(capsys, "plan", "gpt2", "--all").splitlines()) > 148


def test_plan_counts_what_the_optimizer_needs(capsys: pytest.CaptureFixture[str]) -> None:
    def total(*options: str) -> int:
        last = run(capsys, "plan", "mlp", *options).splitlines()[-1]
        return int(last.split()[0].replace(",", ""))

    one = total("--optimizer", "sgd")
    assert total("--optimizer", "momentum") == 2 * one
    assert total("--optimizer", "adamw") == 3 * one
    assert total("--optimizer", "adamw", "--ema") == 4 * one
    assert total("--optimizer", "adamw", "--ema", "--accumulate") == 5 * one
    assert one / 8 <= total("--optimizer", "sgd", "--shards", "8") <= 1.02 * one / 8


def test_plan_options_select_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    output = run(capsys, "plan", "mlp", "--trainable", "Dense_2/*")
    assert "2 trained leaves" in output
    assert "4 not trained" in output
    assert main(["plan", "mlp", "--trainable", "nothing"]) == 1
    assert "nothing" in capsys.readouterr().err
    assert main(["plan", "mlp", "--stacked", "nothing=1"]) == 1
    assert "nothing" in capsys.readouterr().err
    assert main(["plan", "mlp", "--stacked", "*/kernel"]) == 1
    assert "PATTERN=AXES" in capsys.readouterr().err


def test_plan_of_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "resnet999"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "resnet50" in error
    assert "'resnet999'" in error


def test_no_command() -> None:
    with pytest.raises(SystemExit) as info:
        main([])
    assert info.value.code == 2


def test_plan_of_an_npz_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "weights.npz"
    arrays = {"dense/kernel": np.zeros((3, 5), np.float32), "dense/bias": np.zeros(5, np.float32)}
    np.savez(path, **arrays)  # type: ignore[arg-type]
    output = run(capsys, "plan", str(path))
    assert "dense/kernel" in output
    assert "20 parameters" in output


def test_plan_of_a_safetensors_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = (
        b'{"__metadata__":{"format":"pt"},'
        b'"layer.0.weight":{"dtype":"BF16","shape":[4,2],"data_offsets":[0,16]},'
        b'"layer.0.bias":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}'
    )
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    output = run(capsys, "plan", str(path))
    assert "layer/0/weight" in output
    assert "bfloat16" in output
    assert "12 parameters" in output


def test_plan_of_an_orbax_checkpoint(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = {"dense": {"kernel": np.zeros((3, 5), np.float32), "bias": np.zeros(5, np.float32)}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
    shapes = checkpoint_shapes(tmp_path / "checkpoint")
    assert shapes == jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize("kind", ["npz", "orbax"])
def test_plan_of_a_checkpoint_of_ours(tmp_path: Path, kind: str) -> None:
    params = {"layer": {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros(4)}}
    leaves = jr.TrainState.create(params, jr.adam(1e-3)).to_leaves()
    if kind == "npz":
        path = tmp_path / "state.npz"
        np.savez(path, **flatten_dict(leaves, sep="/"))
    else:
        ocp = pytest.importorskip("orbax.checkpoint")
        path = tmp_path / "state"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, leaves)
    wanted = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), checkpoint_shapes(path)) == wanted


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz", "a.pickle"])
def test_damaged_or_unknown_checkpoint(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"no checkpoint at all")
    with pytest.raises(ValueError, match=name):
        checkpoint_shapes(path)


def test_info_where_no_platform_starts() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "jaxrenaissance", "info"],
        env=os.environ | {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "JAX's platforms do not start: " in result.stdout
    assert "(JAX_PLATFORMS is cuda)" in result.stdout
