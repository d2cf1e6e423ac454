"""What is installed, and the tools of the build that are Python: the hash, the search for nvcc."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from jaxrenaissance import native

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled_modules() -> list[Path]:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    found = [importlib.util.find_spec(f"_jaxrenaissance_{name}") for name in ("cpu", "cuda")]
    paths = [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]
    return [path for path in paths if path.name.endswith(suffix)]


def tool(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.native
def test_installation_is_complete() -> None:
    files = {str(file) for file in importlib.metadata.files("jaxrenaissance") or ()}
    assert "jaxrenaissance/py.typed" in files
    assert "_jaxrenaissance_build.py" in files
    assert any(file.endswith("licenses/LICENSE") for file in files)
    assert any(file.startswith("_jaxrenaissance_cpu") for file in files)
    assert not any(file.startswith(("tests", "cuda")) for file in files)


@pytest.mark.native
def test_every_package_of_the_checkout_is_installed() -> None:
    # A folder without an __init__.py, say, works in the checkout and is missing elsewhere.
    files = {str(file) for file in importlib.metadata.files("jaxrenaissance") or ()}
    ours = {str(path.relative_to(ROOT)) for path in ROOT.glob("jaxrenaissance/**/*.py")}
    missing = ours - files
    assert not missing, "the installed package is older than the checkout: pip install ."
    for path in ours:
        assert (ROOT / path).parent.joinpath("__init__.py").is_file()


def test_license_is_apache() -> None:
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_isolated_builds_use_the_oldest_supported_jaxlib() -> None:
    (pinned,) = (
        re.fullmatch(r"jaxlib==(\d+\.\d+)\.0", requirement)
        for requirement in PYPROJECT["build-system"]["requires"]
        if requirement.startswith("jaxlib")
    )
    assert pinned is not None
    assert f"jaxlib>={pinned[1]}" in PYPROJECT["project"]["dependencies"]


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="ELF")
def test_modules_export_nothing_but_their_init() -> None:
    for path in compiled_modules():
        symbols = tool("nm", "-D", "--defined-only", str(path)).split()[2::3]
        assert symbols == [f"PyInit_{path.name.split('.')[0]}"]


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="ELF")
def test_modules_need_neither_driver_nor_cuda_runtime() -> None:
    for path in compiled_modules():
        needed = re.findall(r"NEEDED.*\[(.*)\]", tool("readelf", "-d", str(path)))
        assert needed
        assert not [name for name in needed if "cuda" in name]


def test_source_hash_sees_every_change(tmp_path: Path) -> None:
    source_hash = load("cuda/source_hash.py").source_hash
    (tmp_path / "ffi").mkdir()
    source = tmp_path / "ffi" / "a.cc"
    source.write_text("1")
    first = source_hash(tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", first)

    source.write_text("2")
    assert source_hash(tmp_path) != first
    source.write_text("1")
    assert source_hash(tmp_path) == first

    (tmp_path / "b.h").write_text("")
    added = source_hash(tmp_path)
    assert added != first
    (tmp_path / "b.h").rename(tmp_path / "c.h")
    assert source_hash(tmp_path) not in (first, added)
    (tmp_path / "c.h").unlink()

    (tmp_path / "notes.md").write_text("no source")
    assert source_hash(tmp_path) == first


def test_source_hash_covers_the_build() -> None:
    suffixes = load("cuda/source_hash.py").SUFFIXES
    left_out = {
        path.name
        for path in (ROOT / "cuda").rglob("*")
        if path.is_file() and path.suffix not in suffixes and "__pycache__" not in path.parts
    }
    assert left_out <= {
        "CMakeLists.txt",  # covered by its name
        "source_hash.py",
        "find_nvcc.py",
        "build_backend.py",
    }


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any nvcc; what lies in the returned folder is its site-packages."""
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "JR_CUDA", "JR_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "site"))
    monkeypatch.setattr(sys, "path", [str(ROOT / "cuda" / "cmake")])
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: tmp_path in Path(path).parents and access(path, mode)
    )
    return tmp_path


def put_nvcc(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_nvcc_is_found_in_the_order_promised(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_nvcc = load("cuda/cmake/find_nvcc.py").find_nvcc
    assert find_nvcc() is None
    package = put_nvcc(machine / "site" / "nvidia" / "cu13" / "bin" / "nvcc")
    assert find_nvcc() == package
    on_path = put_nvcc(machine / "bin" / "nvcc")
    assert find_nvcc() == on_path
    home = put_nvcc(machine / "cuda" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(machine / "cuda"))
    assert find_nvcc() == home
    named = put_nvcc(machine / "other" / "nvcc-13")
    monkeypatch.setenv("CUDACXX", str(named))
    assert find_nvcc() == named


def test_a_directory_that_is_named_nvcc_is_none(machine: Path) -> None:
    (machine / "bin" / "nvcc").mkdir(parents=True)
    assert load("cuda/cmake/find_nvcc.py").find_nvcc() is None


@pytest.mark.parametrize(
    ("driver", "environment", "settings", "wanted"),
    [
        (13000, {}, {}, True),
        (14000, {}, {}, True),
        (12080, {}, {}, False),  # there is no nvcc for CUDA 12 among NVIDIA's packages
        (0, {}, {}, False),
        (0, {"JR_CUDA": "ON"}, {}, True),
        (13000, {"JR_CUDA": "off"}, {}, False),
        (13000, {"JR_NATIVE": "OFF"}, {}, False),
        (13000, {}, {"cmake.define.JR_CUDA": "OFF"}, False),
        (0, {"JR_CUDA": "OFF"}, {"cmake.define.JR_CUDA": "ON"}, True),
    ],
)
def test_build_brings_an_nvcc_where_one_is_missing(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: int,
    environment: dict[str, str],
    settings: dict[str, str],
    wanted: bool,
) -> None:
    backend = ModuleType("scikit_build_core")
    hooks = ModuleType("build")
    hooks.get_requires_for_build_wheel = lambda settings: ["ninja"]  # type: ignore[attr-defined]
    backend.build = hooks  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scikit_build_core", backend)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", hooks)
    monkeypatch.setitem(sys.modules, "find_nvcc", load("cuda/cmake/find_nvcc.py"))
    build = load("cuda/cmake/build_backend.py")
    monkeypatch.setattr(build, "_driver_cuda", lambda: driver)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    requires = build.get_requires_for_build_wheel(settings)
    assert requires[0] == "ninja"
    assert any(name.startswith("cuda-toolkit[") for name in requires) == wanted
    put_nvcc(machine / "bin" / "nvcc")
    assert build.get_requires_for_build_wheel(settings) == ["ninja"]


def test_command_that_mends_the_build_is_named_in_the_record() -> None:
    record = native.build_record()
    if record is None:
        pytest.skip("nothing was built")
    assert bool(record.CPU_REASON) == bool(record.CPU_REMEDY)
    assert bool(record.CUDA_REASON) == bool(record.CUDA_REMEDY)


def test_pre_commit_uses_the_versions_of_the_extra() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    dev = PYPROJECT["project"]["optional-dependencies"]["dev"]
    for pinned in re.findall(r'"([a-z-]+==[\d.]+)"', hooks):
        assert pinned in dev
