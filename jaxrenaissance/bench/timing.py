"""Times of steps and of the device's own copy.

Sides alternate in one process; times are medians over rounds, with their spread.
"""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from .data import random_values

WARM_UP_CALLS = 4  # compilation, and what a runtime does after its first executions
FEWEST_MORE_CALLS = 3  # in flight, so that the first one's part is a small one
MOST_COPIED_BYTES = 2**33  # read and written; a copy is no faster above it
COPIED_IN_A_CALL, MOST_COPIES = 2**26, 32
AWAKE_SECONDS = 3e-4
# Of a CPU, where starting threads, and ending together, takes some 50 µs.
COPIED_IN_A_CALL_ON_CPU, MOST_COPIES_ON_CPU = 2**29, 256


class Seconds(NamedTuple):
    """The median of a time over rounds, and its spread: half the distance of the quartiles."""

    median: float
    spread: float

    def over(self, count: int) -> "Seconds":
        """The time of one of ``count`` that were timed together."""
        return Seconds(self.median / count, self.spread / count)

    def ties(self, other: "Seconds") -> bool:
        """Whether the two are no further apart than their spreads together."""
        return abs(self.median - other.median) <= self.spread + other.spread


def alternate(
    sides: Mapping[str, Callable[[], Any]], *, rounds: int, seconds: float = 0.02
) -> dict[str, Seconds]:
    """Times the sides in turn, so that a machine that slows down slows all of them.

    Args:
        sides: by name, a function that starts the work and returns its results; the first array
            of them is waited for, since those of one program are there at once.
        rounds: measured rounds.
        seconds: how long a round of a side lasts at least: calls follow each other without waiting,
            so that the time of one is the device's where that is longer than the host's.

    Returns:
        Seconds a call for each side.
    """
    return _in_turn(sides, lambda side, calls: _seconds(side, calls) / calls, 1, rounds, seconds)


def device_times(
    sides: Mapping[str, Callable[[], Any]], *, rounds: int, seconds: float = 0.02
) -> dict[str, Seconds]:
    """Seconds a call on the device alone: what each further call in flight adds to one.

    The host's part of the first call, and waiting for the last one, are in both times and go out.
    Where the host takes longer for a call than the device, the time is the host's.

    Args:
        sides: see `alternate`.
        rounds: likewise.
        seconds: how long the further calls last at least; there are three or more.
    """

    def more(side: Callable[[], Any], calls: int) -> float:
        alone = _seconds(side, 1)
        return (_seconds(side, 1 + calls) - alone) / calls

    return _in_turn(sides, more, FEWEST_MORE_CALLS, rounds, seconds)


def _in_turn(
    sides: Mapping[str, Callable[[], Any]],
    measure: Callable[[Callable[[], Any], int], float],
    fewest_calls: int,
    rounds: int,
    seconds: float,
) -> dict[str, Seconds]:
    calls = {}
    for name, side in sides.items():
        single = min(_seconds(side, 1) for _ in range(WARM_UP_CALLS))
        calls[name] = max(fewest_calls, round(seconds / single))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(measure(side, calls[name]))
    return {name: summary(values) for name, values in times.items()}


def _seconds(side: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls - 1):
        side()
    wait(side())
    return time.perf_counter() - start


def wait(result: Any) -> None:
    """Waits for the first array of a program's results, and so for all of them."""
    jax.block_until_ready(jax.tree.leaves(result)[:1])


def call_times(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Seconds]:
    """Seconds until a call returns, the device being idle before it, and the host awake.

    In training, a step follows itself. So each side makes a call before the one that counts, which
    brings back what the other sides have put out of the processor's caches. And a processor that
    has waited for a device is slow at first; before the call that counts it is kept awake.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + WARM_UP_CALLS):
        for name, side in sides.items():
            wait(side())
            _stay_awake(AWAKE_SECONDS)
            start = time.perf_counter()
            result = side()
            end = time.perf_counter()
            wait(result)
            if i >= WARM_UP_CALLS:
                times[name].append(end - start)
    return {name: summary(values) for name, values in times.items()}


def _stay_awake(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(0)  # other threads, which free buffers, may have the interpreter meanwhile


def summary(values: list[float]) -> Seconds:
    """The median of times and their spread."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return Seconds(middle, (high - low) / 2)


def copy_rate(nbytes: int, *, rounds: int = 9) -> float:
    """Bytes a second, read and written, of the device's own copy of ``nbytes`` in all.

    On a GPU that is XLA's copy, a memcpy of the driver. On a CPU it is NumPy's, by as many threads
    as XLA has, into memory that is there already; which may be in huge pages, as the memory of a
    step is not. A processor reads the lines that it is going to overwrite, unless memcpy goes
    around its caches, as it does for hundreds of megabytes. That is not counted, so that a step in
    place may reach 1.5 times the rate.

    A call copies several small arrays, or its time would be the host's. On a CPU the rate of less
    than a few megabytes is too low nevertheless, by what Python takes for each.
    """
    nbytes = min(nbytes, MOST_COPIED_BYTES)
    size = max(nbytes // 8, 1)
    if jax.default_backend() == "cpu":
        copies = min(max(COPIED_IN_A_CALL_ON_CPU // nbytes, 1), MOST_COPIES_ON_CPU)
        copy = _copy_on_cpu(size, copies)
    else:
        copies = min(max(COPIED_IN_A_CALL // nbytes, 1), MOST_COPIES)
        copy = _copy_on_device(size, copies)
    seconds = alternate({"copy": copy}, rounds=rounds)["copy"]
    return 8 * size * copies / seconds.median


def num_cores() -> int:
    """Those that this process may use, and so as many threads as XLA has on a CPU."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _copy_on_device(size: int, copies: int) -> Callable[[], Any]:
    # Copies that may not be shared: each has a source of its own.
    sources = [jax.numpy.asarray(random_values(size, seed)) for seed in range(copies)]
    copy = jax.jit(lambda arrays: [jax.numpy.copy(array) for array in arrays])
    return lambda: copy(sources)


def _copy_on_cpu(size: int, copies: int) -> Callable[[], Any]:
    source = random_values(size)
    target = np.empty_like(source)
    bounds = [size * i // num_cores() for i in range(num_cores() + 1)]
    slices = [slice(low, high) for low, high in itertools.pairwise(bounds) if low < high]
    pool = ThreadPoolExecutor(len(slices))

    def copy_one(part: slice) -> None:
        for _ in range(copies):
            np.copyto(target[part], source[part])

    return lambda: list(pool.map(copy_one, slices))
