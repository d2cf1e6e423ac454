"""MemoryPlan: where every leaf of a model lies in the arenas, from shapes alone."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.core
import jax.tree_util as jtu
import numpy as np

from .groups import Group, assign, check_groups, row_names, rows_each
from .paths import (
    flatten_bools,
    is_function,
    is_int,
    leaves_with_paths,
    select_trained,
    stacked_axes,
)
from .regions import BIAS_LIKE, W_REGIONS, MemRange, Region
from .rules import classify, override

SEGMENT_BYTES = 128
"""Every segment starts on a multiple of this many bytes."""

NO_TRUST = "no trust ratios"
"""In place of a mask of trust ratios: the optimizer has none."""

Rules = Callable[[str, jax.ShapeDtypeStruct], Region | None]
Stacked = int | Mapping[str, int] | Callable[[str, jax.ShapeDtypeStruct], int]

_ARENA_OF = {
    "float32": np.dtype("float32"),
    "bfloat16": np.dtype("float32"),
    "float16": np.dtype("float32"),
    "float64": np.dtype("float64"),
}
_MOMENTS = {
    "sgd": 0,
    "momentum": 1,
    "nesterov": 1,
    "lars": 1,
    "lion": 1,
    "adam": 2,
    "adamw": 2,
    "lamb": 2,
}


@dataclass(frozen=True)
class Leaf:
    """One trained leaf and its place.

    Attributes:
        path: its components joined by "/".
        shape, dtype: as in the tree, stacked axes included.
        region: its region in series W.
        rule: which rule put it there.
        group: index into `MemoryPlan.groups`.
        stacked: how many leading axes come from a scan or vmap; each slice is a segment.
        arena: index into `MemoryPlan.arenas`.
        offset: where its first segment starts, in elements of the arena.
        size: its elements, without padding.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    region: Region
    rule: str
    group: int
    stacked: int
    arena: int
    offset: int
    size: int


