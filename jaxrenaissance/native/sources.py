"""Where the compiled modules come from: a checkout's sources, the build's record and command."""

import importlib.metadata
import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlparse

_PACKAGE = Path(__file__).resolve().parent.parent


def checkout() -> Path | None:
    """The root of the checkout that this package is imported from, None where it is installed."""
    root = _PACKAGE.parent
    files = (root / "cuda" / "source_hash.py", root / "pyproject.toml")
    return root if all(file.is_file() for file in files) else None


def build_record() -> ModuleType | None:
    """What the build left beside the modules, None where nothing was built or installed."""
    try:
        import _jaxrenaissance_build  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return _jaxrenaissance_build


def expected_hash() -> str | None:
    """The hash that a module must carry: of the checkout's sources, else of those installed."""
    root = checkout()
    if root is not None:
        script: Mapping[str, object] = runpy.run_path(str(root / "cuda" / "source_hash.py"))
        compute = script["source_hash"]
        assert callable(compute)
        return str(compute(root / "cuda"))
    record = build_record()
    return None if record is None else record.SOURCE_HASH


def build_command(environment: str = "") -> str:
    """The command that builds and installs the modules again, for the same Python.

    Args:
        environment: assignments to put before it, such as "JR_CUDA=ON".
    """
    source = checkout() or _installed_from()
    command = f"python -m pip install --force-reinstall --no-deps {source or 'jaxrenaissance'}"
    return f"{environment} {command}".strip()


def _installed_from() -> Path | None:
    try:
        text = importlib.metadata.distribution("jaxrenaissance").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    url = urlparse(json.loads(text)["url"]) if text else None
    if url is None or url.scheme != "file":
        return None
    path = Path(unquote(url.path))
    return path if path.is_dir() else None
