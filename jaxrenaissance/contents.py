"""Contents: what a state consists of, for the modules that make one or change it as a whole."""

from typing import Any, NamedTuple

import jax

from .static import Static
from .step import Buffers


class Contents(NamedTuple):
    """What a state consists of, concrete or abstract."""

    static: Static
    buffers: Buffers
    frozen: tuple[Any, ...]
    extra: Any
    ema_extra: Any

    def fields(self) -> dict[str, Any]:
        """The fields of the `TrainState` that consists of it."""
        own = self._asdict()
        return own.pop("buffers")._asdict() | own


def refuse_members(ints: jax.Array, method: str, call: str) -> None:
    """Raises where a state has leading axes, as one that vmap made."""
    if ints.ndim != 1:
        raise ValueError(
            f"{method}: the state holds {ints.shape[:-1]} members, made by jax.vmap. Use it under "
            f"jax.vmap too: jax.vmap(lambda state, …: {call})(state, …)"
        )
