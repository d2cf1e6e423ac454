"""Groups: leaves with hyperparameters of their own, and how an option selects leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .paths import check_bool, check_matched, is_function, matches
from .regions import W_REGIONS, Region

Match = str | Region | Sequence[str | Region] | Callable[[str, jax.ShapeDtypeStruct], bool]
"""A pattern, a `Region` of series W, a list of these, or a function (path, shape) → bool."""

DECAYS = ("decay", "no decay")
"""Each group has a row of hyperparameters for its leaves with weight decay and one for the rest."""

TRUSTS = ("trust", "no trust")
"""With trust ratios, twice that: for its leaves that have one, and for the rest."""


class Group:
    """Leaves with hyperparameters of their own, for `groups=` of the optimizers.

    What is None is as for all other leaves. All groups are updated by the same launch.

    >>> import jax.numpy as jnp
    >>> import jaxrenaissance as jr
    >>> params = {"body": jnp.ones(2), "head": jnp.ones(2)}
    >>> optimizer = jr.sgd(0.25, groups=[jr.Group("head", scale=2)])
    >>> state = jr.TrainState.create(params, optimizer)
    >>> state = state.apply_gradients({"body": jnp.ones(2), "head": jnp.ones(2)})
    >>> state.params["body"].tolist(), state.params["head"].tolist()
    ([0.75, 0.75], [0.5, 0.5])

    Every number may be a device scalar, a traced value or a schedule, as in the optimizer itself.

    Args:
        match: which leaves: a pattern, which matches the whole path ("head/*", "*/embedding"), a
            `Region` of series W, a list of these, or a function (path, `jax.ShapeDtypeStruct`) →
            bool. It is asked about trained leaves alone.
        name: of the group, in `print(plan)`, in metrics and in `replace_hyperparams`; by default
            the patterns or regions, or the function's name.
        learning_rate: in place of the optimizer's.
        scale: a factor ≥ 0 on the optimizer's learning rate; not beside `learning_rate`.
        weight_decay: for all leaves of the group, whatever the optimizer's mask says.
        momentum, b1, b2, eps, eps_root: as in the optimizer.
        trust_coefficient: LARS's, for all leaves of the group, whatever trust_ratio_mask says.

    Raises:
        TypeError: if the name is no string.
        ValueError: if match or name is empty, both learning_rate and scale are given, or nothing.
    """

    __slots__ = ("match", "name", "values")

    match: Match
    name: str
    values: dict[str, Any]

    def __init__(
        self,
        match: Match,
        *,
        name: str | None = None,
        learning_rate: Any = None,
        scale: Any = None,
        weight_decay: Any = None,
        momentum: Any = None,
        b1: Any = None,
        b2: Any = None,
        eps: Any = None,
        eps_root: Any = None,
        trust_coefficient: Any = None,
    ) -> None:
        values = {
            "learning_rate": learning_rate,
            "scale": scale,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "b1": b1,
            "b2": b2,
            "eps": eps,
            "eps_root": eps_root,
            "trust_coefficient": trust_coefficient,
        }
        self.match = tuple(match) if isinstance(match, list) else match
        self.name = _default_name(match) if name is None else name
        self.values = {name: value for name, value in values.items() if value is not None}
        if not isinstance(self.name, str):
            raise TypeError(f"name: expected a string, got {name!r}")
        if not self.name:
            raise ValueError("name: expected a name for the group, got an empty one")
        if not self.values:
            raise ValueError(
                f"the group {self.name!r} has no hyperparameter of its own: give one of "
                f"{', '.join(values)}"
            )
        if learning_rate is not None and scale is not None:
            raise ValueError(
                f"the group {self.name!r} has both learning_rate and scale, which is a factor on "
                "the optimizer's learning rate: give one of them"
            )

    def __repr__(self) -> str:
        values = "".join(f", {name}={value!r}" for name, value in self.values.items())
        return f"Group({self.name!r}{values})"


def check_groups(groups: Any) -> tuple[Group, ...]:
    """The groups as a tuple.

    Raises:
        TypeError: if it is no sequence of `Group`s.
        ValueError: if two have the same name.
    """
    if not isinstance(groups, list | tuple) or not all(isinstance(x, Group) for x in groups):
        raise TypeError(f"groups: expected a list of jr.Group, got {groups!r}")
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"groups: two groups have the name {name!r}; give them others, name=…")
    return tuple(groups)


def rows_each(trust: bool) -> int:
    """How many rows of hyperparameters a group has, with and without trust ratios."""
    return len(DECAYS) * (len(TRUSTS) if trust else 1)


def row_names(groups: Sequence[Group], *, trust: bool) -> tuple[str, ...]:
    """The names of the rows of hyperparameters.

    Row n i + d, with i = 0 for ungrouped leaves, n `rows_each` and d = 1 where there is no weight
    decay; with trust ratios plus 2 where a leaf has none.
    """
    rows = [f"{decay}, {own}" for own in TRUSTS for decay in DECAYS] if trust else DECAYS
    return (*rows, *(f"{group.name} {row}" for group in groups for row in rows))


def assign(
    groups: Sequence[Group],
    paths: Sequence[str],
    leaves: Sequence[Any],
    regions: Sequence[Region],
) -> list[int]:
    """The number of each leaf's group, from 1; 0 where it has none. See `select`.

    Raises:
        ValueError: if a leaf is matched by two groups, or a group matches none; names them.
    """
    numbers = [0] * len(paths)
    for number, group in enumerate(groups, 1):
        selected = select(group.match, paths, leaves, regions, f"groups: {group.name!r}")
        for i in range(len(paths)):
            if not selected[i]:
                continue
            if numbers[i]:
                raise ValueError(
                    f"groups: the leaf {paths[i]!r} is matched by {groups[numbers[i] - 1].name!r} "
                    f"and by {group.name!r}; a leaf can be in one group"
                )
            numbers[i] = number
    return numbers


def select(
    match: Match,
    paths: Sequence[str],
    leaves: Sequence[Any],
    regions: Sequence[Region],
    argument: str,
) -> list[bool]:
    """Whether `match` selects each of the trained leaves.

    Args:
        match: as in `Group`.
        paths, leaves, regions: of the trained leaves; `leaves` are what a function is given.
        argument: what errors name.

    Raises:
        TypeError: if it is none of what a match can be.
        ValueError: if it, or one of its patterns, matches no trained leaf, a region is not of
            series W, or a function returns no bool.
    """
    if is_function(match):
        selected = [match(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        for path, flag in zip(paths, selected, strict=True):
            check_bool(flag, path, argument)
        selected = [bool(flag) for flag in selected]
    else:
        items: Any = match if isinstance(match, list | tuple) else [match]
        for item in items:
            if not isinstance(item, str | Region):
                raise TypeError(
                    f"{argument}: expected a pattern, a Region, a list of these or a function, "
                    f"got {match!r}"
                )
            if isinstance(item, Region) and item not in W_REGIONS:
                raise ValueError(f"{argument}: expected a region of series W, got {item.name}")
        patterns = [item for item in items if isinstance(item, str)]
        check_matched(patterns, paths, argument, trained=True)
        selected = [
            region in items or any(matches(pattern, path) for pattern in patterns)
            for path, region in zip(paths, regions, strict=True)
        ]
    if not any(selected):
        raise ValueError(f"{argument}: {_default_name(match) or match!r} matches no trained leaf")
    return selected


def _default_name(match: Any) -> str:
    if is_function(match):
        return getattr(match, "__name__", type(match).__name__)
    items = match if isinstance(match, list | tuple) else [match]
    return ", ".join(item.name if isinstance(item, Region) else str(item) for item in items)
