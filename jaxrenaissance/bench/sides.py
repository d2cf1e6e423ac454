"""A step as a benchmark runs it: jitted and donated, alone or several times in one loop."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from ..train_state import TrainState
from .launches import count_launches
from .loops import Loop, looped

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
        """Starts a step and returns the new state, which the next call donates."""
        return self._advance(self.jitted)

    def compile(self) -> Compiled:
        """Compiles the step."""
        return compile_step(self.jitted, self.state, self.gradients)

    def loop(self, loop: Loop) -> Callable[[], Any]:
        """A function that starts the steps of one compiled loop, on the same state."""
        jitted = looped(self.step, loop)
        return lambda: self._advance(jitted)

    def _advance(self, jitted: Step) -> Any:
        self.state = jitted(self.state, self.gradients)
        return self.state


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
