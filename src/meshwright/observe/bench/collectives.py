"""Collectives over all ranks, as nccl-tests measures them: by operation and size.

The size is that of the whole tensor. Size over time is the algorithm's bandwidth; times the factor
of `policy.collective.bus` it is the bus bandwidth, which can be held against a link's.
"""

from meshwright.observe.bench.case import Row
from meshwright.observe.bench.exchanges import Exchanges
from meshwright.policy.collective.bus import bus_factor

_KIB, _MIB = 1 << 10, 1 << 20

COLLECTIVES = Exchanges(
    name="collectives",
    title="collectives between ranks",
    ops=("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    on_gpu={
        "full": tuple(_KIB << shift for shift in range(0, 21, 2)),
        "quick": (_KIB, 64 * _KIB, 4 * _MIB, 256 * _MIB),
    },
    on_host={
        "full": tuple(_KIB << shift for shift in range(0, 17, 2)),
        "quick": (_KIB, 64 * _KIB, 4 * _MIB),
    },
    usual_s={"quick": 6.5, "full": 20.0},
)


def bus_bytes_per_s(row: Row) -> float:
    """Return the bus bandwidth of a row of this family."""
    return (row.bytes_per_s or 0.0) * bus_factor(row.case.name, row.case.size("ranks"))
