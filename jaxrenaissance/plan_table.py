"""The tables that `print(plan)` shows."""

from collections.abc import Sequence

from .arena_layout import Leaf

_MAX_ROWS, _HEAD, _TAIL = 60, 30, 20


def leaf_lines(leaves: Sequence[Leaf], groups: Sequence[str], *, all: bool) -> list[str]:
    """A line for each leaf; of very many only the first and the last, unless `all`."""
    header = ("path", "shape", "dtype", "region", "group", "rule", "offset", "size")
    shown, left_out = leaves, 0
    if len(leaves) > _MAX_ROWS and not all:
        shown, left_out = [*leaves[:_HEAD], *leaves[-_TAIL:]], len(leaves) - _HEAD - _TAIL
    lines = aligned(header, [_leaf_row(leaf, groups[leaf.group]) for leaf in shown], numbers=2)
    if left_out:
        lines.insert(1 + _HEAD, f"… {left_out:,} more")
    return lines


def _leaf_row(leaf: Leaf, group: str) -> tuple[str, ...]:
    shape = "×".join(map(str, leaf.shape)) or "scalar"
    return (
        leaf.path,
        f"{shape} ({leaf.stacked} stacked)" if leaf.stacked else shape,
        leaf.dtype.name,
        leaf.region.name,
        group,
        leaf.rule,
        *spelled(leaf.offset, leaf.size),
    )


def spelled(*numbers: int) -> list[str]:
    """Numbers with their thousands apart."""
    return [f"{number:,}" for number in numbers]


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> list[str]:
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
