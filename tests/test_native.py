"""Loading the compiled modules: what is checked, what is said where one does not work."""

import importlib.machinery
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrenaissance import native, scalars
from jaxrenaissance.native import backends, sources

RUNTIME = backends.runtime_ffi_api()
NATIVE_PLATFORMS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def fake_module(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> backends.NativeBackend:
    """A CUDA module that would work, but for the changes; registers nothing."""
    info = {
        "source_hash": sources.expected_hash(),
        "ffi_api": RUNTIME,
        "jaxlib": "9.9.9",
        "cuda": (13, 0),
        "architectures": "80-real 90-real 80-virtual",
    }
    driver = changes.pop("driver", (13, 0))
    module = types.ModuleType("_jaxrenaissance_fake")
    module.__dict__.update(
        build_info=lambda: info | changes,
        driver_cuda=lambda: driver,
        handlers=dict,
        state_types=dict,
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv(native.DISABLE, raising=False)
    return backends.NativeBackend("cuda", module.__name__, "CUDA")


def fake_devices(monkeypatch: pytest.MonkeyPatch, *capabilities: str) -> None:
    devices = [
        types.SimpleNamespace(id=i, compute_capability=capability, device_kind="NVIDIA Fake")
        for i, capability in enumerate(capabilities)
    ]
    monkeypatch.setattr(backends, "cuda_devices", lambda: devices)


def run_python(code: str, **environment: str) -> str:
    """The output of a new Python in the checkout, where warnings are errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=Path(__file__).parent.parent,
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@pytest.mark.native
@pytest.mark.parametrize("platform", NATIVE_PLATFORMS)
def test_module_works(platform: str) -> None:
    native.require(platform)
    native.require(platform)  # the second time registers nothing
    assert native.available(platform)
    assert native.why_not(platform) is None
    info = native.build_info(platform)
    assert info["source_hash"] == sources.expected_hash()
    assert info["ffi_api"] <= RUNTIME


@pytest.mark.native
@pytest.mark.parametrize("platform", NATIVE_PLATFORMS)
def test_scalar_slots_are_those_of_the_python_side(platform: str) -> None:
    slots = native.scalar_slots(platform)
    assert slots == {name: getattr(scalars, name) for name in slots}
    ours = {name for name in vars(scalars) if name.isupper()}
    assert set(slots) == ours


@pytest.mark.native
@pytest.mark.skipif(native.build_record() is None, reason="nothing was built")
def test_cuda_module_imports_without_a_driver() -> None:
    record = native.build_record()
    assert record is not None
    if record.CUDA_REASON:
        pytest.skip(record.CUDA_REASON)
    code = "import _jaxrenaissance_cuda as m; print(m.driver_cuda(), len(m.handlers()) > 0)"
    assert run_python(code).endswith("True")


def test_unknown_platform() -> None:
    assert not native.available("tpu")
    with pytest.raises(ValueError, match="tpu"):
        native.require("tpu")


def test_import_loads_no_module_and_never_warns() -> None:
    code = (
        "import sys, jaxrenaissance; "
        "print([m for m in sys.modules if m.startswith('_jaxrenaissance')])"
    )
    assert run_python(code) == "[]"


def test_switched_off_by_the_environment() -> None:
    code = (
        "from jaxrenaissance import native; native.warn_fallback_once('cuda'); "
        "print(native.available('cpu'), native.why_not('cpu'))"
    )
    output = run_python(code, **{native.DISABLE: "1"})
    assert output.startswith("False")
    assert f"unset {native.DISABLE}" in output


def test_works_without_compiled_modules() -> None:
    # As in a checkout that was never installed.
    code = (
        "import sys; "
        "sys.modules |= dict.fromkeys(('_jaxrenaissance_cpu', '_jaxrenaissance_build')); "
        "from jaxrenaissance import native; print(native.why_not('cpu'))"
    )
    output = run_python(code, **{native.DISABLE: ""})
    assert "pip install" in output


def test_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.DISABLE, raising=False)
    monkeypatch.setattr(sources, "build_record", lambda: None)
    missing = backends.NativeBackend("cuda", "_jaxrenaissance_missing", "CUDA")
    with pytest.raises(native.BackendUnavailable, match=r"not installed.*pip install") as info:
        missing.require()
    assert info.value.platform == "cuda"
    assert isinstance(info.value, RuntimeError)


def test_module_that_was_not_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    record = types.SimpleNamespace(CUDA_REASON="no nvcc", CUDA_REMEDY="install nvcc")
    monkeypatch.delenv(native.DISABLE, raising=False)
    monkeypatch.setattr(sources, "build_record", lambda: record)
    missing = backends.NativeBackend("cuda", "_jaxrenaissance_missing", "CUDA")
    with pytest.raises(native.BackendUnavailable) as info:
        missing.require()
    assert info.value.reason == "no nvcc"
    assert info.value.remedy.startswith("install nvcc, then: python -m pip install")


def test_module_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / f"_jaxrenaissance_broken{suffix}").write_bytes(b"no machine code")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(native.DISABLE, raising=False)
    broken = backends.NativeBackend("cpu", "_jaxrenaissance_broken", "cpu")
    with pytest.raises(native.BackendUnavailable, match="cannot be loaded"):
        broken.require()


def test_module_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = fake_module(monkeypatch, source_hash="0" * 64)
    with pytest.raises(native.BackendUnavailable, match=r"other sources.*pip install"):
        stale.require()


def test_module_with_a_newer_ffi_api_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RUNTIME is not None
    newer = fake_module(monkeypatch, ffi_api=(RUNTIME[0], RUNTIME[1] + 1))
    with pytest.raises(native.BackendUnavailable, match=r"against jaxlib 9\.9\.9.*supports FFI"):
        newer.require()


def test_module_with_an_older_ffi_api_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_devices(monkeypatch)
    fake_module(monkeypatch, ffi_api=(0, 1)).require()


def test_handler_that_jaxlib_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("incompatible")

    fake_devices(monkeypatch)
    refused = fake_module(monkeypatch)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    sys.modules[refused.module_name].__dict__["handlers"] = lambda: {"target": {}}
    with pytest.raises(native.BackendUnavailable, match=r"refused to register target: incomp"):
        refused.require()


@pytest.mark.parametrize(
    ("driver", "works"), [((0, 0), True), ((12, 9), False), ((13, 0), True), ((14, 1), True)]
)
def test_driver(monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int], works: bool) -> None:
    fake_devices(monkeypatch)
    module = fake_module(monkeypatch, driver=driver)
    if works:
        module.require()
    else:
        with pytest.raises(native.BackendUnavailable, match=r"supports CUDA 12\.9.*driver 580"):
            module.require()


def test_gpu_that_the_build_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_devices(monkeypatch, "9.0", "7.5")
    with pytest.raises(native.BackendUnavailable, match="JR_CUDA_ARCHITECTURES=75"):
        fake_module(monkeypatch).require()


@pytest.mark.parametrize(
    ("architectures", "capability", "covered"),
    [
        ("90-real", "9.0", True),
        ("80-real", "8.6", True),  # machine code runs on later GPUs of its major version
        ("86-real", "8.0", False),
        ("80-real", "9.0", False),
        ("80-virtual", "9.0", True),  # PTX runs on all later ones
        ("90-virtual", "8.9", False),
        ("75-real 120-real 75-virtual 120-virtual", "10.3", True),
        ("100-real", "12.0", False),
        ("120-virtual", "12.1", True),
    ],
)
def test_architectures_that_cover_a_gpu(architectures: str, capability: str, covered: bool) -> None:
    assert backends.covers(architectures, capability) == covered


def test_same_error_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = fake_module(monkeypatch, source_hash="0" * 64)
    errors = []
    for _ in range(2):
        with pytest.raises(native.BackendUnavailable) as info:
            stale.require()
        errors.append(info.value)
    assert errors[0] is not errors[1]
    assert str(errors[0]) == str(errors[1])


@pytest.mark.parametrize(("platform", "device"), [("cuda", "GPU"), ("cpu", "CPU")])
def test_a_refused_module_warns_once(
    monkeypatch: pytest.MonkeyPatch, platform: str, device: str
) -> None:
    monkeypatch.delenv(native.DISABLE, raising=False)
    stale = fake_module(monkeypatch, source_hash="0" * 64)
    monkeypatch.setitem(backends._BACKENDS, platform, stale)
    monkeypatch.setattr(backends, "_warned", set())
    with pytest.warns(UserWarning, match=rf"xla backend on this {device}.*pip install"):
        native.warn_fallback_once(platform)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        native.warn_fallback_once(platform)


def test_a_cpu_module_that_was_never_built_is_no_surprise() -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('error'); "
        "sys.modules |= dict.fromkeys(('_jaxrenaissance_cpu', '_jaxrenaissance_build')); "
        "from jaxrenaissance import native; native.warn_fallback_once('cpu')"
    )
    assert run_python(code, **{native.DISABLE: ""}) == ""


def test_diagnosis_names_each_backend() -> None:
    found = {diagnosis.backend: diagnosis for diagnosis in native.diagnose()}
    assert list(found) == ["xla", "cpu", "cuda"]
    assert found["xla"].works
    for platform in ("cpu", "cuda"):
        diagnosis = found[platform]
        assert diagnosis.works == (diagnosis.remedy is None)
        on_device = platform == "cpu" or bool(native.cuda_devices())
        assert diagnosis.works == (native.available(platform) and on_device)


def test_diagnosis_of_a_gpu_machine_without_jax_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_devices(monkeypatch)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    module = fake_module(monkeypatch, compiler="gcc 9", driver=(12, 8), cuda=(12, 8))
    monkeypatch.setitem(backends._BACKENDS, "cuda", module)
    diagnosis = native.diagnose()[-1]
    assert diagnosis.reason == "JAX sees no CUDA device"
    assert diagnosis.remedy == "python -m pip install 'jax[cuda12]'"
    assert "machine code for sm_80, sm_90; PTX for compute_80" in diagnosis.facts


def test_build_command_names_the_checkout() -> None:
    root = Path(__file__).parent.parent
    assert sources.checkout() == root
    assert sources.build_command("JR_CUDA=ON") == (
        f"JR_CUDA=ON python -m pip install --force-reinstall --no-deps {root}"
    )
