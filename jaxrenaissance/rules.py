"""The default rules: which region a leaf belongs to, by name first.

By rank alone, attention biases of shape (heads, head_dim), biases stacked by a scan and Equinox's
convolution biases of shape (channels, 1, 1) would become weights and be decayed. So a name that is
known decides, and rank decides the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .regions import W_REGIONS, Region

Shape = tuple[int, ...]
Decision = tuple[Region, str]
"""A region of series W and the name of the rule that chose it."""

MAX_FIRST_CHANNELS = 4

_BIASES = frozenset({"bias", "b", "offset", "beta"})
_SCALES = frozenset({"scale", "gamma"})
_KERNELS = frozenset({"kernel", "weight", "w"})
_EMBEDDINGS = frozenset({"embedding", "embeddings"})

# nnx.State and Flax's boxed parameters keep the array in an attribute of what bears the name.
_WRAPPERS = frozenset({"value", "raw_value"})


def split_path(path: str) -> tuple[str, str]:
    """The path of the module that owns a leaf, and the leaf's own name."""
    parent, _, name = path.rpartition("/")
    if name in _WRAPPERS and parent:
        parent, _, name = parent.rpartition("/")
    return parent, name


def default_rule(path: str, shape: Shape, siblings: Mapping[str, Shape]) -> Decision:
    """The region of one leaf and the rule that decided, by the leaf's name and surroundings.

    The first convolution takes a look at all leaves: `classify` tells it apart.

    Args:
        path: the leaf's path, components joined by "/".
        shape: its shape without stacked axes.
        siblings: name → shape, likewise, of the leaves in the same module.
    """
    parent, name = split_path(path)
    word = name.lower()
    if word in _BIASES:
        for sibling, its_shape in siblings.items():
            if _is_norm_scale(sibling, its_shape, siblings):
                return Region.W_BN_BIAS, f"{word} beside {sibling}"
        return Region.W_FC_BIAS, word
    if _is_norm_scale(name, shape, siblings):
        return Region.W_BN_WEIGHT, word if word in _SCALES else f"{word} of a norm"
    if word in _KERNELS:
        if len(shape) >= 3 and "conv" in parent.lower():
            return Region.W_DEEP_CONV, f"{word} of a conv"
        return Region.W_FC_WEIGHT, word
    if word in _EMBEDDINGS:
        return Region.W_FC_WEIGHT, word
    # A class token (1, 1, d) is like a bias; a table of positions (1, n, d) is a weight.
    if sum(size != 1 for size in shape) <= 1:
        return Region.W_FC_BIAS, "rank ≤ 1"
    return Region.W_FC_WEIGHT, "rank ≥ 2"


def classify(paths: Sequence[str], shapes: Sequence[Shape]) -> list[Decision]:
    """`default_rule` for every leaf of a model, with the first convolution told apart.

    That is the convolution with the fewest input channels, if they are at most 4; the first of
    them in the tree's order.
    """
    split = [split_path(path) for path in paths]
    modules: dict[str, dict[str, Shape]] = {}
    for (parent, name), shape in zip(split, shapes, strict=True):
        modules.setdefault(parent, {})[name] = shape
    decisions = [
        default_rule(path, shape, modules[parent])
        for path, shape, (parent, _) in zip(paths, shapes, split, strict=True)
    ]
    first = _first_conv(
        {
            i: _input_channels(split[i][1], shapes[i])
            for i, (region, _) in enumerate(decisions)
            if region == Region.W_DEEP_CONV
        }
    )
    if first is not None:
        decisions[first] = Region.W_FIRST_CONV, "first conv"
    return decisions


def override(
    decisions: Sequence[Decision],
    rules: Callable[[str, Any], Region | None],
    paths: Sequence[str],
    leaves: Sequence[Any],
    trained: Sequence[bool],
) -> list[Decision]:
    """The decisions, with those that the user's function wants otherwise replaced."""
    decisions = list(decisions)
    for i, path in enumerate(paths):
        region = rules(path, leaves[i]) if trained[i] else None
        if region is None:
            continue
        if not isinstance(region, Region) or region not in W_REGIONS:
            raise ValueError(
                f"rules: expected a Region of series W, or None, for the leaf {path!r}, "
                f"got {region!r}"
            )
        decisions[i] = region, "rules="
    return decisions


def _is_norm_scale(name: str, shape: Shape, siblings: Mapping[str, Shape]) -> bool:
    word = name.lower()
    if word in _SCALES:
        return True
    # Equinox calls a norm's scale `weight`. Over several axes, or stacked by a vmap that `stacked=`
    # does not mention, it has the shape of its bias; the weight of a layer never has.
    return word == "weight" and (len(shape) <= 1 or siblings.get("bias") == shape)


def _input_channels(name: str, shape: Shape) -> int:
    # Equinox and torch keep (out, in, *window); Flax, Haiku and Keras (*window, in, out).
    return shape[1] if name.lower() == "weight" else shape[-2]


def _first_conv(channels: Mapping[int, int]) -> int | None:
    narrow = {i: n for i, n in channels.items() if n <= MAX_FIRST_CHANNELS}
    # Several kernels with one input channel, beside one with 2 to 4, are depthwise convolutions:
    # what they count is one channel a group.
    wider = {i: n for i, n in narrow.items() if n > 1}
    if wider and len(narrow) - len(wider) > 1:
        narrow = wider
    return min(narrow, key=lambda i: (narrow[i], i), default=None)
