"""Loads the compiled modules, registers their FFI targets, and finds out why one does not work."""

import importlib
import os
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from . import sources
from .errors import BackendUnavailable, NotBuilt

DISABLE = "JAXRENAISSANCE_DISABLE_NATIVE"
"""The environment variable that switches the modules off, read when one is first needed."""

_LEAST_DRIVER = {12: "530", 13: "580"}
"""CUDA's major version: the oldest NVIDIA driver that runs what it compiles."""

_LEAST_CUDA = (12, 1)


class NativeBackend:
    """One compiled module and what became of it; loaded and registered once, on first use.

    Args:
        platform: "cpu" or "cuda".
        module_name: the extension module.
        jax_platform: the name under which JAX registers FFI targets for the platform.
    """

    def __init__(self, platform: str, module_name: str, jax_platform: str) -> None:
        self.platform = platform
        self.module_name = module_name
        self.jax_platform = jax_platform
        self._lock = threading.Lock()
        self._module: ModuleType | None = None
        self._error: BackendUnavailable | None = None

    def require(self) -> ModuleType:
        """Returns the module, its targets registered.

        Raises:
            BackendUnavailable: if it does not work here, the same each time.
        """
        with self._lock:
            if self._module is None and self._error is None:
                try:
                    module = self._load()
                    self._register(module)
                    self._module = module
                except BackendUnavailable as error:
                    self._error = error
        if self._module is None:
            assert self._error is not None
            # A fresh one: raising the same object again would grow its traceback.
            raise type(self._error)(*self._error.args)
        return self._module

    def _unavailable(self, reason: str, remedy: str | None = None) -> BackendUnavailable:
        return BackendUnavailable(self.platform, reason, remedy or sources.build_command())

    def _load(self) -> ModuleType:
        if disabled():
            raise self._unavailable(
                f"the compiled modules are switched off by {DISABLE}", f"unset {DISABLE}"
            )
        try:
            module = importlib.import_module(self.module_name)
        except ModuleNotFoundError as error:
            if error.name != self.module_name:
                raise self._unavailable(f"{self.module_name} cannot be loaded: {error}") from error
            raise self._not_built() from error
        except ImportError as error:
            raise self._unavailable(f"{self.module_name} cannot be loaded: {error}") from error
        info = module.build_info()
        expected = sources.expected_hash()
        if info["source_hash"] != expected:
            where = sources.checkout() or "the installed package"
            raise self._unavailable(
                f"{self.module_name} was built from other sources than those of {where}"
            )
        self._check_ffi(info)
        if self.platform == "cuda":
            self._check_driver(module, info)
            self._check_gpus(info)
        return module

    def _not_built(self) -> BackendUnavailable:
        record = sources.build_record()
        if record is None:
            return NotBuilt(
                self.platform,
                "the compiled modules are not installed for this Python",
                sources.build_command(),
            )
        prefix = self.platform.upper()
        reason, remedy = getattr(record, f"{prefix}_REASON"), getattr(record, f"{prefix}_REMEDY")
        if not reason:
            return self._unavailable(f"{self.module_name} was built, but is not there any more")
        return NotBuilt(self.platform, reason, f"{remedy}, then: {sources.build_command()}")

    def _check_ffi(self, info: Mapping[str, Any]) -> None:
        # Until a platform has started, JAX only keeps what is registered for it, and a handler that
        # is refused then takes the whole platform down. So nothing may be registered on trial.
        built, runtime = tuple(info["ffi_api"]), runtime_ffi_api()
        if runtime is None:
            jax.local_devices()  # starts the platforms, so that a refusal comes at once
        elif built > runtime:
            raise self._unavailable(
                f"{self.module_name} was built against jaxlib {info['jaxlib']} (FFI API "
                f"{_dotted(built)}), and the installed jaxlib {version('jaxlib')} supports "
                f"FFI API {_dotted(runtime)} at most"
            )

    def _check_driver(self, module: ModuleType, info: Mapping[str, Any]) -> None:
        driver, built = tuple(module.driver_cuda()), tuple(info["cuda"])
        # Without a driver one can still lower for CUDA. Within a major version, any driver runs the
        # machine code.
        # Kernels take more than 4 KB of parameters, which CUDA 12.1 brought.
        if driver != (0, 0) and (driver[0] < built[0] or driver < _LEAST_CUDA):
            raise self._unavailable(
                f"it was built with CUDA {_dotted(built)}, and the NVIDIA driver supports CUDA "
                f"{_dotted(driver)} at most",
                f"install NVIDIA driver {least_driver(built)} or newer; or point CUDA_HOME to a "
                f"CUDA {driver[0]} toolkit, then: {sources.build_command()}",
            )

    def _check_gpus(self, info: Mapping[str, Any]) -> None:
        for device in cuda_devices():
            capability = device.compute_capability
            if not covers(info["architectures"], capability):
                number = capability.replace(".", "")
                raise self._unavailable(
                    f"it was built for the architectures {info['architectures']}, and "
                    f"{device.device_kind} needs {number}",
                    sources.build_command(f"JR_CUDA_ARCHITECTURES={number}"),
                )

    def _register(self, module: ModuleType) -> None:
        name = ""
        try:
            # First: a handler's metadata names the type of the state that it makes.
            for name, fields in module.state_types().items():
                jax.ffi.register_ffi_type(name, fields, platform=self.jax_platform)
            for name, stages in module.handlers().items():
                jax.ffi.register_ffi_target(name, stages, platform=self.jax_platform)
        except Exception as error:  # jaxlib's own error classes differ between releases
            raise self._unavailable(
                f"jaxlib {version('jaxlib')} refused to register {name}: {error}"
            ) from error


