"""The default rules: which region a leaf belongs to, by name first.

By rank alone, attention biases of shape (heads, head_dim), biases stacked by a scan and Equinox's convolution biases of shape
(channels, 1, 1) would become weights and be decayed; so a name that is known decides, and rank decides the rest.
"""

from collections.abc import Mapping, Sequence

from .regions import Region

Shape = tuple[int, ...]

_BIASES = frozenset({"bias", "b", "offset", "beta"})
_SCALES = frozenset({"scale", "gamma"})
_KERNELS = frozenset({"kernel", "weight", "w"})
_EMBEDDINGS = frozenset({"embedding", "embeddings"})

# nnx.State and boxed Flax parameters keep the array in an attribute of the variable that bears the name.
_WRAPPERS = frozenset({"value", "raw_value"})

MAX_FIRST_CHANNELS = 4


def split_path(path: str) -> tuple[str, str]:
    """The path of the module that owns a leaf, and the leaf's own name."""
    parent, _, name = path.rpartition("/")
    if name in _WRAPPERS and parent:
        parent, _, name = parent.rpartition("/")
    return parent, name


def default_rule(path: str, shape: Shape, siblings: Mapping[str, Shape]) -> tuple[Region, str]:
    """The region of one leaf and the rule that decided, by the leaf's name and surroundings.

    The first convolution is not told apart here, because that takes all leaves: see `classify`.

    Args:
        path: the leaf's path, components joined by "/".
        shape: its shape without stacked axes.
        siblings: name → shape of the leaves in the same module, this one included.
    """
    parent, name = split_path(path)
    word = name.lower()
    if word in _BIASES:
        scale = next((s for s, its in siblings.items() if _is_norm_scale(s, its, siblings)), None)
        if scale is not None:
            return Region.W_BN_BIAS, f"{word} beside {scale}"
        return Region.W_FC_BIAS, word
    if word in _SCALES:
        return Region.W_BN_WEIGHT, word
    if _is_norm_scale(name, shape, siblings):
        return Region.W_BN_WEIGHT, f"{word} of a norm"
    if word in _KERNELS:
        if len(shape) >= 3 and "conv" in parent.lower():
            return Region.W_DEEP_CONV, f"{word} of a conv"
        return Region.W_FC_WEIGHT, word
    if word in _EMBEDDINGS:
        return Region.W_FC_WEIGHT, word
    # A class token (1, 1, d) is like a bias; a position table (1, n, d) is not.
    rank = sum(size != 1 for size in shape)
    return (Region.W_FC_BIAS, "rank ≤ 1") if rank <= 1 else (Region.W_FC_WEIGHT, "rank ≥ 2")


def classify(paths: Sequence[str], shapes: Sequence[Shape]) -> list[tuple[Region, str]]:
    """`default_rule` for every leaf of a model, with the first convolution told apart.

    The first convolution is the one with the fewest input channels, if they are at most 4.
    """
    modules: dict[str, dict[str, Shape]] = {}
    for path, shape in zip(paths, shapes, strict=True):
        parent, name = split_path(path)
        modules.setdefault(parent, {})[name] = shape
    decided = [
        default_rule(path, shape, modules[split_path(path)[0]])
        for path, shape in zip(paths, shapes, strict=True)
    ]
    first = _first_conv(
        {
            i: _input_channels(split_path(paths[i])[1], shapes[i])
            for i, (region, _) in enumerate(decided)
            if region == Region.W_DEEP_CONV
        }
    )
    if first is not None:
        decided[first] = Region.W_FIRST_CONV, "first conv"
    return decided


def _is_norm_scale(name: str, shape: Shape, siblings: Mapping[str, Shape]) -> bool:
    word = name.lower()
    if word in _SCALES:
        return True
    # Equinox calls the scale `weight` too. A stacked one, or one over several axes, has its bias's shape;
    # a layer's weight never has.
    return word == "weight" and (len(shape) <= 1 or siblings.get("bias") == shape)


def _input_channels(name: str, shape: Shape) -> int:
    # Equinox and torch keep (out, in, *window); Flax, Haiku and Keras (*window, in, out).
    return shape[1] if name.lower() == "weight" else shape[-2]


def _first_conv(channels: Mapping[int, int]) -> int | None:
    narrow = {i: n for i, n in channels.items() if n <= MAX_FIRST_CHANNELS}
    single = [i for i, n in narrow.items() if n == 1]
    # Several convolutions of one input channel beside one of 2 to 4 are depthwise: their "in" is one channel a group.
    if 1 < len(single) < len(narrow):
        narrow = {i: n for i, n in narrow.items() if n > 1}
    return min(narrow, key=lambda i: (narrow[i], i), default=None)
