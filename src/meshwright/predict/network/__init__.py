"""Time of communication: collectives, experts' exchanges and pipelines' messages.

NCCL's cost model restated (`tuning`), what measurements add to it (`fabric`), and the least time
that wires allow (`bounds`). Placements come from clusters and rank numbers.
"""

from meshwright.policy.collective.bus import bus_factor
from meshwright.predict.network.collective import (
    CollectiveCost,
    collective,
    collective_s,
    compute_share,
    least_s_per_byte,
)
from meshwright.predict.network.experts import ExpertTraffic, expert_exchange
from meshwright.predict.network.placement import Placement, crowded, placement, strided
from meshwright.predict.network.tuning import Op

__all__ = [
    "CollectiveCost",
    "ExpertTraffic",
    "Op",
    "Placement",
    "bus_factor",
    "collective",
    "collective_s",
    "compute_share",
    "crowded",
    "expert_exchange",
    "least_s_per_byte",
    "placement",
    "strided",
]
