"""Finds nvcc, for CMake and for the build backend. Run as a script, it prints the path it found."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def find_nvcc() -> Path | None:
    """Returns CUDA's compiler: the one that the environment names, of PATH, or of a package."""
    return next((path for path in _candidates() if os.access(path, os.X_OK)), None)


def _candidates() -> Iterator[Path]:
    for variable, inside in (("CUDACXX", ""), ("CUDA_HOME", "bin/nvcc"), ("CUDA_PATH", "bin/nvcc")):
        if value := os.environ.get(variable):
            yield Path(value, inside)
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    yield Path("/usr/local/cuda/bin/nvcc")
    # NVIDIA's Python packages: in the environment of the build, or in the one that is installed to.
    # pip takes the latter off sys.path in an isolated build, and sysconfig still knows it.
    schemes = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    for site in dict.fromkeys(Path(path) for path in (*sys.path, *schemes) if path):
        yield from sorted(site.glob("nvidia/cu*/bin/nvcc"), reverse=True)


if __name__ == "__main__":
    print(find_nvcc() or "")