_BACKENDS = {
    "cpu": NativeBackend("cpu", "_jaxrenaissance_cpu", "cpu"),
    "cuda": NativeBackend("cuda", "_jaxrenaissance_cuda", "CUDA"),
}
_warned: set[str] = set()


def require(platform: str) -> None:
    """Loads a native backend and registers its targets, unless that is done.

    For CUDA it looks at JAX's devices, so call it when a computation is lowered, not on import.

    Args:
        platform: "cpu" or "cuda".

    Raises:
        BackendUnavailable: if the backend does not work; says why and which command mends it.
        ValueError: if there is no native backend for the platform.
    """
    _backend(platform).require()


def available(platform: str) -> bool:
    """Whether a native backend works; False for a platform that has none. See `require`."""
    return platform in _BACKENDS and why_not(platform) is None


def why_not(platform: str) -> str | None:
    """Why a native backend does not work and what mends it, None where it works. See `require`."""
    try:
        require(platform)
    except BackendUnavailable as error:
        return str(error)
    return None


def build_info(platform: str) -> dict[str, Any]:
    """Facts of a module's build.

    Returns:
        source_hash, compiler, jaxlib, ffi_api; for CUDA also cuda and architectures.

    Raises:
        BackendUnavailable: as `require`.
    """
    return _backend(platform).require().build_info()


def scalar_slots(platform: str) -> dict[str, int]:
    """The slots of the S region as the module was compiled with.

    Raises:
        BackendUnavailable: as `require`.
    """
    return _backend(platform).require().scalar_slots()


def cuda_executions() -> int:
    """How often a CUDA handler has launched its kernels in this process.

    XLA replays the steps that it has captured in a command buffer without calling the handlers.

    Raises:
        BackendUnavailable: if the module does not work here.
    """
    return _backend("cuda").require().executions()


def driver_cuda() -> tuple[int, int]:
    """The newest CUDA version that the NVIDIA driver supports, (0, 0) where there is no driver.

    Raises:
        BackendUnavailable: as `require`, for CUDA.
    """
    return _backend("cuda").require().driver_cuda()


def warn_fallback_once(platform: str) -> None:
    """Warns, once for each platform, that a computation runs on the xla backend for want of ours.

    Silent where the module works, where it was switched off on purpose, and on a CPU for which no
    module was built: the build said so.
    """
    if disabled() or platform in _warned:
        return
    try:
        require(platform)
    except BackendUnavailable as error:
        if platform == "cpu" and isinstance(error, NotBuilt):
            return
        _warned.add(platform)
        device = {"cpu": "CPU", "cuda": "GPU"}[platform]
        warnings.warn(
            f"jaxrenaissance runs on the slower xla backend on this {device}: {error}",
            stacklevel=2,
        )


def disabled() -> bool:
    """Whether the compiled modules are switched off by the environment."""
    return os.environ.get(DISABLE, "").lower() not in ("", "0", "false", "no", "off")


def cuda_devices() -> Sequence[Any]:
    """The CUDA devices that JAX sees; starts JAX's backends if that is not done."""
    try:
        return jax.devices("cuda")
    except (RuntimeError, AssertionError):  # the latter where JAX_PLATFORMS leaves no platform
        return ()


def covers(architectures: str, capability: str) -> bool:
    """Whether code built for some architectures runs on a GPU.

    Args:
        architectures: as CMake names them, "75-real 90-real 75-virtual".
        capability: the GPU's compute capability, "8.6".
    """
    major, minor = (int(part) for part in capability.split("."))
    for architecture in architectures.split():
        number, _, kind = architecture.partition("-")
        built_major, built_minor = int(number[:-1]), int(number[-1])
        # Machine code runs on its own major version; PTX is compiled for any newer GPU.
        same = built_major == major and built_minor <= minor
        if same or (kind != "real" and (built_major, built_minor) <= (major, minor)):
            return True
    return False


def least_driver(cuda: Sequence[int]) -> str:
    """The oldest NVIDIA driver that runs code of a CUDA version."""
    return _LEAST_DRIVER.get(cuda[0], f"for CUDA {_dotted(cuda)}")


def runtime_ffi_api() -> tuple[int, int] | None:
    """The FFI API version of the installed jaxlib, None where its headers do not tell."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    found = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", text)
    return (int(found[0]), int(found[1])) if len(found) == 2 else None


def _dotted(version: Sequence[int]) -> str:
    return ".".join(str(number) for number in version)


def _backend(platform: str) -> NativeBackend:
    if platform not in _BACKENDS:
        raise ValueError(f"platform: got {platform!r}, wanted one of {', '.join(_BACKENDS)}")
    return _BACKENDS[platform]
