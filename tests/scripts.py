"""Runs the programs of the checkout as their users do."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_script(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What a program of the checkout, such as "examples/lora.py", prints and returns."""
    return run_python(str(ROOT / script), *arguments, cwd=cwd)


def run_python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What Python prints and returns, given such arguments as "-m", "jaxrenaissance", "info"."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
    )


def environment() -> dict[str, str]:
    """Of a program of the checkout."""
    # The checkout's package, as in the tests; a GPU's memory is mostly taken by the tests' process.
    own = {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # The several host devices are for the tests.
    return {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"} | own
