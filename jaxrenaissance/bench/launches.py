"""How many kernels a compiled program launches for our ops."""

import re

SEGMENTS_A_LAUNCH = {"changes": 640, "norms": 1280, "accumulate": 1280, "update_norms": 1280}
SEGMENTS_OF_OTHERS, OF_OTHERS_IN_A_BATCH = 2000, 448
"""As in cuda/kernels/tuning.h."""
_CALL = re.compile(r'custom_call_target="jaxrenaissance_(\w+)_v\d+"')
_LAYOUT = re.compile(r"\blayout = dense<[^>]*> : tensor<(\d+)xi64>")
_MEMBERS = re.compile(r"\bmembers = (\d+) : i64")


def count_launches(program: str, *, on_gpu: bool) -> int:
    """Launches of our kernels in the text of a compiled program.

    Each is a call of a handler. On a GPU a call launches its kernel once for each table of segments
    that it needs: a table goes in the kernel's parameters, which hold 2,000 of them, 448 in a
    batch, 1,280 where squares are added up, 640 of `changes`. On a CPU there are no tables.
    """
    return sum(
        _tables(line, call[1]) if on_gpu else 1
        for line in program.splitlines()
        if (call := _CALL.search(line)) is not None
    )


def _tables(line: str, target: str) -> int:
    layout, members = _LAYOUT.search(line), _MEMBERS.search(line)
    if layout is None:
        return 1
    segments = (int(layout[1]) - 2) // 5  # after the arena's size and dtype, five numbers each
    batch = members is not None and int(members[1]) > 1
    # An op's name may go on with the optimizer's, as in update_norms_adam.
    own = [most for op, most in SEGMENTS_A_LAUNCH.items() if target.startswith(op)]
    others = OF_OTHERS_IN_A_BATCH if batch else SEGMENTS_OF_OTHERS
    return -(-segments // (own[0] if own else others))
