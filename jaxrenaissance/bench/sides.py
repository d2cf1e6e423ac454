"""A step as a benchmark runs it: jitted and donated, alone or several times in one loop."""

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from ..train_state import TrainState

Step = Callable[[Any, Any], Any]
"""(state, gradients) → state."""

FEWEST_CAPTURED = 5  # launches that XLA captures into a CUDA graph; fewer it starts one by one
_CALL = re.compile(r'custom_call_target="jaxrenaissance_(\w+)_v\d+"')
_LAYOUT = re.compile(r"\blayout = dense<[^>]*> : tensor<(\d+)xi64>")
_SEGMENTS_A_LAUNCH = {"changes": 640, "norms": 1280, "accumulate": 1280, "update_norms": 1280}
_SEGMENTS_OF_OTHERS = 1536


class Compiled(NamedTuple):
    """What compiling a step shows."""

    seconds: float
    """Until the first call could run: tracing, lowering and XLA."""
    peak_bytes: int
    """What the step needs at once: arguments, results and temporary buffers."""
    buffers: int
    """Arrays that cross at each call."""
    launches: int
    """Of our kernels in the program, see `count_launches`; 0 where it calls none of them."""


def compile_step(jitted: Any, *arguments: Any) -> Compiled:
    """Compiles a jitted step, which later calls find done."""
    start = time.perf_counter()
    compiled = jitted.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory, program = compiled.memory_analysis(), compiled.as_text()
    assert program is not None
    peak_bytes = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    launches = count_launches(program, on_gpu=jax.default_backend() == "gpu")
    return Compiled(seconds, peak_bytes, len(jax.tree.leaves(compiled.in_avals)), launches)


def count_launches(program: str, *, on_gpu: bool) -> int:
    """Launches of our kernels in the text of a compiled program.

    Each is a call of a handler. On a GPU a call launches its kernel once for each table of segments
    that it needs: a table goes in the kernel's parameters, which hold 1,536 of them, 1,280 where
    squares are added up, 640 of `changes`. On a CPU there are no tables.
    """
    launches = 0
    for line in program.splitlines():
        if (call := _CALL.search(line)) is None:
            continue
        layout = _LAYOUT.search(line) if on_gpu else None
        if layout is None:
            launches += 1
            continue
        segments = (int(layout[1]) - 2) // 5  # after the arena's size and dtype, five numbers each
        # An op's name may go on with the optimizer's, as in update_norms_adam.
        limits = [most for op, most in _SEGMENTS_A_LAUNCH.items() if call[1].startswith(op)]
        launches += -(-segments // (limits[0] if limits else _SEGMENTS_OF_OTHERS))
    return launches


def steps_a_round(launches: int, *, on_gpu: bool) -> int:
    """How many steps a round of a loop has: on a GPU two, or as many as make XLA capture it.

    A step with a backward pass has launches enough, and so is captured.

    Args:
        launches: of our kernels in a step; 0 where they are not known, which is of many others'.
        on_gpu: on a CPU, one: XLA removes the barrier between steps before it fuses operations, and
            would make one pass of two steps of optax.
    """
    if not on_gpu:
        return 1
    return max(2, -(-FEWEST_CAPTURED // launches)) if launches else 2


class Side:
    """A donated step that carries its state from call to call.

    Args:
        step: (state, gradients) → state.
        state: what it starts from.
        gradients: what every step is given.
    """

    def __init__(self, step: Step, state: Any, gradients: Any) -> None:
        self.step, self.state, self.gradients = step, state, gradients
        self.jitted = jax.jit(step, donate_argnums=0)
        self._launches = 0  # not known before it is compiled

    def __call__(self) -> Any:
        """Starts a step and returns the new state, which the next call donates."""
        return self._advance(self.jitted)

    def compile(self) -> Compiled:
        """Compiles the step."""
        compiled = compile_step(self.jitted, self.state, self.gradients)
        self._launches = compiled.launches
        return compiled

    def loop(self, steps: int) -> Callable[[], Any]:
        """A function that starts ``steps`` steps in one compiled loop, on the same state.

        Compile the step before, which tells how many launches a round has.
        """
        unroll = steps_a_round(self._launches, on_gpu=jax.default_backend() == "gpu")
        jitted = looped(self.step, steps, unroll)
        return lambda: self._advance(jitted)

    def _advance(self, jitted: Step) -> Any:
        self.state = jitted(self.state, self.gradients)
        return self.state


def looped(step: Step, steps: int, unroll: int) -> Any:
    """A jitted, donated function: ``steps`` steps in one loop, ``unroll`` of them a round.

    For XLA, the gradients behind the barrier are new ones in each round: without it, it would take
    what depends on them alone out of the loop, such as their norm. For ``unroll`` see
    `steps_a_round`.
    """

    def run(state: Any, gradients: Any) -> Any:
        def body(_: Any, state: Any) -> Any:
            return step(*jax.lax.optimization_barrier((state, gradients)))

        return jax.lax.fori_loop(0, steps, body, state, unroll=unroll)

    return jax.jit(run, donate_argnums=0)


def our_step(state: TrainState, gradients: Any) -> TrainState:
    """A step in arenas."""
    return state.apply_gradients(gradients)


def optax_step(optimizer: optax.GradientTransformation) -> Step:
    """A step of optax on leaves; its state is (params, opt_state)."""

    def step(state: Any, gradients: Any) -> Any:
        params, opt_state = state
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step
