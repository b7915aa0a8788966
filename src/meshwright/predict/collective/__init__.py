"""Collectives on a virtual clock: time, load of every link, and what holds them up.

`simulate` carries out one `Collective` on a `Cluster`, a `LinkGraph` or a `Network`; `rank` and
`best` do so with the library's algorithms. `predict_nccl` simulates what NCCL would run. `without`
takes parts of a network away, `replan` plans around them. `streamed` cuts an algorithm into parts
that follow each other, and `Costs` is what messages cost beside the wires.
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.predict.collective.costs import Costs
    from meshwright.predict.collective.failures import Replanned, replan
    from meshwright.predict.collective.nccl import predict_nccl, simulate_nccl, simulated_us
    from meshwright.predict.collective.network import Network
    from meshwright.predict.collective.of_cluster import cluster_network
    from meshwright.predict.collective.of_graph import graph_network
    from meshwright.predict.collective.ranking import Ranked, best, rank
    from meshwright.predict.collective.simulation import LinkLoad, Simulated, simulate
    from meshwright.spec.cluster.damage import without

_PACKAGE = "meshwright.predict.collective"
_HOMES = {
    "Costs": f"{_PACKAGE}.costs",
    "LinkLoad": f"{_PACKAGE}.simulation",
    "Network": f"{_PACKAGE}.network",
    "Ranked": f"{_PACKAGE}.ranking",
    "Replanned": f"{_PACKAGE}.failures",
    "Simulated": f"{_PACKAGE}.simulation",
    "best": f"{_PACKAGE}.ranking",
    "cluster_network": f"{_PACKAGE}.of_cluster",
    "graph_network": f"{_PACKAGE}.of_graph",
    "predict_nccl": f"{_PACKAGE}.nccl",
    "rank": f"{_PACKAGE}.ranking",
    "replan": f"{_PACKAGE}.failures",
    "simulate": f"{_PACKAGE}.simulation",
    "simulate_nccl": f"{_PACKAGE}.nccl",
    "simulated_us": f"{_PACKAGE}.nccl",
    "without": "meshwright.spec.cluster.damage",
}

__all__ = [
    "Costs",
    "LinkLoad",
    "Network",
    "Ranked",
    "Replanned",
    "Simulated",
    "best",
    "cluster_network",
    "graph_network",
    "predict_nccl",
    "rank",
    "replan",
    "simulate",
    "simulate_nccl",
    "simulated_us",
    "without",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
