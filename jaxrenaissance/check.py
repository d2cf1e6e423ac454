"""check: what the host looks at now and then, since a skipped step waits for nobody."""

from typing import Any, Protocol

import jax.core
import numpy as np

from . import packed, scalars
from .train_state import TrainState


class Around(Protocol):
    """A state of `jaxrenaissance.flax`."""

    @property
    def core(self) -> TrainState:
        """The state inside."""
        ...


def core_of(state: Any) -> Any:
    """The `TrainState` in a state of `jaxrenaissance.flax`; anything else as it is."""
    core = getattr(state, "core", None)
    return core if isinstance(core, TrainState) else state


def check(state: TrainState | Around, *, max_consecutive: int = 20) -> None:
    """Raises where too many updates in a row were skipped because a gradient was not finite.

    Call it on the host when you log; it waits for the step that made the state. Of a state with
    several members, made by `jax.vmap`, it looks at each.

    Args:
        state: the state after any step, also one of `jaxrenaissance.flax`.
        max_consecutive: how many skipped updates in a row are taken for normal. Each is a call of
            `apply_gradients`, or with `accumulate=` a cycle of them. A `DynamicLossScale` backs off
            from its start by a few.

    Raises:
        FloatingPointError: with the number of the last such call and the path of the first leaf,
            in the arena's order, whose gradient had a NaN or an infinity in it.
        TypeError: if it is no state, or a traced one, inside jit.
        ValueError: if the optimizer was made with skip_nonfinite=False: nothing is looked at then.
    """
    state = core_of(state)
    if not isinstance(state, TrainState):
        raise TypeError(f"check: expected a TrainState, got a {type(state).__name__}")
    if not state.spec.skip_nonfinite:
        raise ValueError(
            "check: the optimizer was made with skip_nonfinite=False, so no call looks for "
            "non-finite gradients, and none is skipped"
        )
    if isinstance(state.ints, jax.core.Tracer):
        raise TypeError("check: the state is traced. Call check outside of jit, where one logs")
    ints = np.asarray(state.ints)
    consecutive = ints[..., scalars.CONSECUTIVE_SKIPS]
    worst = np.unravel_index(int(consecutive.argmax()), consecutive.shape)
    if consecutive[worst] <= max_consecutive:
        return
    member = f"member {', '.join(map(str, worst))}: " if worst else ""
    counters = ints[worst]
    path = _path(state, int(counters[scalars.LAST_BAD_LEAF]))
    what = "cycles of accumulation" if state.spec.accumulate else "calls of apply_gradients"
    scale = ""
    if state.spec.loss_scale:
        scale = f". The loss scale is {np.asarray(state.loss_scale)[worst]:g}"
    raise FloatingPointError(
        f"{member}the last {counters[scalars.CONSECUTIVE_SKIPS]} {what} were skipped, at step "
        f"{counters[scalars.STEP]}. In call {counters[scalars.LAST_BAD_CALL]} (the first is 0) the "
        f"gradient of {path} had a NaN or an infinity; others may, too{scale}"
    )


def _path(state: TrainState, number: int) -> str:
    if number < 0:
        return "a leaf that replan has dropped"
    return repr(state.plan.leaves[packed.arena_order(state.plan)[number]].path)
