"""Time of communication: collectives, experts' exchanges and pipelines' messages.

NCCL's cost model restated (`nccl_tuning`), what measurements add to it (`link_corrections`), and
the least time that wires allow (`wire_bound`). Placements come from clusters and rank numbers.
"""

from meshwright.policy.collective.bus_bandwidth import bus_factor
from meshwright.predict.network.collective_cost import (
    CollectiveCost,
    collective_s,
    compute_share,
    min_s_per_byte,
    predict_collective,
)
from meshwright.predict.network.expert_dispatch import ExpertTraffic, predict_expert_dispatch
from meshwright.predict.network.nccl_tuning import NcclOp
from meshwright.predict.network.placement import (
    Placement,
    build_placement,
    build_strided_placement,
    share_nics,
)

__all__ = [
    "CollectiveCost",
    "ExpertTraffic",
    "NcclOp",
    "Placement",
    "build_placement",
    "build_strided_placement",
    "bus_factor",
    "collective_s",
    "compute_share",
    "min_s_per_byte",
    "predict_collective",
    "predict_expert_dispatch",
    "share_nics",
]
