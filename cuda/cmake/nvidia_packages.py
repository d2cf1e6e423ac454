"""Prints the directories in which NVIDIA's Python packages may hold an nvcc, one a line."""

import sys
import sysconfig
from pathlib import Path


def main() -> None:
    """Newest CUDA first; the build's own environment before the one that is installed to."""
    # In an isolated build the target's site-packages are not on sys.path; sysconfig knows them.
    schemes = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    for site in dict.fromkeys(Path(path) for path in (*sys.path, *schemes) if path):
        for nvcc in sorted(site.glob("nvidia/cu*/bin/nvcc"), reverse=True):
            print(nvcc.parent.parent.as_posix())


if __name__ == "__main__":
    main()
