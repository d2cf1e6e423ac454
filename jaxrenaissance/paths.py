"""Paths of leaves, and how options select leaves: by pattern, by function, by tree."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

import jax.tree_util as jtu
import numpy as np


def path_string(key_path: jtu.KeyPath) -> str:
    """A key path as text: dict keys, attribute names and indices joined by "/"."""
    return jtu.keystr(key_path, simple=True, separator="/")


def leaves_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its path, in flatten order.

    It is that of `path_string`, "" where the tree is one leaf. But a Variable of NNX or a boxed
    parameter of Linen stands for its array, so that patterns match a tree of these as they match
    the tree of their arrays.

    >>> leaves_with_paths({"in": [1, 2], "out": 3})
    [('in/0', 1), ('in/1', 2), ('out', 3)]

    Args:
        tree: any pytree.
        is_leaf: says of a node that it is not looked into, as in `jax.tree_util`.
    """

    def stops(node: Any) -> bool:
        return _is_box(type(node)) or (is_leaf is not None and is_leaf(node))

    found: list[tuple[str, Any]] = []
    for key_path, node in jtu.tree_leaves_with_path(tree, is_leaf=stops):
        if not _is_box(type(node)) or (is_leaf is not None and is_leaf(node)):
            found.append((path_string(key_path), node))
            continue
        inner = jtu.tree_leaves_with_path(node, is_leaf=is_leaf)
        # What holds several arrays, or a tree of them, needs its names to tell them apart.
        alone = len(inner) == 1 and len(inner[0][0]) == 1
        found += [
            (path_string(key_path if alone else (*key_path, *rest)), leaf) for rest, leaf in inner
        ]
    return found


@functools.cache
def _is_box(kind: type) -> bool:
    """Whether it is a Variable of NNX or a box of Linen; told by name, for Flax is an extra."""
    return any(
        cls.__name__ in ("Variable", "AxisMetadata") and cls.__module__.partition(".")[0] == "flax"
        for cls in kind.__mro__
    )


def matches(pattern: str, path: str) -> bool:
    """Whether a glob pattern matches the *whole* path.

    `*` matches anything, "/" included, `?` one character, `[ab]` one of a set; case counts. So
    "*/bias" and "head/*" are what one mostly wants, and "bias" matches only a leaf at the top.
    """
    return fnmatchcase(path, pattern)


def check_matched(
    patterns: Iterable[str], paths: Sequence[str], argument: str, *, trained: bool = False
) -> None:
    """Raises a ValueError for the first pattern that matches none of the paths.

    Args:
        patterns, paths: what is matched.
        argument: what the error names.
        trained: whether the paths are those of the trained leaves alone.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"{argument}: expected a pattern, got {pattern!r}")
        if not any(matches(pattern, path) for path in paths):
            leaves = ", ".join(map(repr, paths[:3])) + ", …" * (len(paths) > 3)
            kind = "trained leaf" if trained else "leaf"
            raise ValueError(
                f"{argument}: the pattern {pattern!r} matches no {kind}. Patterns match the whole "
                f'path ("*/bias", "head/*"). The leaves are: {leaves or "none"}'
            )


def is_function(value: Any) -> TypeGuard[Callable[..., Any]]:
    """Whether an option is a function rather than a tree.

    A tree may be callable as well: an Equinox module of bools has the model's `__call__`.
    """
    return callable(value) and jtu.all_leaves([value])


def flatten_bools(prefix: Any, tree: Any, argument: str) -> list[bool]:
    """Expands a tree of bools, or a prefix of one, to a bool for each leaf, in flatten order.

    Raises:
        ValueError: if the structures differ, or something is not a bool; names its path.
    """
    flags: list[bool] = []
    found: list[tuple[jtu.KeyPath, Any]] = []

    def expand(key_path: jtu.KeyPath, flag: Any, subtree: Any) -> None:
        found.append((key_path, flag))
        flags.extend([flag] * len(jtu.tree_leaves(subtree)))

    try:
        jtu.tree_map_with_path(expand, prefix, tree)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{argument}: expected a tree of bools with the parameters' structure, or a prefix of "
            f"it: {error}"
        ) from error
    for key_path, flag in found:
        check_bool(flag, path_string(key_path), argument)
    return [bool(flag) for flag in flags]


def select_trained(
    trainable: Any, tree: Any, paths: Sequence[str], leaves: Sequence[Any]
) -> list[bool]:
    """Whether each leaf is trained, from `trainable=` of `MemoryPlan.build`."""
    if trainable is None:
        return [True] * len(paths)
    patterns = [trainable] if isinstance(trainable, str) else trainable
    if _is_list_of_patterns(patterns):
        check_matched(patterns, paths, "trainable")
        return [any(matches(pattern, path) for pattern in patterns) for path in paths]
    if is_function(trainable):
        flags = [trainable(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        for path, flag in zip(paths, flags, strict=True):
            check_bool(flag, path, "trainable")
    else:
        flags = flatten_bools(trainable, tree, "trainable")
    if not any(flags):
        raise ValueError("trainable: selects no leaf, so there is nothing to train")
    return [bool(flag) for flag in flags]


def stacked_axes(
    stacked: int | Mapping[str, int] | Callable[[str, Any], int] | None,
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    leaves: Sequence[Any],
    trained: Sequence[bool],
) -> list[int]:
    """The stacked axes of each leaf, 0 if not trained, from `stacked=` of `MemoryPlan.build`."""
    if stacked is None:
        return [0] * len(paths)
    if isinstance(stacked, Mapping):
        check_matched(stacked, paths, "stacked")
    axes = [0] * len(paths)
    for i, (path, shape) in enumerate(zip(paths, shapes, strict=True)):
        if not trained[i]:
            continue
        if isinstance(stacked, Mapping):
            count = _by_pattern(stacked, path)
        else:
            count = stacked(path, leaves[i]) if callable(stacked) else stacked
        if not is_int(count) or not 0 <= count <= len(shape):
            raise ValueError(
                f"stacked: expected an int from 0 to {len(shape)} for the leaf {path!r} of shape "
                f"{shape}, got {count!r}"
            )
        axes[i] = int(count)
    return axes


def is_int(value: Any) -> bool:
    """Whether a value is an int and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_bool(flag: Any, path: str, argument: str) -> None:
    """Raises a ValueError unless what was said about a leaf is a bool."""
    if not isinstance(flag, bool | np.bool_):
        raise ValueError(f"{argument}: expected a bool for {path!r}, got {flag!r}")


def _is_list_of_patterns(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, str) for item in value)


def _by_pattern(stacked: Mapping[str, int], path: str) -> int:
    found = {pattern: count for pattern, count in stacked.items() if matches(pattern, path)}
    if len(set(found.values())) > 1:
        raise ValueError(f"stacked: patterns disagree about the leaf {path!r}: {found}")
    return next(iter(found.values()), 0)
