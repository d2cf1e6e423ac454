"""What works on this machine and what mends the rest, for `python -m jaxrenaissance info`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import backends
from .errors import BackendUnavailable


@dataclass(frozen=True)
class Diagnosis:
    """What became of one backend.

    Attributes:
        backend: "xla", "cpu" or "cuda".
        facts: lines about its build and its devices; empty where it is not built.
        reason: why it does not work here, None where it works.
        remedy: what mends it, mostly a command; None where it works.
    """

    backend: str
    facts: tuple[str, ...] = ()
    reason: str | None = None
    remedy: str | None = None

    @property
    def works(self) -> bool:
        """Whether the backend can be used here."""
        return self.reason is None


def diagnose() -> list[Diagnosis]:
    """Looks at each backend. Starts JAX's backends and loads the modules; never raises."""
    xla = Diagnosis("xla", ("jax.numpy, on any platform; no compiled module",))
    return [xla, _diagnose_cpu(), _diagnose_cuda()]


def _diagnose_cpu() -> Diagnosis:
    try:
        info = backends.build_info("cpu")
    except BackendUnavailable as error:
        return Diagnosis("cpu", (), error.reason, error.remedy)
    return Diagnosis("cpu", (_built(info), f"instruction set {info['instruction_set']}"))


def _diagnose_cuda() -> Diagnosis:
    devices = backends.cuda_devices()
    try:
        info = backends.build_info("cuda")
    except BackendUnavailable as error:
        reason = error.reason if devices else f"{error.reason}; and JAX sees no CUDA device"
        return Diagnosis("cuda", _gpus(devices), reason, error.remedy)
    driver = backends.driver_cuda()
    facts = (
        f"{_built(info)}, CUDA {_dotted(info['cuda'])}",
        _code(info["architectures"]),
        f"needs NVIDIA driver {backends.least_driver(info['cuda'])} or newer; "
        + (f"the driver here supports CUDA {_dotted(driver)}" if any(driver) else "none here"),
        *_gpus(devices),
    )
    if devices:
        return Diagnosis("cuda", facts)
    return Diagnosis("cuda", facts, "JAX sees no CUDA device", _mend_jax(driver))


def _mend_jax(driver: Sequence[int]) -> str:
    if not any(driver):
        return "it takes an NVIDIA GPU with its driver"
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cuda" not in platforms:
        return f"unset JAX_PLATFORMS, which is {platforms!r}"
    return f"python -m pip install 'jax[cuda{13 if driver[0] >= 13 else 12}]'"


def _built(info: Mapping[str, Any]) -> str:
    return (
        f"built with {info['compiler']} against jaxlib {info['jaxlib']} "
        f"(FFI API {_dotted(info['ffi_api'])})"
    )


def _code(architectures: str) -> str:
    numbers: dict[str, list[str]] = {"real": [], "virtual": []}
    for architecture in architectures.split():
        number, _, kind = architecture.partition("-")
        numbers[kind].append(f"sm_{number}" if kind == "real" else f"compute_{number}")
    return f"machine code for {', '.join(numbers['real'])}; PTX for {', '.join(numbers['virtual'])}"


def _gpus(devices: Sequence[Any]) -> tuple[str, ...]:
    return tuple(
        f"GPU {device.id}: {device.device_kind}, sm_{device.compute_capability.replace('.', '')}"
        for device in devices
    )


def _dotted(version: Sequence[int]) -> str:
    return ".".join(str(number) for number in version)
