"""A step as a benchmark runs it: jitted and donated, alone or several times in one loop."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from ..train_state import TrainState

Step = Callable[[Any, Any], Any]
"""(state, gradients) → state."""


class Compiled(NamedTuple):
    """What compiling a step shows."""

    seconds: float
    """Until the first call could run: tracing, lowering and XLA."""
    peak_bytes: int
    """What the step needs at once: arguments, results and temporary buffers."""
    buffers: int
    """Arrays that cross at each call."""
    launches: int
    """Calls of our kernels in the program; 0 where it calls none of them."""


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
    launches = program.count('custom_call_target="jaxrenaissance_')
    return Compiled(seconds, peak_bytes, len(jax.tree.leaves(compiled.in_avals)), launches)


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

    def __call__(self) -> Any:
        """Starts a step and returns an array of its result, to wait for."""
        return self._advance(self.jitted)

    def compile(self) -> Compiled:
        """Compiles the step."""
        return compile_step(self.jitted, self.state, self.gradients)

    def loop(self, steps: int) -> Callable[[], Any]:
        """A function that starts ``steps`` steps in one compiled loop, on the same state."""
        jitted = looped(self.step, steps)
        return lambda: self._advance(jitted)

    def _advance(self, jitted: Step) -> Any:
        self.state = jitted(self.state, self.gradients)
        return jax.tree.leaves(self.state)[0]


def looped(step: Step, steps: int) -> Any:
    """A jitted, donated function: ``steps`` steps in one loop.

    For XLA, the gradients behind the barrier are new ones in each round: without it, it would take
    what depends on them alone out of the loop, such as their norm. On a GPU a round has two steps,
    since XLA captures five launches or more into a CUDA graph, as in a step with a backward pass.
    On a CPU it removes the barrier before it fuses operations, and would make one pass of two steps
    of optax.
    """

    def run(state: Any, gradients: Any) -> Any:
        def body(_: Any, state: Any) -> Any:
            return step(*jax.lax.optimization_barrier((state, gradients)))

        unroll = 1 if jax.default_backend() == "cpu" else 2
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
