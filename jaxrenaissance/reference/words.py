"""Norms as a workspace's words, where a reference is lowered in place of a primitive.

A primitive's types are the same on every platform; and where it is lowered, nothing is
differentiated any more, so that words lose nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..workspaces import norm_dtype, workspace_size

Reference = Callable[..., Sequence[jax.Array]]


def results_in_words(reference: Reference, index: int) -> Reference:
    """The reference with the norms by segment, its results from `index` on, as workspaces."""

    def lowered(*operands: jax.Array, **static: Any) -> list[jax.Array]:
        results = list(reference(*operands, **static))
        size = workspace_size(static["layout"])
        return [*results[:index], *(to_words(x, size) for x in results[index:])]

    return lowered


def operands_in_words(reference: Reference, index: int) -> Reference:
    """The reference with the norms by segment, its operands from `index` on, as workspaces.

    They come back as they are, as the results from `index` on. What follows is no workspace.
    """

    def lowered(*operands: jax.Array, **static: Any) -> list[jax.Array]:
        end = index + len(static["segments"])
        workspaces = operands[index:end]
        norms = map(from_words, workspaces, static["segments"])
        results = list(reference(*operands[:index], *norms, *operands[end:], **static))
        return [*results[:index], *workspaces, *results[end:]]

    return lowered


def to_words(norms: jax.Array, size: int) -> jax.Array:
    """Norms as a workspace of so many words."""
    words = jax.lax.bitcast_convert_type(norms, np.int32).reshape(-1)
    return jnp.pad(words, (0, size - words.size))


def from_words(workspace: jax.Array, segments: int) -> jax.Array:
    """The norms of so many segments that `to_words` made words of."""
    dtype = norm_dtype()
    words = workspace[: segments * (dtype.itemsize // 4)]
    if dtype == np.float64:
        words = words.reshape(segments, 2)
    return jax.lax.bitcast_convert_type(words, dtype)
