"""Paths of leaves, the patterns that match them, and trees of bools: how every option of the library names leaves."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import jax.tree_util as jtu
import numpy as np


def path_string(key_path: jtu.KeyPath) -> str:
    """The path of a leaf as text: dict keys, attribute names and indices joined by "/".

    A tree that is a single leaf has the path "".
    """
    return jtu.keystr(key_path, simple=True, separator="/")


def matches(pattern: str, path: str) -> bool:
    """Whether a glob pattern matches the *whole* path.

    `*` matches anything, "/" included, `?` one character, `[ab]` one of a set; upper and lower case differ. So "*/bias" and
    "head/*" are what one mostly wants, and "bias" matches only a leaf at the top.
    """
    return fnmatchcase(path, pattern)


def check_matched(patterns: Iterable[str], paths: Iterable[str], argument: str) -> None:
    """Raises a ValueError for the first pattern that matches none of the paths."""
    paths = list(paths)
    for pattern in patterns:
        if not any(matches(pattern, path) for path in paths):
            some = ", ".join(repr(path) for path in paths[:3]) + (", …" if len(paths) > 3 else "")
            raise ValueError(
                f"{argument}: the pattern {pattern!r} matches no leaf. A pattern is matched against the whole path, "
                f'so "*" may be missing. The leaves are {some or "none: the tree is empty"}'
            )


def is_bool(value: Any) -> bool:
    """Whether a value is a Python or NumPy bool."""
    return isinstance(value, bool | np.bool_)


def flatten_bools(prefix: Any, tree: Any, argument: str) -> list[bool]:
    """Expands a tree of bools, or a prefix of one, to one bool for each leaf of `tree`, in flatten order.

    Raises:
        ValueError: naming `argument`, where the structures differ or something is not a bool (with its path).
    """
    flags: list[bool] = []

    def expand(key_path: jtu.KeyPath, flag: Any, subtree: Any) -> None:
        if not is_bool(flag):
            raise _NotABool(
                f"{argument}: expected a bool at {path_string(key_path)!r}, got {flag!r}"
            )
        flags.extend([bool(flag)] * len(jtu.tree_leaves(subtree)))

    try:
        jtu.tree_map_with_path(expand, prefix, tree)
    except _NotABool:
        raise
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{argument}: the tree of bools is not the parameters' tree nor a prefix of it: {error}"
        ) from error
    return flags


class _NotABool(ValueError):
    pass
