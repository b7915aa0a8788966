"""What moves outside the places or slots there are is not simulated."""

import msgspec
import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import ChunkMoves, Collective, Sweep, build_algorithm
from meshwright.predict.collective import simulate_collective
from meshwright.spec.catalog import get_cluster


def with_row(collective: Collective, **cells: int) -> Collective:
    """Return a collective with one more step, of one move."""
    columns = ("src", "dst", "src_slot", "dst_slot", "count", "adds", "channel", "phase")
    row = {"src": 0, "dst": 1, "count": 1} | cells
    table = np.array([[row.get(name, 0) for name in columns]], dtype=np.int32)
    sweeps = (*collective.sweeps, Sweep(moves=ChunkMoves(table)))
    return msgspec.structs.replace(collective, sweeps=sweeps)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"dst": 9}, "step 6: a move writes place 9, but there are 4"),
        ({"src": -1}, "step 6: a move reads place -1, but there are 4"),
        ({"src_slot": 4}, "rank 0, step 6: reads slot 4 of a buffer of 4"),
        ({"dst_slot": -1}, "rank 1, step 6: writes slot -1 of a buffer of 4"),
        ({"count": 0}, r"sweeps\[2\].moves\[0\]: count 0"),
        ({"phase": -1}, r"sweeps\[2\].moves\[0\]: phase -1"),
    ],
)
def test_a_move_outside_is_named(cells: dict[str, int], said: str) -> None:
    broken = with_row(build_algorithm("ring", "all_reduce", 4), **cells)
    with pytest.raises(InputError, match=said):
        simulate_collective(broken, get_cluster("h100-superpod"), 1 << 20)
