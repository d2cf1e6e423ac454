"""Computes the hash of the sources of the compiled modules.

CMake bakes it into the modules and the loader compares it with the sources of a checkout, so that a
module that was built from other sources is never used by mistake.
"""

import argparse
import hashlib
from pathlib import Path

SUFFIXES = {".h", ".cuh", ".cc", ".cu", ".in", ".cmake", ".map"}


def source_hash(root: Path) -> str:
    """Returns the SHA-256 over the paths and contents of the sources under `root`, sorted."""
    digest = hashlib.sha256()
    files = (
        path for path in root.rglob("*") if path.suffix in SUFFIXES or path.name == "CMakeLists.txt"
    )
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def main() -> None:
    """Prints the hash, or writes a C++ header that defines it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--header", type=Path, help="write a header that defines JR_SOURCE_HASH")
    header: Path | None = parser.parse_args().header
    value = source_hash(Path(__file__).resolve().parent)
    if header is None:
        print(value)
    else:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(f'#define JR_SOURCE_HASH "{value}"\n')


if __name__ == "__main__":
    main()
