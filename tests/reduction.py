"""The tree in which the native backends add up squares, in float64 NumPy: exact to the last bit."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxrenaissance.arena_layout import ArenaLayout

CHUNK = 1024


def pairwise(values: np.ndarray) -> np.float64:
    """Neighbours are added level by level, behind zeros up to a power of two."""
    padded = np.zeros(1 << max(len(values) - 1, 0).bit_length())
    padded[: len(values)] = values
    while len(padded) > 1:
        padded = padded[0::2] + padded[1::2]
    return padded[0]


def sum_of_squares(x: np.ndarray) -> np.float64:
    """Of one segment."""
    return sum_of_products(x, x)


def sum_of_products(x: np.ndarray, y: np.ndarray) -> np.float64:
    """Of one segment and another one's elements.

    A chunk of 1024 elements is 8 rows of 32 lanes of 4. Rows are added in order, the four of a lane
    crosswise, lanes by halves; chunks pairwise, of which eight make a partial.
    """
    x, y = (np.asarray(z, np.float64).reshape(-1) for z in (x, y))
    products = np.pad(x * y, (0, -len(x) % CHUNK)).reshape(-1, 8, 32, 4)
    sums = np.zeros((len(products), 32, 4))
    for row in range(8):
        sums = sums + products[:, row]
    lanes = (sums[..., 0] + sums[..., 2]) + (sums[..., 1] + sums[..., 3])
    for half in 16, 8, 4, 2, 1:
        lanes = lanes[:, :half] + lanes[:, half:]
    return pairwise(lanes[:, 0])


def segments_of(layout: ArenaLayout, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The leaves' elements, segment by segment."""
    flat = [np.asarray(x).reshape(-1) for x in leaves]
    return [
        flat[leaf][offset : offset + size] for _, size, leaf, offset, _ in layout.segments.tolist()
    ]


def total(segments: Iterable[np.ndarray]) -> np.float64:
    """Of the segments of all arenas, in order."""
    return pairwise(np.array([sum_of_squares(x) for x in segments]))
