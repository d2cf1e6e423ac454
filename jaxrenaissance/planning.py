"""How a plan is made: from a tree's shapes to leaves in arenas."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .arena_layout import (
    ARENA_DTYPES,
    SEGMENT_BYTES,
    ArenaLayout,
    Leaf,
    arena_dtype,
    lay_out,
    round_up,
)
from .groups import Group, assign, check_groups, row_names, rows_each
from .paths import (
    flatten_bools,
    is_function,
    is_int,
    leaves_with_paths,
    select_trained,
    stacked_axes,
)
from .pieces import piece_shape
from .placement import Placement
from .regions import BIAS_LIKE, Region
from .rules import classify, override

NO_TRUST = "no trust ratios"
"""In place of a mask of trust ratios: the optimizer has none."""

Rules = Callable[[str, jax.ShapeDtypeStruct], Region | None]
Stacked = int | Mapping[str, int] | Callable[[str, jax.ShapeDtypeStruct], int]


def build(
    tree: Any,
    *,
    rules: Rules | None,
    stacked: Stacked | None,
    trainable: Any,
    mask: Any,
    trust_ratio_mask: Any,
    groups: Sequence[Group],
    shards: int,
    placement: Placement | None,
) -> tuple[tuple[Leaf, ...], Any, tuple[bool, ...], tuple[ArenaLayout, ...], tuple[str, ...]]:
    """The fields of the plan. See `MemoryPlan.build`."""
    groups = check_groups(groups)
    if not is_int(shards) or shards < 1:
        raise ValueError(f"shards: expected a positive int, got {shards!r}")
    if placement is not None:
        shards = placement.shards
    flat, treedef = leaves_with_paths(tree), jtu.tree_structure(tree)
    paths = [path for path, _ in flat]
    given = [_struct(leaf) for _, leaf in flat]
    _check_unique(paths)
    trained = select_trained(trainable, tree, paths, given)
    for path, leaf, is_trained in zip(paths, given, trained, strict=True):
        if is_trained and arena_dtype(leaf) is None:
            raise ValueError(_cannot_hold(path, leaf, selected=trainable is not None))

    shapes = [x.shape if isinstance(x, jax.ShapeDtypeStruct) else () for x in given]
    axes = stacked_axes(stacked, paths, shapes, given, trained)
    decisions = classify(paths, [shape[n:] for shape, n in zip(shapes, axes, strict=True)])
    if rules is not None:
        decisions = override(decisions, rules, paths, given, trained)
    regions = [region for region, _ in decisions]
    trust = not (isinstance(trust_ratio_mask, str) and trust_ratio_mask == NO_TRUST)
    row = _left_out("mask", mask, tree, regions)
    if trust:
        untrusted = _left_out("trust_ratio_mask", trust_ratio_mask, tree, regions)
        row = [2 * u + d for u, d in zip(untrusted, row, strict=True)]

    chosen = [i for i, is_trained in enumerate(trained) if is_trained]
    numbers = assign(
        groups,
        [paths[i] for i in chosen],
        [given[i] for i in chosen],
        [regions[i] for i in chosen],
    )
    rows = {i: rows_each(trust) * n + row[i] for i, n in zip(chosen, numbers, strict=True)}
    position = {i: k for k, i in enumerate(chosen)}
    placed: dict[int, Leaf] = {}
    arenas: list[ArenaLayout] = []
    for dtype in ARENA_DTYPES:
        order = [i for i in chosen if arena_dtype(given[i]) == dtype]
        if not order:
            continue
        order.sort(key=lambda i: regions[i])  # Stable: in a region as in the tree.
        local = [
            piece_shape(shapes[i], axes[i], int(shards), dtype)
            if shards > 1
            else (_local_shape(paths[i], shapes[i], axes[i], i, placement), axes[i])
            for i in order
        ]
        unit = SEGMENT_BYTES // dtype.itemsize
        offsets, size, segments = lay_out(
            unit,
            [shape for shape, _ in local],
            [stacked for _, stacked in local],
            [rows[i] for i in order],
        )
        for i, offset in zip(order, offsets, strict=True):
            placed[i] = Leaf(
                path=paths[i],
                shape=shapes[i],
                dtype=np.dtype(given[i].dtype),
                region=regions[i],
                rule=decisions[i][1],
                group=rows[i],
                stacked=axes[i],
                arena=len(arenas),
                offset=offset,
                size=prod(shapes[i]),
            )
        arenas.append(
            ArenaLayout(
                dtype,
                round_up(size, unit),
                tuple(position[i] for i in order),
                tuple(shape for shape, _ in local),
                segments,
            )
        )
    leaves = tuple(placed[i] for i in chosen)
    names = row_names(groups, trust=trust)
    return leaves, treedef, tuple(trained), tuple(arenas), names


def _local_shape(
    path: str, shape: tuple[int, ...], stacked: int, leaf: int, placement: Placement | None
) -> tuple[int, ...]:
    """What each device holds of a leaf that is not cut by us."""
    if placement is None or placement.form != "leaves":
        return shape
    spec = placement.leaf_specs[leaf]
    if any(axes is not None for axes in spec[:stacked]):
        raise ValueError(
            f"stacked: the leaf {path!r} is sharded over its stacked axes, {spec}, and each of "
            "their slices has a norm of its own. Shard another of its axes, or leave it out of "
            "stacked="
        )
    return placement.local_shape(shape, spec)


def _struct(leaf: Any) -> Any:
    # A leaf that is not trained may be anything, and stays as it is.
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _check_unique(paths: Sequence[str]) -> None:
    repeated = [path for path, count in Counter(paths).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{repeated[0]!r} is the path of more than one leaf, since names of the tree have a "
            '"/" in them. Paths tell leaves apart: rename one of them'
        )


def _cannot_hold(path: str, leaf: Any, *, selected: bool) -> str:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        what, model = f"has dtype {leaf.dtype.name}", ""
    else:
        what = f"is a {type(leaf).__name__}, not an array"
        model = "; for a model of Equinox take eqx.filter(model, eqx.is_inexact_array)"
    advice = (
        "exclude it from trainable="
        if selected
        else "exclude it with trainable= (a pattern, a function or a tree of bools)"
    )
    return (
        f"the leaf {path!r} {what}, which cannot be trained: an arena holds float32, bfloat16, "
        f"float16 and float64. Convert it, or {advice}{model}"
    )


def _left_out(argument: str, mask: Any, tree: Any, regions: Sequence[Region]) -> list[int]:
    """1 for each leaf that a mask leaves out."""
    if mask is None or (isinstance(mask, str) and mask == "weights"):
        return [int(region in BIAS_LIKE) for region in regions]
    if is_function(mask):
        mask = mask(tree)
    elif isinstance(mask, str):
        raise ValueError(f'{argument}: expected None, "weights", bools or a function, got {mask!r}')
    return [int(not chosen) for chosen in flatten_bools(mask, tree, argument)]
