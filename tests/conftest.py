"""What all tests share: several host devices, and the backends that must work here."""

import os
from collections.abc import Iterator

# Before JAX starts: sharding is tested on devices of the host. Most of the time is spent compiling,
# and XLA's own code need not be fast here; of two flags of a name the later counts.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
)
# Several processes of the tests share a GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax
import pytest

from jaxrenaissance import native

# Without this, a GPU multiplies matrices of float32 with fewer bits than the tests compare.
jax.config.update("jax_default_matmul_precision", "highest")

hypothesis.settings.register_profile(
    # Compiling takes longer than any deadline that would be of use. The examples are the same in
    # every run, so that a change is what makes a test fail.
    "default",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")

HAS_GPU = bool(native.cuda_devices())
NATIVE = not native.disabled()

# What must work here. A module that is missing fails the tests that use it; it never skips them.
BACKENDS = ["xla", *(["cpu"] if NATIVE else []), *(["cuda"] if NATIVE and HAS_GPU else [])]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped where JAX sees none")
    config.addinivalue_line(
        "markers",
        f"native: is about the compiled modules; skipped where {native.DISABLE} switches them off",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="JAX sees no GPU"))
        if item.get_closest_marker("native") and not NATIVE:
            item.add_marker(pytest.mark.skip(reason="the compiled modules are switched off"))


def pytest_report_header() -> str:
    return f"backends: {', '.join(BACKENDS)}; jax {jax.__version__}, {jax.default_backend()}"


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend that must work here, with arrays placed on a device that it serves."""
    if request.param != "xla":
        native.require(request.param)
    with jax.default_device(device_of(request.param)):
        yield request.param


@pytest.fixture
def host_devices() -> Iterator[list[jax.Device]]:
    """The several devices of the host, with arrays placed on the first of them."""
    devices = jax.devices("cpu")
    with jax.default_device(devices[0]):
        yield devices


def device_of(backend: str) -> jax.Device:
    """A device that a backend serves: the GPU for cuda, a CPU for cpu, JAX's default for xla."""
    return jax.devices(None if backend == "xla" else backend)[0]
