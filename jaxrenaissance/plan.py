"""MemoryPlan: where every leaf of a model lies in the arenas. Built from shapes alone, by no native code."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .paths import check_matched, flatten_bools, is_bool, matches, path_string
from .regions import BIAS_LIKE, WEIGHTS, MemRange, Region
from .rules import classify

SEGMENT_BYTES = 128
"""Every segment starts on a multiple of this many bytes."""

GROUPS = ("decay", "no decay")
"""Names of the groups of leaves that share hyperparameters; a leaf's group is an index into this."""

Rules = Callable[[str, jax.ShapeDtypeStruct], Region | None]
Stacked = int | Mapping[str, int] | Callable[[str, jax.ShapeDtypeStruct], int]
Trainable = Any  # str | Sequence[str] | Callable[[str, Any], bool] | a pytree of bools
Mask = Any  # None | Literal["weights"] | bool | Callable[[Any], Any] | a pytree of bools

_ARENA_OF = {
    "float32": "float32",
    "bfloat16": "float32",
    "float16": "float32",
    "float64": "float64",
}
_ARENA_DTYPES = (np.dtype("float32"), np.dtype("float64"))
_W_REGIONS = BIAS_LIKE + WEIGHTS


@dataclass(frozen=True)
class Leaf:
    """One trained leaf and its place.

    Attributes:
        path: its components joined by "/".
        shape, dtype: as in the tree, stacked axes included.
        region: its region in series W.
        rule: which rule put it there.
        group: index into `GROUPS`.
        stacked: how many leading axes come from a scan or vmap over layers; each slice is a segment.
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
        size: elements, a multiple of `128 * shards` bytes.
        leaves: indices into `MemoryPlan.leaves` in arena order: by region, then as the tree is flattened.
        shapes: the leaves' shapes, in arena order.
        segments: int64 [n, 5], read-only, in increasing start. Columns: start, size (both in elements), leaf (its
            position in arena order), offset inside the leaf (elements), group. A stacked leaf has a row for each slice;
            a leaf without elements has none.
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
    def _content(self) -> tuple[Any, ...]:
        return self.dtype, self.size, self.leaves, self.shapes, self.segments.tobytes()

    @cached_property
    def _hash(self) -> int:
        return hash(self._content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ArenaLayout):
            return NotImplemented
        return hash(self) == hash(other) and self._content == other._content

    def __repr__(self) -> str:
        return (
            f"ArenaLayout({self.dtype}[{self.size}], {len(self.leaves)} leaves, "
            f"{len(self.segments)} segments)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the cached hash, which holds in one process only.
        return ArenaLayout, (self.dtype, self.size, self.leaves, self.shapes, self.segments)


@dataclass(frozen=True)
class PlanConfig:
    """Which series an optimizer needs beside the weights. What is not needed is not allocated.

    Attributes:
        moments: how many moments it keeps for each parameter: 0, 1 (M) or 2 (M and V).
        ema: whether an exponential moving average of the weights is kept.
    """

    moments: int
    ema: bool = False

    @classmethod
    def for_kind(cls, kind: str, *, ema: bool = False) -> "PlanConfig":
        """The series that an optimizer of this kind needs.

        Raises:
            ValueError: if the kind is unknown.
        """
        if kind not in _MOMENTS:
            raise ValueError(f"kind: expected one of {', '.join(_MOMENTS)}, got {kind!r}")
        return cls(_MOMENTS[kind], ema)

    @property
    def series(self) -> int:
        """How many arenas of the plan's size are allocated, the weights' included."""
        return 1 + self.moments + self.ema


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


@dataclass(frozen=True, eq=False, repr=False)
class MemoryPlan:
    """Every leaf's path, shape, dtype, region, group and offset. Static, hashable, equal by identity first.

    All series (weights, gradients, moments, EMA) share one layout, so one offset serves all of them.

    Attributes:
        leaves: the trained leaves, as the tree is flattened.
        treedef: of the whole tree, leaves that are not trained included.
        trained: whether a leaf is trained, for each leaf of the whole tree.
        arenas: at most two: float32 first, then float64; only those that hold a leaf.
    """

    leaves: tuple[Leaf, ...]
    treedef: jtu.PyTreeDef
    trained: tuple[bool, ...]
    arenas: tuple[ArenaLayout, ...]
    _starts: tuple[tuple[int, ...], ...] = field(
        repr=False
    )  # Where each region starts, and the last one ends.

    @staticmethod
    def build(
        tree: Any,
        *,
        rules: Rules | None = None,
        stacked: Stacked | None = None,
        trainable: Trainable = None,
        mask: Mask = None,
        shards: int = 1,
    ) -> "MemoryPlan":
        """Plans the arenas of a tree of parameters.

        Float32, bfloat16 and float16 leaves lie in an arena of float32, float64 leaves in one of float64.

        Args:
            tree: arrays, tracers or `jax.ShapeDtypeStruct`s; only shapes and dtypes are looked at.
            rules: function (path, `ShapeDtypeStruct`) → `Region` of series W, or None where the default rules
                are to decide.
            stacked: how many leading axes come from a scan or vmap over layers: one number for all leaves, a mapping
                from a pattern to a number, or a function (path, `ShapeDtypeStruct`) → number. Each slice is a segment with
                its own norms, and the rules count its rank without these axes.
            trainable: which leaves are trained: a glob pattern or a list of them, a function (path, leaf) → bool, or a
                tree of bools (a prefix of the parameters' tree will do). By default all are, and each must be of a
                dtype that an arena can hold.
            mask: which leaves have weight decay. None or "weights": the weight regions. True, False: all, none. A tree
                of bools (or a prefix), or a function from the parameters to one: as in optax, it decides alone.
            shards: the arenas' size is padded to a multiple of 128 bytes times this, so that they can be cut in equal parts.

        Patterns match the whole path, `*` matches "/" too: "*/bias", "head/*".

        Raises:
            ValueError: where an argument is not one of these, a pattern matches nothing, or a trained leaf cannot lie
                in an arena. The message names the argument and the leaf's path.
        """
        if isinstance(shards, bool) or not isinstance(shards, int | np.integer) or shards < 1:
            raise ValueError(f"shards: expected a positive int, got {shards!r}")
        flat, treedef = jtu.tree_flatten_with_path(tree)
        paths = [path_string(key_path) for key_path, _ in flat]
        given = [_struct(leaf) for _, leaf in flat]
        trained = _trained(trainable, tree, paths, given)
        for path, leaf, is_trained in zip(paths, given, trained, strict=True):
            if is_trained:
                _check_holdable(path, leaf, trainable is not None)

        axes = _stacked_axes(stacked, paths, given, trained)
        slices = [tuple(getattr(x, "shape", ()))[n:] for x, n in zip(given, axes, strict=True)]
        regions = classify(paths, slices)
        if rules is not None:
            regions = _user_rules(rules, paths, given, trained, regions)
        groups = _groups(mask, tree, [region for region, _ in regions])

        chosen = [i for i, is_trained in enumerate(trained) if is_trained]
        leaves: list[Leaf | None] = [None] * len(chosen)
        arenas, starts = [], []
        for dtype in _ARENA_DTYPES:
            held = [k for k, i in enumerate(chosen) if _ARENA_OF[given[i].dtype.name] == dtype.name]
            if not held:
                continue
            held.sort(
                key=lambda k: regions[chosen[k]][0]
            )  # Stable: the tree's order inside a region.
            layout, offsets, bounds = _lay_out(
                dtype,
                tuple(held),
                tuple(given[chosen[k]].shape for k in held),
                [axes[chosen[k]] for k in held],
                [groups[chosen[k]] for k in held],
                [regions[chosen[k]][0] for k in held],
                int(shards),
            )
            for k, offset in zip(held, offsets, strict=True):
                i = chosen[k]
                region, rule = regions[i]
                shape = given[i].shape
                leaves[k] = Leaf(
                    paths[i], shape, np.dtype(given[i].dtype), region, rule, groups[i], axes[i],
                    len(arenas), offset, prod(shape),
                )  # fmt: skip
            arenas.append(layout)
            starts.append(bounds)
        return MemoryPlan(
            tuple(leaf for leaf in leaves if leaf is not None),
            treedef,
            tuple(trained),
            tuple(arenas),
            tuple(starts),
        )

    @property
    def num_groups(self) -> int:
        """How many groups of hyperparameters there are."""
        return len(GROUPS)

    @property
    def num_parameters(self) -> int:
        """Trained parameters, without padding."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def padding(self) -> int:
        """Bytes of padding in one series."""
        return self.bytes(1) - sum(
            leaf.size * self.arenas[leaf.arena].dtype.itemsize for leaf in self.leaves
        )

    def bytes(self, series: int = 1) -> int:
        """Bytes of this many series, padding included."""
        return series * sum(arena.nbytes for arena in self.arenas)

    def total_bytes(self, config: PlanConfig) -> int:
        """Bytes of weights, moments and EMA under a configuration."""
        return self.bytes(config.series)

    def region_range(self, first: Region, last: Region | None = None, arena: int = 0) -> MemRange:
        """The range of consecutive regions, padding between and behind their segments included.

        Neighbouring regions meet, so the bias-like regions and the weight regions are one contiguous range each. The
        padding for shards belongs to no region. All series share a layout: regions of G, M and V have W's ranges.

        Args:
            first, last: regions of one series, `first` not behind `last`, which is `first` by default.
            arena: index into `arenas`.

        Raises:
            ValueError: if the regions are not in order or of one series, or hold no leaves, or there is no such arena.
        """
        last = first if last is None else last
        if first.series != last.series or first > last:
            raise ValueError(
                f"last: expected a region of series {first.series}, not before {first.name}, got {last.name}"
            )
        if not 0 <= arena < len(self.arenas):
            raise ValueError(
                f"arena: expected an index into {len(self.arenas)} arenas, got {arena}"
            )
        starts = self._starts[arena]
        offset = starts[first.base]
        return MemRange(offset, starts[last.base + 1] - offset)

    @cached_property
    def _hash(self) -> int:
        return hash((self.leaves, self.trained, self.arenas))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MemoryPlan):
            return NotImplemented
        return (
            hash(self) == hash(other)
            and self.trained == other.trained
            and self.arenas == other.arenas
            and self.leaves == other.leaves
            and self.treedef == other.treedef
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryPlan, (self.leaves, self.treedef, self.trained, self.arenas, self._starts)

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
        rows = [
            (
                leaf.path,
                _shape_text(leaf),
                leaf.dtype.name,
                leaf.region.name,
                GROUPS[leaf.group],
                leaf.rule,
                f"{leaf.offset:,}",
                f"{leaf.size:,}",
            )
            for leaf in order
        ]
        columns = ("path", "shape", "dtype", "region", "group", "rule", "offset", "size")
        lines = format_table(columns, rows)
        if len(rows) > _MAX_ROWS and not all:
            left_out = len(rows) - _HEAD - _TAIL
            lines[1 + _HEAD : -_TAIL] = [f"… {left_out:,} more"]
        lines += [
            "",
            *format_table(("arena", "region", "leaves", "offset", "size"), self._region_rows()),
        ]
        frozen = len(self.trained) - len(self.leaves)
        lines += [
            "",
            f"{len(self.leaves):,} trained leaves, {self.num_parameters:,} parameters"
            + (f", {frozen:,} leaves not trained" if frozen else ""),
            f"{self.bytes():,} bytes a series, {self.padding:,} of them padding",
        ]
        return "\n".join(lines)

    def _region_rows(self) -> list[tuple[str, ...]]:
        counts = Counter((leaf.arena, leaf.region) for leaf in self.leaves)
        return [
            (
                str(arena.dtype),
                region.name,
                str(counts[i, region]),
                *(f"{x:,}" for x in self.region_range(region, arena=i)),
            )
            for i, arena in enumerate(self.arenas)
            for region in _W_REGIONS
        ]


_MAX_ROWS, _HEAD, _TAIL = 60, 30, 20


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, the header first, columns padded to their widest entry and numbers to the right."""
    table = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    numeric = [
        bool(rows) and all(row[c][:1].isdigit() for row in rows) for c in range(len(columns))
    ]
    return [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in table
    ]


def _shape_text(leaf: Leaf) -> str:
    text = "×".join(map(str, leaf.shape)) or "()"
    return f"{text} ({leaf.stacked} stacked)" if leaf.stacked else text


def _struct(leaf: Any) -> Any:
    """Shape and dtype of an array; anything else (a frozen leaf may be anything) as it is."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
    return leaf


def _check_holdable(path: str, leaf: Any, chosen: bool) -> None:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and getattr(dtype, "name", None) in _ARENA_OF:
        return
    what = f"a {type(leaf).__name__}, not an array" if dtype is None else f"of dtype {dtype}"
    advice = (
        "trainable= selects it: exclude it there"
        if chosen
        else "leave it out of training with trainable= (a pattern, a function or a tree of bools)"
    )
    raise ValueError(
        f"the leaf {path!r} is {what}; an arena holds float32, bfloat16, float16 and float64. Convert it, or {advice}"
    )


def _trained(
    trainable: Trainable, tree: Any, paths: Sequence[str], leaves: Sequence[Any]
) -> list[bool]:
    if trainable is None:
        return [True] * len(paths)
    if isinstance(trainable, str):
        trainable = [trainable]
    if (
        isinstance(trainable, list | tuple)
        and trainable
        and all(isinstance(p, str) for p in trainable)
    ):
        check_matched(trainable, paths, "trainable")
        return [any(matches(pattern, path) for pattern in trainable) for path in paths]
    if _is_function(trainable):
        flags = [trainable(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        for path, flag in zip(paths, flags, strict=True):
            if not is_bool(flag):
                raise ValueError(
                    f"trainable: the function returned {flag!r} for {path!r}, expected a bool"
                )
        flags = [bool(flag) for flag in flags]
    else:
        flags = flatten_bools(trainable, tree, "trainable")
    if not any(flags):
        raise ValueError("trainable: selects no leaf, so there is nothing to train")
    return flags


def _stacked_axes(
    stacked: Stacked | None, paths: Sequence[str], leaves: Sequence[Any], trained: Sequence[bool]
) -> list[int]:
    if stacked is None:
        return [0] * len(paths)
    axes: list[Any]
    if isinstance(stacked, Mapping):
        check_matched(stacked, paths, "stacked")
        axes = [_stacked_by_pattern(stacked, path) for path in paths]
    elif callable(stacked):
        axes = [
            stacked(path, leaf) if t else 0
            for path, leaf, t in zip(paths, leaves, trained, strict=True)
        ]
    else:
        axes = [stacked if t else 0 for t in trained]
    for path, leaf, n in zip(paths, leaves, axes, strict=True):
        rank = len(getattr(leaf, "shape", ()))
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or not 0 <= n <= rank:
            raise ValueError(
                f"stacked: expected an int from 0 to {rank} (its rank) for the leaf {path!r}, got {n!r}"
            )
    return [int(n) for n in axes]


def _stacked_by_pattern(stacked: Mapping[str, int], path: str) -> int:
    found = {pattern: n for pattern, n in stacked.items() if matches(pattern, path)}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"stacked: the leaf {path!r} is matched by patterns that disagree: {found}"
        )
    return next(iter(found.values()), 0)


def _user_rules(
    rules: Rules,
    paths: Sequence[str],
    leaves: Sequence[Any],
    trained: Sequence[bool],
    defaults: list[tuple[Region, str]],
) -> list[tuple[Region, str]]:
    decided = list(defaults)
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        region = rules(path, leaf) if trained[i] else None
        if region is None:
            continue
        if not isinstance(region, Region) or region not in _W_REGIONS:
            raise ValueError(
                f"rules: expected a Region of series W or None for the leaf {path!r}, got {region!r}"
            )
        decided[i] = region, "rules="
    return decided


def _is_function(value: Any) -> bool:
    # A tree of bools may be callable as well: an Equinox module with a forward pass.
    return callable(value) and jtu.all_leaves([value])


def _groups(mask: Mask, tree: Any, regions: Sequence[Region]) -> list[int]:
    if mask is None or (isinstance(mask, str) and mask == "weights"):
        return [int(region in BIAS_LIKE) for region in regions]
    if isinstance(mask, str):
        raise ValueError(
            f'mask: expected None, "weights", a bool, a tree of bools or a function, got {mask!r}'
        )
    if _is_function(mask):
        mask = mask(tree)
    return [int(not decays) for decays in flatten_bools(mask, tree, "mask")]


def _lay_out(
    dtype: np.dtype,
    held: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
    axes: Sequence[int],
    groups: Sequence[int],
    regions: Sequence[Region],
    shards: int,
) -> tuple[ArenaLayout, list[int], tuple[int, ...]]:
    """One arena from its leaves in arena order: the layout, the leaves' offsets and the regions' bounds."""
    unit = SEGMENT_BYTES // dtype.itemsize
    slices = np.array([prod(shape[:n]) for shape, n in zip(shapes, axes, strict=True)], np.int64)
    lengths = np.array([prod(shape[n:]) for shape, n in zip(shapes, axes, strict=True)], np.int64)
    strides = -(-lengths // unit) * unit
    offsets = np.concatenate([[0], np.cumsum(slices * strides)])

    rows = np.where(lengths > 0, slices, 0)
    leaf = np.repeat(np.arange(len(shapes)), rows)
    index = np.arange(len(leaf)) - (np.cumsum(rows) - rows)[leaf]  # Of the slice inside its leaf.
    segments = np.stack(
        [
            offsets[leaf] + index * strides[leaf],
            lengths[leaf],
            leaf,
            index * lengths[leaf],
            np.array(groups, np.int64)[leaf],
        ],
        axis=1,
    ).astype(np.int64)
    total = int(offsets[-1])
    layout = ArenaLayout(
        dtype, -(-total // (unit * shards)) * unit * shards, held, shapes, segments
    )

    firsts = np.searchsorted(np.array(regions), np.arange(len(_W_REGIONS) + 1))
    return layout, offsets[:-1].tolist(), tuple(offsets[firsts].tolist())
