"""Who takes part: ours, optax and torch, each in the forms that its users run."""

import functools
import gc
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..train_state import TrainState
from .data import random_tree
from .kinds import Kind
from .loops import Loop
from .sides import Side, optax_step, our_step
from .timing import wait

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
    """Of our kernels in one step, see `count_launches`."""
    compile_s: float | None
    peak_mib: float | None
    """What a step needs at once: parameters, gradients, moments, temporary buffers."""


class Stepper(Protocol):
    """A side of a benchmark."""

    def __call__(self) -> Any:
        """Starts a step and returns what `jax.block_until_ready` waits for."""
        ...

    def loop(self, loop: Loop) -> Callable[[], Any] | None:
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


def those_with(kind: Kind, rivals: Sequence[str]) -> list[str]:
    """The rivals that have the optimizer."""
    return [name for name in rivals if name != TORCH or kind.torch is not None]


def fits(parameters: int, rivals: Sequence[str]) -> bool:
    """Whether all states of a model fit into the device's memory, or the machine's for a CPU.

    Where the device does not tell how much it has, they are taken to fit.
    """
    limit = _memory()
    return limit is None or 4 * parameters * sum(_ARRAYS[name] for name in (OURS, *rivals)) <= limit


def _memory() -> int | None:
    if jax.default_backend() == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def free_memory(rivals: Sequence[str]) -> None:
    """What the sides of a case had, for the next case; torch would keep it for itself."""
    gc.collect()
    if TORCH in rivals and jax.default_backend() == "gpu":
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.empty_cache()


_Entered = tuple[Stepper, Facts, int]


def contestants(
    shapes: Any, kind: Kind, rivals: Sequence[str], failed: Callable[[str, Exception], Any]
) -> list[Contestant]:
    """Those that have the optimizer, compiled, on the same random values.

    Args:
        shapes: the model's.
        kind: the optimizer.
        rivals: of `RIVALS`, those to compare with.
        failed: told the name of each that cannot take part, and why.
    """
    params, gradients = random_tree(shapes, 0, 0.1), random_tree(shapes, 1, 0.01)
    makers: dict[tuple[str, str], Callable[[], _Entered]] = {
        (OURS, ""): lambda: _ours(kind, True, params, gradients),
        (OURS, "skip_nonfinite=False"): lambda: _ours(kind, False, params, gradients),
    }
    if OPTAX in rivals:
        makers[OPTAX, ""] = lambda: _optax(kind, params, gradients)
    if TORCH in rivals and kind.torch is not None:
        from .torch_sides import torch_sides

        for variant, make_side in torch_sides(*kind.torch, params, gradients).items():
            makers[TORCH, variant] = functools.partial(_torch, kind, make_side)
    result = []
    for (library, variant), make in makers.items():
        try:
            side, facts, moved = make()
            wait(side())
        except Exception as error:  # no memory, or a torch too old: each library has its own class
            failed(label(library, variant), error)
        else:
            result.append(Contestant(library, variant, side, facts, moved))
    return result


def _ours(kind: Kind, skip: bool, params: Any, gradients: Any) -> _Entered:
    side = Side(our_step, TrainState.create(params, kind.ours(skip)), gradients)
    return side, jax_facts(side), kind.our_bytes + kind.look_bytes * skip


def _optax(kind: Kind, params: Any, gradients: Any) -> _Entered:
    optimizer = kind.optax()
    # The step donates its state, and torch still needs the parameters.
    copied = jax.tree.map(jnp.copy, params)
    side = Side(optax_step(optimizer), (copied, optimizer.init(copied)), gradients)
    return side, jax_facts(side), kind.other_bytes


def _torch(kind: Kind, make_side: Callable[[], Any]) -> _Entered:
    side = make_side()
    return side, side.facts(), kind.other_bytes


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
