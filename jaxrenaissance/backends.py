"""Which backend an optimizer or a `Packed` runs on: argument, environment variable or auto."""

import os

from .ops.primitive import BACKENDS

ENVIRONMENT = "JAXRENAISSANCE_BACKEND"
"""The environment variable, read when an optimizer or a `Packed` is made, and then kept."""


def resolve(backend: str | None) -> str:
    """The backend to use: the argument, else the environment variable's value, else "auto".

    Raises:
        ValueError: if the name is none of "auto", "cpu", "cuda" and "xla".
    """
    source = "backend"
    if backend is None:
        backend = os.environ.get(ENVIRONMENT) or "auto"
        source = ENVIRONMENT
    if backend not in BACKENDS:
        raise ValueError(f"{source}: got {backend!r}, wanted one of {', '.join(BACKENDS)}")
    return backend
