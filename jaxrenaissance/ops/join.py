"""join: the workspaces of several devices as one, of segments that they hold together.

No kernel: sums are put in another order, and `finish` adds them up.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import native
from ..arena_layout import ArenaLayout
from ..reference.norms import norm, unit
from ..reference.words import from_words, to_words
from ..workspaces import PARTIAL, partials_start, workspace_size


class Parts(NamedTuple):
    """Whose sums are to be added up.

    Attributes:
        layout: of what each device holds.
        counts: bool [devices, segments]: whether a device's sum counts, and is not a copy of
            another's.
    """

    layout: ArenaLayout
    counts: np.ndarray


def join_workspaces(
    parts: Sequence[Parts], stacked: Sequence[jax.Array], *, products: bool, backend: str
) -> tuple[jax.Array, ...]:
    """Workspaces as if each segment were whole.

    Args:
        parts: of each workspace.
        stacked: [devices, size] each, what `norms` and its like left on every device: of the
            gradients of all arenas, then of their weights, then of the products.
        products: whether there are products.
        backend: of the ops that left them.

    Returns:
        For `finish` as many workspaces, of as many segments.
    """
    by_words = functools.partial(_join_words, parts)
    by_norms = functools.partial(_join_norms, parts, products=products)
    if backend == "xla":
        return tuple(by_norms(*stacked))
    if backend != "auto":
        return tuple(by_words(*stacked))

    def norms_in_words(*stacked: jax.Array) -> list[jax.Array]:
        norms = [
            jax.vmap(functools.partial(from_words, segments=len(own.layout.segments)))(x)
            for x, own in zip(stacked, parts, strict=True)
        ]
        sizes = [_joint_size(own) for own in parts]
        return [to_words(x, size) for x, size in zip(by_norms(*norms), sizes, strict=True)]

    def branch(platform: str) -> Callable[..., list[jax.Array]]:
        return by_words if native.available(platform) else norms_in_words

    each = {platform: branch(platform) for platform in ("cpu", "cuda")}
    return tuple(jax.lax.platform_dependent(*stacked, **each, default=norms_in_words))


def _joint_size(parts: Parts) -> int:
    start = partials_start(len(parts.layout.segments))
    return start + len(parts.counts) * (workspace_size(parts.layout) - start)


def _join_words(parts: Sequence[Parts], *stacked: jax.Array) -> list[jax.Array]:
    """Words: of every segment the sums of all devices, in place of those of one."""
    return [_join_sums(*own, x) for own, x in zip(parts, stacked, strict=True)]


def _join_sums(layout: ArenaLayout, counts: np.ndarray, stacked: jax.Array) -> jax.Array:
    start = partials_start(len(layout.segments))
    sums = stacked[:, start:].reshape(len(counts), -1, 2)
    if not counts.all():
        partials = -(-layout.segments[:, 1] // PARTIAL)
        sums = jnp.where(np.repeat(counts, partials, axis=1)[:, :, None], sums, 0)
    numbers = stacked[0, :start] * len(counts)  # So many more sums come before each segment's.
    return jnp.concatenate([numbers, sums.transpose(1, 0, 2).reshape(-1)])


def _join_norms(parts: Sequence[Parts], *stacked: jax.Array, products: bool) -> list[jax.Array]:
    """Norms, and of products cosines: as the xla backend has them."""
    own = [  # [segments, devices]
        jnp.where(counts, x, 0).T for (_, counts), x in zip(parts, stacked, strict=True)
    ]
    arenas = len(own) // 3
    joint = [norm(x) for x in (own[: 2 * arenas] if products else own)]
    if products:
        for i, cosines in enumerate(own[2 * arenas :]):
            gradients = unit(own[i], joint[i])
            weights = unit(own[arenas + i], joint[arenas + i])
            joint.append(jnp.sum(cosines * gradients * weights, axis=-1))
    return joint
