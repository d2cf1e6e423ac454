"""Static: the part of a train state that is the program's, not its data."""

import dataclasses
from typing import Any

from .packed import Dtypes
from .plan import MemoryPlan
from .spec import Spec


@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """The part of a state that is the program's: equal by identity first and by content then.

    Attributes:
        plan: where each leaf lies.
        spec: the optimizer without its numbers.
        compute_dtypes: of the leaves of `compute_params`.
    """

    plan: MemoryPlan
    spec: Spec
    compute_dtypes: Dtypes
    _hash: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Both are asked for on every call of a jitted step.
        object.__setattr__(self, "_hash", hash((self.plan, self.spec, self.compute_dtypes)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Static):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.spec == other.spec
            and self.compute_dtypes == other.compute_dtypes
            and self.plan == other.plan
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Static, (self.plan, self.spec, self.compute_dtypes)
