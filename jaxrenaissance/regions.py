"""Regions: what a stretch of an arena means, and the contract of the two groups.

A leaf of the model has a *meaning* (the bias of a normalisation, the kernel of a convolution, …)
and lies in a *series*: the weights W, the gradients G, the first moments M, the second moments V.
A region is one meaning in one series. All series of a plan share one layout, so one offset serves
all of them.

Two groups of meanings are consecutive by contract, so that each is one range of every arena:

* `BIAS_LIKE`: biases and scales of norms, all other biases. No weight decay, no trust ratio.
* `WEIGHTS`: dense weights (embeddings among them) and convolutions.
"""

from enum import IntEnum
from typing import NamedTuple


class Region(IntEnum):
    """One meaning in one series. The numbers are fixed: they order the leaves inside an arena."""

    W_BN_BIAS = 0
    W_BN_WEIGHT = 1
    W_FC_BIAS = 2
    W_FC_WEIGHT = 3
    W_FIRST_CONV = 4
    W_DEEP_CONV = 5

    G_BN_BIAS = 6
    G_BN_WEIGHT = 7
    G_FC_BIAS = 8
    G_FC_WEIGHT = 9
    G_FIRST_CONV = 10
    G_DEEP_CONV = 11

    M_BN_BIAS = 12
    M_BN_WEIGHT = 13
    M_FC_BIAS = 14
    M_FC_WEIGHT = 15
    M_FIRST_CONV = 16
    M_DEEP_CONV = 17

    V_BN_BIAS = 18
    V_BN_WEIGHT = 19
    V_FC_BIAS = 20
    V_FC_WEIGHT = 21
    V_FIRST_CONV = 22
    V_DEEP_CONV = 23

    N = 24  # One trust ratio a tensor.
    S_SCALAR_FP32 = 25
    S_SCALAR_INT32 = 26

    @property
    def series(self) -> str:
        """The series: "W", "G", "M", "V", "N" or "S"."""
        return self.name[0]

    @property
    def base(self) -> "Region":
        """The region of the same meaning in series W.

        Raises:
            ValueError: for N and S, which hold no leaves.
        """
        if self >= Region.N:
            raise ValueError(f"{self.name} holds no leaves, so series W has no such region")
        return Region(self % len(W_REGIONS))


class MemRange(NamedTuple):
    """A range of an arena, in elements."""

    offset: int
    size: int


BIAS_LIKE = (Region.W_BN_BIAS, Region.W_BN_WEIGHT, Region.W_FC_BIAS)
WEIGHTS = (Region.W_FC_WEIGHT, Region.W_FIRST_CONV, Region.W_DEEP_CONV)
W_REGIONS = BIAS_LIKE + WEIGHTS
