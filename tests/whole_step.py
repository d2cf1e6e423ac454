"""All ops of a step at once: a cycle of micro-batches, norms, ratios, updates, a lerp."""

import functools

import numpy as np
from arenas import (
    assert_close,
    expected_update,
    group_rows,
    make_floats,
    random_leaves,
    random_states,
    to_arena,
)

from jaxrenaissance import ops, scalars


@functools.cache
def whole_step(layout, backend):
    """A function from all operands to the scalars, counters, states, norms and moved arenas.

    Behind the norms are trust ratios, with which only one of the moved arenas has to do.
    """
    segments, groups = [len(layout.segments)], [layout.segments[:, 4].astype(np.int32)]

    def run(floats, ints, states, gradients, taus):
        weights, m, v, ema, accumulator = states
        where = {"backend": backend}
        ints, total, workspace = ops.accumulate(
            layout, ints, accumulator, gradients, flag=True, norms=True, **where
        )
        ints, _, *others = ops.norms(
            layout, ints, total, weights=weights, products=True, flag=False, **where
        )
        floats, ints, norms, of_lars = ops.finish(
            floats,
            ints,
            [workspace, *others],
            segments * 3,
            gradients=1,
            by_segment=True,
            trust=2,
            groups=groups,
            **where,
        )
        series = "adam", layout, floats, weights, (m, v), total
        workspaces = ops.update_norms(*series, direction=True, **where)
        floats, of_lamb = ops.finish_ratios(floats, workspaces, segments * 2, groups, **where)
        scaled, _, _ = ops.update(*series, ratios=of_lars[0] + of_lamb[0], **where)
        (change,) = ops.update_norms("adam", layout, floats, weights, (m, v), total, **where)
        floats = ops.finish_update(floats, [change], segments, **where)
        weights, (m, v), ema = ops.update(
            "adam", layout, floats, weights, (m, v), total, ema=ema, gated=True, **where
        )
        states = [weights, m, v, ema, total]
        moved = ops.lerp(layout, taus, [m, v], weights, **where)
        zeroed = ops.lerp(layout, taus, [m], None, **where)
        nearer = ops.lerp(layout, taus, [weights], gradients, **where)
        norms = [*norms, *of_lars, *of_lamb]
        return floats, ints, states, norms, [scaled, *moved, *zeroed, *nearer]

    return run


def whole_step_operands(layout, rng, source="leaves"):
    """In the second micro-batch of two."""
    floats = make_floats(
        max_norm=2.0, max_value=0.5, one_minus_ema=0.25, loss_scale=4.0, backoff=0.5
    )
    group_rows(floats)[:, scalars.TRUST] = 0.5, 0.0
    ints = scalars.initial_ints()
    ints[[scalars.EVERY, scalars.MICRO]] = 2, 1
    states = [*random_states(layout, "adam", rng), *random_states(layout, "momentum", rng)]
    leaves = random_leaves(layout, rng)
    gradients = leaves if source == "leaves" else to_arena(layout, leaves)
    return floats, ints, states, gradients, np.array([0.5, 1.0], np.float32)


def expected_whole_step(layout, states, leaves):
    """The norms of gradients, weights and update, then the weights, the average and the total."""
    weights, m, v, ema, accumulator = states
    total = accumulator + to_arena(layout, leaves)
    norm = np.linalg.norm(total) / 8
    new = expected_update(
        "adam", layout, [weights, m, v], total, factor=min(1, 2 / norm) / 8, max_value=0.5
    )
    change = np.linalg.norm(new[0] - weights)
    averaged = ema + 0.25 * (new[0] - ema)
    return [norm, np.linalg.norm(weights), change], [new[0], averaged, total]


def assert_whole_step(layout, got, operands):
    """The results, where the gradients are leaves, against float64."""
    _, _, states, leaves, _ = operands
    norms, arenas = expected_whole_step(layout, states, leaves)
    header = scalars.GRAD_NORM, scalars.PARAM_NORM, scalars.UPDATE_NORM
    np.testing.assert_allclose(got[0][list(header)], norms, rtol=1e-5)
    for i, wanted in zip((0, 3, 4), arenas, strict=True):
        assert_close(got[2][i], wanted)
