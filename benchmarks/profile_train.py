"""Where the time of a train step goes on a GPU: our kernels, all others, what overlaps, what idles.

    python benchmarks/profile_train.py [--models resnet50_32,resnet50_224,gpt2] [--json FILE]

JAX's profiler records some steps of the sides "ours" of bench_train.py. XLA replays no CUDA graph
while it runs, but starts kernels one by one, so that the device may idle more than in training.
"""

import argparse
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from bench_train import MODELS
from jax.profiler import ProfileData

from jaxrenaissance.bench.report import check_writable, report

WARM_UP = 4
_OURS = re.compile(r"jaxrenaissance.*?((?:[A-Z][a-z]+)+)Kernel")


class Event(NamedTuple):
    """A kernel or a copy on the device; in nanoseconds."""

    name: str
    start: float
    end: float


def device_events(folder: Path) -> list[Event]:
    """What the profiler saw on the streams of the GPU.

    Raises:
        RuntimeError: if there is nothing, or more than one GPU.
    """
    events, devices = [], set()
    for path in folder.rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    devices.add(plane.name)
                    events += [Event(e.name, e.start_ns, e.end_ns) for e in line.events]
    if len(devices) != 1:
        raise RuntimeError(f"the profiler saw {len(devices)} GPUs at work: this needs JAX on one")
    return events


def kind(name: str) -> str:
    """Our kernel's name without what follows "Kernel"; "others" for all that is not ours."""
    ours = _OURS.search(name)
    return ours[1] if ours else "others"


def covered(events: Iterable[Event]) -> float:
    """Nanoseconds in which at least one of them runs."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        total += max(event.end - max(event.start, end), 0.0)
        end = max(end, event.end)
    return total


def rows_of(events: list[Event], steps: int) -> list[dict[str, Any]]:
    """For each kind of kernel (or copy), and in all: how many a step, their time, its part.

    A kind's "alone_us" is the time in which nothing of another kind runs.
    """
    kinds: dict[str, list[Event]] = {}
    for event in events:
        kinds.setdefault(kind(event.name), []).append(event)
    busy = covered(events)
    whole = max(event.end for event in events) - min(event.start for event in events)
    groups = {**kinds, "ours, in all": [e for k, v in kinds.items() if k != "others" for e in v]}
    rows = []
    for name, own in sorted(groups.items(), key=lambda item: covered(item[1])):
        mine = {id(event) for event in own}
        alone = busy - covered(event for event in events if id(event) not in mine)
        rows.append(
            {
                "kernel": name,
                "a_step": len(own) / steps,
                "us": covered(own) / steps / 1e3,
                "alone_us": alone / steps / 1e3,
                "of_the_busy_time": covered(own) / busy,
            }
        )
    return [*rows, {"kernel": "idle", "us": (whole - busy) / steps / 1e3}]


def profile(model: str, steps: int) -> list[dict[str, Any]]:
    """The rows of one model."""
    side = MODELS[model](False)["ours"]()
    for _ in range(WARM_UP):
        jax.block_until_ready(side())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            losses = [side() for _ in range(steps)]
            jax.block_until_ready(losses)
        return [{"model": model, **row} for row in rows_of(device_events(Path(folder)), steps)]


def main() -> None:
    """Profiles from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="resnet50_32,resnet50_224,gpt2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    check_writable(args.json)
    rows = []
    for model in args.models.split(","):
        rows += profile(model, args.steps)
        print(f"{model} done", flush=True)
    report("Time of a train step by kernels", rows, args.json)


if __name__ == "__main__":
    main()
