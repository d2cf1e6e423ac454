"""Every compiled copy of the CPU loops gives the same bits; only the best one runs by itself."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import dataclasses, hashlib, sys
sys.path.insert(0, {tests!r})
import jax, numpy as np
from arenas import LEAF_DTYPES, make_floats, make_layout, random_leaves, random_states
from jaxrenaissance import native, ops, scalars

digest = hashlib.sha256()
for kind in ("sgd", "momentum", "nesterov", "adam"):
    for dtype in ("float32", "float64"):
        layout = make_layout([(70, 33), (5,), (1029,), (31,)], groups=[0, 1, 0, 1], dtype=dtype)
        rng = np.random.default_rng(0)
        weights, *moments = random_states(layout, kind, rng)
        leaves = random_leaves(layout, rng)
        with jax.enable_x64(dtype == "float64"):
            floats = make_floats(dtype=dtype, factor=0.5)
            new, more, _ = ops.update(
                kind, layout, floats, weights, moments, leaves, backend="cpu"
            )
            copies = ops.unpack(layout, new, [x.dtype for x in leaves], backend="cpu")
            ints = ops.statistics(layout, scalars.initial_ints(), leaves, backend="cpu")
            for x in [new, *more, *copies, ops.pack(layout, leaves, backend="cpu"), ints]:
                digest.update(np.asarray(x).tobytes())
            for narrow in LEAF_DTYPES["float32"][1:]:
                if dtype == "float64":
                    continue
                own = dataclasses.replace(layout, dtype=narrow)
                arena = ops.pack(own, leaves, backend="cpu")
                dtypes = [x.dtype for x in leaves[1:] + leaves[:1]]
                for x in [arena, *ops.unpack(own, arena, dtypes, backend="cpu")]:
                    digest.update(np.asarray(x).tobytes())
print(native.build_info("cpu")["instruction_set"], digest.hexdigest())
"""


@pytest.fixture(scope="module")
def baseline(pytestconfig):
    return run(pytestconfig, "baseline")


def run(pytestconfig, instruction_set):
    """Which copy the program used, and a digest of all results."""
    program = PROGRAM.format(tests=str(pytestconfig.rootpath / "tests"))
    chosen = {"JAXRENAISSANCE_CPU_ISA": instruction_set, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | chosen,
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.native
@pytest.mark.parametrize("instruction_set", ["avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(pytestconfig, baseline, instruction_set):
    used, digest = run(pytestconfig, instruction_set)
    if used != instruction_set:
        pytest.skip(f"this processor has no {instruction_set}")
    assert baseline[0] == "baseline"
    assert digest == baseline[1]