@dataclass(frozen=True, eq=False, repr=False)
class ArenaLayout:
    """The layout of one arena: static, hashable, equal by identity first and by content then.

    Attributes:
        dtype: float32 or float64.
        size: elements; a multiple of `128 * shards` bytes.
        leaves: indices into `MemoryPlan.leaves` in arena order: by region, then as in the tree.
        shapes: the leaves' shapes, in arena order.
        segments: int64 [n, 5], read-only, in increasing start. Columns: start, size (elements),
            leaf (its position in arena order), offset inside the leaf (elements), group. A stacked
            leaf has a row for each slice; a leaf without elements has none.
    """

    dtype: np.dtype
    size: int
    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    segments: np.ndarray

    def __post_init__(self) -> None:
        self.segments.flags.writeable = False

    @property
    def nbytes(self) -> int:
        """Bytes of one series."""
        return self.size * self.dtype.itemsize

    @cached_property
    def _hash(self) -> int:
        return hash((self.dtype, self.size, self.leaves, self.shapes, self.segments.tobytes()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ArenaLayout):
            return NotImplemented
        return (
            hash(self) == hash(other)
            and (self.dtype, self.size) == (other.dtype, other.size)
            and (self.leaves, self.shapes) == (other.leaves, other.shapes)
            and np.array_equal(self.segments, other.segments)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Leaves the cached hash behind: strings hash differently in another process.
        return ArenaLayout, (self.dtype, self.size, self.leaves, self.shapes, self.segments)

    def __repr__(self) -> str:
        counts = f"{len(self.leaves)} leaves, {len(self.segments)} segments"
        return f"ArenaLayout({self.dtype}[{self.size}], {counts})"


@dataclass(frozen=True)
class PlanConfig:
    """Which series an optimizer needs beside the weights. What is not needed is not allocated.

    Attributes:
        moments: 0, 1 (M) or 2 (M and V).
        ema: whether an exponential moving average of the weights is kept.
        accumulator: whether gradients add up over several calls.
    """

    moments: int
    ema: bool = False
    accumulator: bool = False

    @staticmethod
    def for_kind(kind: str, *, ema: bool = False, accumulator: bool = False) -> "PlanConfig":
        """The series that an optimizer of this kind needs.

        Raises:
            ValueError: if the kind is unknown.
        """
        if kind not in _MOMENTS:
            raise ValueError(f"kind: expected one of {', '.join(_MOMENTS)}; got {kind!r}")
        return PlanConfig(_MOMENTS[kind], ema, accumulator)

    @property
    def series(self) -> int:
        """How many series are allocated, the weights included."""
        return 1 + self.moments + self.ema + self.accumulator


@dataclass(frozen=True, eq=False, repr=False)
class MemoryPlan:
    """Every leaf's path, shape, dtype, region, group and offset.

    Static, hashable, equal by identity first and by content then. All series (weights, gradients,
    moments, EMA) share one layout, so one offset serves all of them.

    Attributes:
        leaves: the trained leaves, in the tree's order.
        treedef: of the whole tree, leaves that are not trained included.
        trained: whether it is trained, for each leaf of the whole tree.
        arenas: at most two, float32 before float64; only those that hold a leaf.
        groups: names of the sets of leaves that share hyperparameters, with and without weight
            decay: "decay", "no decay", and two for each of the user's groups. Where the optimizer
            has trust ratios, with and without one: "decay, trust", "no decay, trust", "decay, no
            trust", "no decay, no trust", and four for each of the user's groups.
    """

    leaves: tuple[Leaf, ...]
    treedef: jtu.PyTreeDef  # pyright: ignore[reportInvalidTypeForm]: JAX exports a variable
    trained: tuple[bool, ...]
    arenas: tuple[ArenaLayout, ...]
    groups: tuple[str, ...]

    @staticmethod
    def build(
        tree: Any,
        *,
        rules: Rules | None = None,
        stacked: Stacked | None = None,
        trainable: Any = None,
        mask: Any = None,
        trust_ratio_mask: Any = NO_TRUST,
        groups: Sequence[Group] = (),
        shards: int = 1,
    ) -> "MemoryPlan":
        """Plans the arenas of a tree of parameters.

        Float32, bfloat16 and float16 leaves lie in an arena of float32, float64 leaves in one of
        float64. Patterns match the whole path, and `*` matches "/" too: "*/bias", "head/*".

        Args:
            tree: arrays, tracers or `jax.ShapeDtypeStruct`s; only shape and dtype are looked at.
            rules: function (path, `ShapeDtypeStruct`) → `Region` of series W, or None where the
                default rules are to decide.
            stacked: how many leading axes come from a scan or vmap over layers: a number for all
                leaves, a mapping from patterns to numbers, or a function (path,
                `ShapeDtypeStruct`) → number. Each slice is a segment with norms of its own, and
                the default rules see its shape without these axes.
            trainable: which leaves are trained: a pattern, a list of patterns, a function (path,
                `ShapeDtypeStruct`) → bool, or a tree of bools (or a prefix of one). By default
                all, and then each must be of a dtype that an arena holds.
            mask: which leaves have weight decay. None or "weights": those in weight regions. As in
                optax, a bool, a tree of bools (or a prefix of one) or a function from the
                parameters to one decides alone.
            trust_ratio_mask: which leaves have a trust ratio, as in `mask`, for an optimizer that
                has them. By default it has none.
            groups: leaves with hyperparameters of their own, as in the optimizers.
            shards: into how many equal parts the arenas can be cut; a multiple of 128 bytes each.

        Raises:
            TypeError: if groups is no list of `Group`s, or a match is none of what it can be.
            ValueError: where an argument is none of these, a pattern matches no leaf, a leaf is
                matched by two groups, or a trained leaf cannot lie in an arena. It names the
                argument and the leaf's path.
        """
        groups = check_groups(groups)
        if not is_int(shards) or shards < 1:
            raise ValueError(f"shards: expected a positive int, got {shards!r}")
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
        for dtype in dict.fromkeys(_ARENA_OF.values()):
            order = [i for i in chosen if arena_dtype(given[i]) == dtype]
            if not order:
                continue
            order.sort(key=lambda i: regions[i])  # Stable: in a region as in the tree.
            offsets, size, segments = _lay_out(
                SEGMENT_BYTES // dtype.itemsize,
                [shapes[i] for i in order],
                [axes[i] for i in order],
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
                    _round_up(size, SEGMENT_BYTES // dtype.itemsize * int(shards)),
                    tuple(position[i] for i in order),
                    tuple(shapes[i] for i in order),
                    segments,
                )
            )
        leaves = tuple(placed[i] for i in chosen)
        names = row_names(groups, trust=trust)
        return MemoryPlan(leaves, treedef, tuple(trained), tuple(arenas), names)

    @property
    def num_groups(self) -> int:
        """How many sets of hyperparameters there are."""
        return len(self.groups)

    @property
    def num_parameters(self) -> int:
        """Trained parameters, without padding."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in one series."""
        used = sum(leaf.size * self.arenas[leaf.arena].dtype.itemsize for leaf in self.leaves)
        return self.bytes() - used

    def by_path(self, values: Any) -> dict[str, Any]:
        """Values that stand one for each trained leaf, by the leaf's path.

        Args:
            values: [..., n] for n leaves, in the order of `leaves`, such as
                `metrics["leaf_grad_norm"]`.

        Raises:
            ValueError: if there are not as many.
        """
        if not isinstance(values, jax.core.Tracer):
            values = np.asarray(values)  # One transfer, and no dispatch for each leaf.
        if values.ndim == 0 or values.shape[-1] != len(self.leaves):
            raise ValueError(
                f"values: expected one for each of {len(self.leaves)} leaves, got shape "
                f"{values.shape}"
            )
        return {leaf.path: values[..., i] for i, leaf in enumerate(self.leaves)}

    def bytes(self, series: int = 1) -> int:
        """Bytes of this many series, padding included."""
        return series * sum(arena.nbytes for arena in self.arenas)

    def total_bytes(self, config: PlanConfig) -> int:
        """Bytes of all series that a configuration needs."""
        return self.bytes(config.series)

    def region_range(self, first: Region, last: Region | None = None, arena: int = 0) -> MemRange:
        """The range of consecutive regions, with the padding that follows their segments.

        Neighbouring regions meet, so that the bias-like regions are one range and the weight
        regions the next. What pads the arena for shards belongs to no region. Series G, M and V
        have the same ranges as W.

        Args:
            first, last: regions of one series, in order; `last` is `first` if None.
            arena: index into `arenas`.

        Raises:
            ValueError: if they are not in order, not of one series, or N or S, which hold no
                leaves; or if there is no such arena.
        """
        last = first if last is None else last
        if first.series != last.series or first > last:
            raise ValueError(
                f"last: expected a region of series {first.series} not before {first.name}, "
                f"got {last.name}"
            )
        if not 0 <= arena < len(self.arenas):
            raise ValueError(f"arena: expected an index into {len(self.arenas)}, got {arena}")
        starts = self._region_starts[arena]
        start, end = starts[first.base], starts[last.base + 1]
        return MemRange(start, end - start)

    @cached_property
    def _region_starts(self) -> list[list[int]]:
        """Where each region of each arena starts, and where the last one ends."""
        result = []
        for arena in self.arenas:
            leaves = [self.leaves[i] for i in arena.leaves]
            end = int(sum(arena.segments[-1, :2])) if len(arena.segments) else 0
            end = _round_up(end, SEGMENT_BYTES // arena.dtype.itemsize)
            offsets = [*(leaf.offset for leaf in leaves), end]
            firsts = np.searchsorted([leaf.region for leaf in leaves], range(len(W_REGIONS) + 1))
            result.append([offsets[i] for i in firsts])
        return result

    @cached_property
    def _hash(self) -> int:
        return hash((self.leaves, self.trained, self.arenas, self.groups))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MemoryPlan):
            return NotImplemented
        return (
            hash(self) == hash(other)
            and (self.trained, self.arenas) == (other.trained, other.arenas)
            and (self.leaves, self.treedef) == (other.leaves, other.treedef)
            and self.groups == other.groups
        )

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.leaves, self.treedef, self.trained, self.arenas, self.groups
        return MemoryPlan, fields

    def __repr__(self) -> str:
        arenas = "".join(f", {arena.dtype}[{arena.size}]" for arena in self.arenas)
        return f"MemoryPlan({len(self.leaves)} leaves, {self.num_parameters} parameters{arenas})"

    def __str__(self) -> str:
        return self.table()

    def table(self, all: bool = False) -> str:
        """The plan as text: every leaf in arena order, then the regions, then the bytes.

        Args:
            all: every leaf, where `str(plan)` leaves out the middle of more than 60.
        """
        order = [self.leaves[i] for arena in self.arenas for i in arena.leaves]
        header = ("path", "shape", "dtype", "region", "group", "rule", "offset", "size")
        shown, left_out = order, 0
        if len(order) > _MAX_ROWS and not all:
            shown, left_out = order[:_HEAD] + order[-_TAIL:], len(order) - _HEAD - _TAIL
        lines = _format_table(header, [self._leaf_row(leaf) for leaf in shown], numbers=2)
        if left_out:
            lines.insert(1 + _HEAD, f"… {left_out:,} more")

        counts = Counter((leaf.arena, leaf.region) for leaf in self.leaves)
        regions = [
            (
                str(self.arenas[i].dtype),
                region.name,
                *_numbers(count, *self.region_range(region, arena=i)),
            )
            for (i, region), count in sorted(counts.items())
        ]
        lines += ["", *_format_table(("arena", "region", "leaves", "offset", "size"), regions, 3)]
        frozen = len(self.trained) - len(self.leaves)
        lines += [
            "",
            f"{len(self.leaves):,} trained leaves, {self.num_parameters:,} parameters"
            + (f"; {frozen:,} not trained" if frozen else ""),
            f"{self.bytes():,} bytes a series, {self.padding_bytes:,} of them padding",
        ]
        return "\n".join(lines)

    def _leaf_row(self, leaf: Leaf) -> tuple[str, ...]:
        shape = "×".join(map(str, leaf.shape)) or "scalar"
        return (
            leaf.path,
            f"{shape} ({leaf.stacked} stacked)" if leaf.stacked else shape,
            leaf.dtype.name,
            leaf.region.name,
            self.groups[leaf.group],
            leaf.rule,
            *_numbers(leaf.offset, leaf.size),
        )


_MAX_ROWS, _HEAD, _TAIL = 60, 30, 20


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


def arena_dtype(leaf: Any) -> np.dtype | None:
    """The dtype of the arena that holds a leaf, from its shape and dtype; None if none does."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return None
    return _ARENA_OF.get(leaf.dtype.name)  # By name: bfloat16 and keys are not NumPy's own.


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


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _lay_out(
    unit: int,
    shapes: Sequence[tuple[int, ...]],
    axes: Sequence[int],
    groups: Sequence[int],
) -> tuple[list[int], int, np.ndarray]:
    """Offsets of the leaves, the size of all, and the segments, from the leaves in arena order."""
    counts = np.array([prod(s[:n]) for s, n in zip(shapes, axes, strict=True)], np.int64)
    sizes = np.array([prod(s[n:]) for s, n in zip(shapes, axes, strict=True)], np.int64)
    strides = -(-sizes // unit) * unit
    ends = np.cumsum(counts * strides)
    offsets = ends - counts * strides

    rows = np.where(sizes > 0, counts, 0)
    leaf = np.repeat(np.arange(len(shapes)), rows)
    piece = np.arange(len(leaf)) - (np.cumsum(rows) - rows)[leaf]  # Which slice of its leaf.
    columns = (
        offsets[leaf] + piece * strides[leaf],
        sizes[leaf],
        leaf,
        piece * sizes[leaf],
        np.array(groups)[leaf],
    )
    return offsets.tolist(), int(ends[-1]), np.stack(columns, axis=1).astype(np.int64)


def _numbers(*numbers: int) -> list[str]:
    return [f"{number:,}" for number in numbers]


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> list[str]:
    """Lines of a table; the last `numbers` columns are numbers, flush right."""
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        for c in range(len(row) - numbers, len(row)):
            cells[c] = row[c].rjust(widths[c])
        lines.append("  ".join(cells).rstrip())
    return lines
