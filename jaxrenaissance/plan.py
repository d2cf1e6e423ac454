"""MemoryPlan: where every leaf of a model lies in the arenas, from shapes alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.core
import jax.tree_util as jtu
import numpy as np

from . import plan_table, planning
from .arena_layout import SEGMENT_BYTES, ArenaLayout, Leaf, round_up
from .groups import Group
from .placement import Placement
from .planning import NO_TRUST, Rules, Stacked
from .regions import W_REGIONS, MemRange, Region

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
        shards: over how many devices each segment is cut; layouts and offsets are then those of
            the piece that each of them holds.
        placement: where the pieces lie; None on a single device.
    """

    leaves: tuple[Leaf, ...]
    treedef: jtu.PyTreeDef  # pyright: ignore[reportInvalidTypeForm]: JAX exports a variable
    trained: tuple[bool, ...]
    arenas: tuple[ArenaLayout, ...]
    groups: tuple[str, ...]
    shards: int = 1
    placement: Placement | None = None

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
        placement: Placement | None = None,
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
            shards: over how many devices each segment is cut, in whole lines of 128 bytes, as
                `sharding="zero1"` of `TrainState.create` does it.
            placement: over which devices, where they are known: in place of `shards`.

        Raises:
            TypeError: if groups is no list of `Group`s, or a match is none of what it can be.
            ValueError: where an argument is none of these, a pattern matches no leaf, a leaf is
                matched by two groups, or a trained leaf cannot lie in an arena. It names the
                argument and the leaf's path.
        """
        fields = planning.build(
            tree,
            rules=rules,
            stacked=stacked,
            trainable=trainable,
            mask=mask,
            trust_ratio_mask=trust_ratio_mask,
            groups=groups,
            shards=shards,
            placement=placement,
        )
        return MemoryPlan(*fields, shards if placement is None else placement.shards, placement)

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
        """Bytes of padding in one series, of all devices together that share one."""
        if self.shards == 1:
            used = sum(int(x.segments[:, 1].sum()) * x.dtype.itemsize for x in self.arenas)
        else:
            used = sum(leaf.size * self.arenas[leaf.arena].dtype.itemsize for leaf in self.leaves)
        return self.bytes() * self.shards - used

    def leaves_of(self, arena: int) -> tuple[Leaf, ...]:
        """The leaves of an arena, in its order."""
        return tuple(self.leaves[i] for i in self.arenas[arena].leaves)

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
        """Bytes of this many series on each device, padding included."""
        return series * sum(arena.nbytes for arena in self.arenas)

    def total_bytes(self, config: PlanConfig) -> int:
        """Bytes of all series that a configuration needs, on each device."""
        return self.bytes(config.series)

    def region_range(self, first: Region, last: Region | None = None, arena: int = 0) -> MemRange:
        """The range of consecutive regions, with the padding that follows their segments.

        Neighbouring regions meet, so that the bias-like regions are one range and the weight
        regions the next. Series G, M and V have the same ranges as W; where devices share the
        arenas, each of their pieces has them.

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
            end = round_up(end, SEGMENT_BYTES // arena.dtype.itemsize)
            offsets = [*(leaf.offset for leaf in leaves), end]
            firsts = np.searchsorted([leaf.region for leaf in leaves], range(len(W_REGIONS) + 1))
            result.append([offsets[i] for i in firsts])
        return result

    @cached_property
    def _hash(self) -> int:
        return hash((self.leaves, self.trained, self.arenas, self.groups, self.placement))

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
            and (self.groups, self.shards) == (other.groups, other.shards)
            and self.placement == other.placement
        )

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.leaves, self.treedef, self.trained, self.arenas, self.groups
        return MemoryPlan, (*fields, self.shards, self.placement)

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
        lines = plan_table.leaf_lines(order, self.groups, all=all)
        counts = Counter((leaf.arena, leaf.region) for leaf in self.leaves)
        regions = [
            (
                str(self.arenas[i].dtype),
                region.name,
                *plan_table.spelled(count, *self.region_range(region, arena=i)),
            )
            for (i, region), count in sorted(counts.items())
        ]
        header = ("arena", "region", "leaves", "offset", "size")
        lines += ["", *plan_table.aligned(header, regions, numbers=3)]
        frozen = len(self.trained) - len(self.leaves)
        lines += [
            "",
            f"{len(self.leaves):,} trained leaves, {self.num_parameters:,} parameters"
            + (f"; {frozen:,} not trained" if frozen else ""),
            f"{self.bytes():,} bytes a series"
            + (
                f", {self.padding_bytes:,} of them padding"
                if self.shards == 1
                else f" on each of {self.shards:,} devices, {self.padding_bytes:,} of all of them "
                "padding"
            ),
        ]
        return "\n".join(lines)
