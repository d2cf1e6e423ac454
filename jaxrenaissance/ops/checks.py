"""Checks of operands at trace time.

Each error names the argument, what it was and what is wanted.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .. import scalars
from ..arena_layout import ArenaLayout
from ..workspaces import least_size, norm_dtype

FLOAT32_LEAVES = tuple(np.dtype(d) for d in ("float32", jax.numpy.bfloat16, "float16"))


def leaf_dtypes(layout: ArenaLayout) -> tuple[np.dtype, ...]:
    """The dtypes that a leaf beside this arena may have.

    Nothing wider than the arena, so nothing is cast down; but what an arena of float32 may have
    beside it, one of bfloat16 or float16 may, too.
    """
    if layout.dtype == np.float64:
        return (np.dtype("float64"), *FLOAT32_LEAVES)
    return FLOAT32_LEAVES


def check_array(name: str, x: Any, shape: tuple[int, ...], dtypes: Sequence[np.dtype]) -> None:
    """Raises unless ``x`` has this shape and one of these dtypes."""
    dtype, got_shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if got_shape != shape or dtype not in dtypes:
        got = f"{dtype}{list(got_shape)}" if got_shape is not None else f"a {type(x).__name__}"
        wanted = " or ".join(np.dtype(d).name for d in dtypes)
        raise ValueError(f"{name}: got {got}, wanted {wanted}{list(shape)}")


def check_arena(name: str, arena: Any, layout: ArenaLayout) -> None:
    """Raises unless ``arena`` is one of this layout."""
    check_array(name, arena, (layout.size,), (layout.dtype,))


def check_leaf_dtypes(name: str, dtypes: Sequence[np.dtype], layout: ArenaLayout) -> None:
    """Raises unless there is a dtype for each leaf of this layout, which its arena may have."""
    if len(dtypes) != len(layout.shapes):
        raise ValueError(f"{name}: got {len(dtypes)} dtypes, wanted {len(layout.shapes)}")
    for i, dtype in enumerate(dtypes):
        if dtype not in leaf_dtypes(layout):
            wanted = ", ".join(d.name for d in leaf_dtypes(layout))
            raise ValueError(f"{name}[{i}]: got {dtype.name}, wanted one of {wanted}")


def check_leaves(name: str, leaves: Sequence[Any], layout: ArenaLayout) -> None:
    """Raises unless ``leaves`` are this layout's leaves, in arena order."""
    if len(leaves) != len(layout.shapes):
        raise ValueError(f"{name}: got {len(leaves)} leaves, wanted {len(layout.shapes)}")
    allowed = leaf_dtypes(layout)
    for i, (leaf, shape) in enumerate(zip(leaves, layout.shapes, strict=True)):
        check_array(f"{name}[{i}]", leaf, shape, allowed)


def check_ints(ints: Any) -> None:
    """Raises unless ``ints`` is an array of counters."""
    check_array("ints", ints, (scalars.INTS,), (np.dtype("int32"),))


def num_groups(layout: ArenaLayout) -> int:
    """The groups that a layout's segments name, and those before them."""
    return 1 + int(layout.segments[:, 4].max(initial=0))


def check_floats(floats: Any, layout: ArenaLayout | None = None) -> None:
    """Raises unless ``floats`` are a header and whole rows, enough for the layout's groups.

    A float64 arena needs float64 scalars; a float32 arena takes either.
    """
    groups = 1
    dtypes = [np.dtype("float64"), np.dtype("float32")]
    if layout is not None:
        groups = num_groups(layout)
        if layout.dtype == np.float64:
            dtypes.remove(np.dtype("float32"))
    least = scalars.floats_size(groups)
    shape = getattr(floats, "shape", ())
    if len(shape) == 1 and shape[0] >= least and (shape[0] - least) % scalars.ROW == 0:
        check_array("floats", floats, shape, dtypes)
    else:
        raise ValueError(
            f"floats: got shape {list(shape)}, wanted [{least}], or more rows of {scalars.ROW}"
        )


def check_workspaces(workspaces: Sequence[Any], segments: Sequence[int], backend: str) -> None:
    """Raises unless each workspace is one of an arena with so many segments, of this backend."""
    if len(segments) != len(workspaces):
        raise ValueError(
            f"segments: got {len(segments)} counts, wanted one for each of the {len(workspaces)} "
            "workspaces"
        )
    for i, (workspace, count) in enumerate(zip(workspaces, segments, strict=True)):
        if backend == "xla":
            check_array(f"workspaces[{i}]", workspace, (count,), (norm_dtype(),))
            continue
        least, shape = least_size(count), getattr(workspace, "shape", ())
        if len(shape) == 1 and shape[0] >= least and shape[0] % 2 == 0:
            check_array(f"workspaces[{i}]", workspace, shape, (np.dtype("int32"),))
        else:
            raise ValueError(
                f"workspaces[{i}]: got shape {list(shape)}, wanted what norms made of an arena "
                f"with {count} segments"
            )


def check_trust(
    workspaces: Sequence[Any],
    segments: Sequence[int],
    groups: Sequence[Any],
    gradients: int,
    *,
    series: int,
) -> None:
    """Raises unless there are `series` workspaces and the groups of each of `gradients` arenas."""
    if len(workspaces) != series * gradients:
        raise ValueError(
            f"workspaces: got {len(workspaces)}, wanted {series} for each of the {gradients} arenas"
        )
    for k in range(1, series):
        own = segments[k * gradients : (k + 1) * gradients]
        if tuple(own) != tuple(segments[:gradients]):
            raise ValueError(
                f"segments: got {tuple(segments)}, wanted those of the gradients again in each "
                "series"
            )
    if len(groups) != gradients:
        raise ValueError(
            f"groups: got {len(groups)}, wanted one for each of the {gradients} arenas"
        )
    for i, (own, count) in enumerate(zip(groups, segments, strict=False)):
        check_array(f"groups[{i}]", own, (count,), (np.dtype("int32"),))


def check_ratios(ratios: Any, floats: Any, layout: ArenaLayout) -> None:
    """Raises unless ``ratios`` are one a segment, of the dtype of the scalars."""
    check_array("ratios", ratios, (len(layout.segments),), (np.dtype(floats.dtype),))


def gradient_operands(
    layout: ArenaLayout, gradients: Sequence[jax.Array] | jax.Array, name: str = "gradients"
) -> tuple[tuple[jax.Array, ...], bool]:
    """The gradients as operands, checked, and whether they are one arena rather than leaves."""
    if isinstance(gradients, Sequence):
        check_leaves(name, gradients, layout)
        return tuple(gradients), False
    check_arena(name, gradients, layout)
    return (gradients,), True
