"""Who takes part: ours, optax and torch, each in the forms that its users run."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..train_state import TrainState
from .data import random_tree
from .kinds import Kind
from .sides import Side, optax_step, our_step

OURS, OPTAX, TORCH = "jaxrenaissance", "optax", "torch"
RIVALS = (OPTAX, TORCH)
_ARRAYS = {OURS: 2 * 3 + 2, OPTAX: 3, TORCH: 3 * 4 + 2}
"""As large as the model, at most: two or three states, gradients, what `foreach` writes between."""


def label(library: str, variant: str) -> str:
    """A library, with the variant where there are several."""
    return f"{library}, {variant}" if variant else library


class Facts(NamedTuple):
    """What is known of a step without timing it; None where it is not known."""

    backend: str
    launches: int | None
    """Kernels in one step."""
    compile_s: float | None
    peak_mib: float | None
    """What a step needs at once: parameters, gradients, moments, temporary buffers."""


class Stepper(Protocol):
    """A side of a benchmark."""

    def __call__(self) -> Any:
        """Starts a step and returns what `jax.block_until_ready` waits for."""
        ...

    def loop(self, steps: int) -> Callable[[], Any] | None:
        """What starts several steps that need nothing of the host, where there is such a thing."""
        ...


class Contestant(NamedTuple):
    """One row of a benchmark, before it is timed."""

    library: str
    variant: str
    side: Stepper
    facts: Facts
    bytes_per_parameter: int

    @property
    def name(self) -> str:
        """That no other row of the model and optimizer has."""
        return label(self.library, self.variant)


def why_not_torch() -> str | None:
    """The reason why torch cannot take part here, or None where it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch  # pyright: ignore[reportMissingImports]

    if jax.default_backend() == "cpu":
        return None
    if jax.default_backend() != "gpu" or not torch.cuda.is_available():
        return f"torch sees no device of the platform that JAX uses, {jax.default_backend()}"
    return None


def fits(parameters: int, rivals: Sequence[str]) -> bool:
    """Whether all states of a model fit into the device's memory, or the machine's for a CPU."""
    if jax.default_backend() == "cpu":
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return 4 * parameters * sum(_ARRAYS[name] for name in (OURS, *rivals)) <= limit


def contestants(shapes: Any, kind: Kind, rivals: Sequence[str]) -> list[Contestant]:
    """Those that have the optimizer, compiled, on the same random values.

    Args:
        shapes: the model's.
        kind: the optimizer.
        rivals: of `RIVALS`, those to compare with.
    """
    params, gradients = random_tree(shapes, 0, 0.1), random_tree(shapes, 1, 0.01)
    result = []
    for skip, variant in ((True, ""), (False, "skip_nonfinite=False")):
        state = TrainState.create(params, kind.ours(skip))
        side = Side(our_step, state, gradients)
        moved = kind.our_bytes + kind.look_bytes * skip
        result.append(Contestant(OURS, variant, side, jax_facts(side), moved))
    if OPTAX in rivals:
        optimizer = kind.optax()
        # The step donates its state, and torch still needs the parameters.
        copied = jax.tree.map(jnp.copy, params)
        side = Side(optax_step(optimizer), (copied, optimizer.init(copied)), gradients)
        result.append(Contestant(OPTAX, "", side, jax_facts(side), kind.other_bytes))
    if TORCH in rivals and kind.torch is not None:
        from .torch_sides import torch_sides

        name, arguments = kind.torch
        for variant, side in torch_sides(name, arguments, params, gradients).items():
            result.append(Contestant(TORCH, variant, side, side.facts(), kind.other_bytes))
    return result


def jax_facts(side: Side) -> Facts:
    """What compiling shows of a step in JAX. How many kernels XLA makes, it does not."""
    compiled = side.compile()
    platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    native = compiled.launches > 0
    return Facts(
        platform if native else "xla",
        compiled.launches if native else None,
        compiled.seconds,
        compiled.peak_bytes / 2**20,
    )
