"""The build backend: scikit-build-core's, which also brings an nvcc where one is missing.

An extra cannot do that: pip builds this package before it installs what the extra asks for. So
where the machine has an NVIDIA driver and no nvcc, the environment of an isolated build gets
NVIDIA's own packages. `--no-build-isolation` uses what is installed.
"""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence

from find_nvcc import find_nvcc
from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403

# The oldest CUDA whose nvcc is on the package index: there is none for CUDA 12. Code built by it
# runs under every driver for CUDA 13, whichever CUDA JAX uses.
_NVCC_CUDA = 13000
_NVCC_PACKAGES = ["cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==13.0.*"]

_Settings = Mapping[str, str | Sequence[str]] | None


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """PEP 517's hook."""
    return _requires(_build.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    """PEP 660's hook."""
    return _requires(_build.get_requires_for_build_editable, config_settings)


def _requires(hook: Callable[..., list[str]], settings: _Settings) -> list[str]:
    return [*hook(settings), *(_NVCC_PACKAGES if _lacks_nvcc(settings or {}) else [])]


def _lacks_nvcc(settings: Mapping[str, str | Sequence[str]]) -> bool:
    def option(name: str, default: str) -> str:
        value = settings.get(f"cmake.define.{name}") or os.environ.get(name) or default
        return str(value).upper()

    if option("JR_NATIVE", "ON") in ("OFF", "0", "FALSE", "NO"):
        return False
    wanted = option("JR_CUDA", "AUTO")
    if wanted == "AUTO":
        wanted = "ON" if _driver_cuda() >= _NVCC_CUDA else "OFF"
    return wanted == "ON" and find_nvcc() is None


def _driver_cuda() -> int:
    """The CUDA version that the NVIDIA driver supports, 13000 for 13.0; 0 where there is none."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value
