"""Several steps in one compiled program, so that their time is the device's."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from .timing import Seconds, device_times

FASTEST_STEP = 5e-6  # seconds that launches alone take
ROUND_SECONDS = 1e-4  # of the device, of which XLA's own part of a round is a small one
FEWEST_CAPTURED = 5  # launches that XLA captures into a CUDA graph; fewer it starts one by one
MOST_IN_A_ROUND = 8  # XLA compiles each of them anew
FEWEST_STEPS, MOST_STEPS = 6, 960


class Loop(NamedTuple):
    """Steps in one program, and how many of them a round of its loop has."""

    steps: int
    unroll: int


def loop_for(launches: int | None, least: float, seconds: float) -> Loop:
    """The loop for a step.

    On a GPU a round lasts so long that XLA's own part of it, up to tens of microseconds where
    buffers are many, is small; and it has two steps or more, so that XLA captures it. (A step with
    a backward pass has launches enough, and so is captured.) On a CPU a round is one step: XLA
    removes the barrier between steps before it fuses operations, and would make one pass of two
    steps of optax.

    Args:
        launches: of our kernels in a step; None where they are not known, which is of many others'.
        least: seconds that the step's bytes take at the copy's rate.
        seconds: how long the loop lasts about, at that rate.
    """
    fastest, unroll = least + FASTEST_STEP, 1
    if jax.default_backend() == "gpu":
        captured = math.ceil(FEWEST_CAPTURED / launches) if launches else 2
        unroll = max(2, captured, min(math.ceil(ROUND_SECONDS / fastest), MOST_IN_A_ROUND))
    steps = min(max(seconds / fastest, FEWEST_STEPS), MOST_STEPS)
    return Loop(unroll * math.ceil(steps / unroll), unroll)


def looped(step: Any, loop: Loop) -> Any:
    """A jitted, donated function: the steps of a loop, from a state and gradients to a state.

    For XLA, the gradients behind the barrier are new ones in each round: without it, it would take
    what depends on them alone out of the loop, such as their norm.
    """

    def run(state: Any, gradients: Any) -> Any:
        def body(_: Any, state: Any) -> Any:
            return step(*jax.lax.optimization_barrier((state, gradients)))

        return jax.lax.fori_loop(0, loop.steps, body, state, unroll=loop.unroll)

    return jax.jit(run, donate_argnums=0)


def loop_times(
    sides: Mapping[str, Any],
    launches: Mapping[str, int],
    least: Mapping[str, float],
    seconds: float,
    rounds: int,
) -> dict[str, Seconds]:
    """Seconds a step on the device: the sides' loops in turn.

    Args:
        sides: of `sides.Side`, by name.
        launches: of those of which they are known.
        least: see `loop_for`.
        seconds: likewise.
        rounds: see `device_times`.
    """
    loops = {name: loop_for(launches.get(name), least[name], seconds) for name in sides}
    started = {name: side.loop(loops[name]) for name, side in sides.items()}
    times = device_times(started, rounds=rounds)
    return {name: time.over(loops[name].steps) for name, time in times.items()}
