"""All ops on random layouts, against NumPy."""

import numpy as np
from arenas import KINDS, LEAF_DTYPES, assert_all_ops_are_right, make_layout
from hypothesis import given
from hypothesis import strategies as st

SIZE = st.sampled_from([0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 64])
CHOICE = st.integers(0, 11)


@st.composite
def leaves(draw):
    """Shape, stacked axes, group, and which dtypes its gradient and its copy have."""
    layers = draw(st.lists(st.integers(0, 3), max_size=2))
    shape = (*layers, *draw(st.lists(SIZE, max_size=2)))
    return shape, len(layers), draw(st.integers(0, 1)), draw(CHOICE), draw(CHOICE)


@given(
    data=st.lists(leaves(), min_size=1, max_size=7),
    dtype=st.sampled_from(["float32", "float32", "float64"]),
    kind=st.sampled_from(KINDS),
    bad=st.integers(0, 2),
    seed=st.integers(0, 2**32 - 1),
)
def check(backend, data, dtype, kind, bad, seed):
    rng = np.random.default_rng(seed)
    shapes, stacked, groups, own, copy = zip(*data, strict=True)
    layout = make_layout(shapes, groups=groups, stacked=stacked, dtype=dtype)
    allowed = LEAF_DTYPES[dtype]
    gradients = [
        rng.normal(size=shape).astype(allowed[i % len(allowed)])
        for shape, i in zip(shapes, own, strict=True)
    ]
    filled = [x.reshape(-1) for x in gradients if x.size]
    for _ in range(bad if filled else 0):
        x = filled[rng.integers(len(filled))]
        x[rng.integers(x.size)] = rng.choice([np.nan, np.inf, -np.inf])
    copies = [allowed[i % len(allowed)] for i in copy]
    assert_all_ops_are_right(kind, layout, gradients, copies, backend=backend, seed=seed)


def test_random_layouts(backend):
    check(backend)
