"""Collectives on a virtual clock: time, load of every link, and what holds them up.

`simulate_collective` carries out one `Collective` on a `Cluster`, a `LinkGraph` or a `SimNetwork`;
`rank_algorithms` and `find_best_algorithm` do so with the library's algorithms. `predict_nccl`
simulates what NCCL would run. `remove_components` takes parts of a network away,
`replan_after_failure` plans around them. `MessageCosts` are the costs of messages besides the
wires.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.predict.collective.algorithm_ranking import (
        RankedAlgorithm,
        find_best_algorithm,
        rank_algorithms,
    )
    from meshwright.predict.collective.cluster_network import build_cluster_network
    from meshwright.predict.collective.component_failures import FailureImpact, replan_after_failure
    from meshwright.predict.collective.graph_network import build_graph_network
    from meshwright.predict.collective.message_costs import MessageCosts
    from meshwright.predict.collective.nccl_simulation import (
        predict_nccl,
        simulate_nccl,
        simulate_nccl_us,
    )
    from meshwright.predict.collective.sim_network import SimNetwork
    from meshwright.predict.collective.simulation import (
        LinkLoad,
        SimulatedCollective,
        simulate_collective,
    )
    from meshwright.spec.cluster.failed_components import remove_components

_PACKAGE = "meshwright.predict.collective"
_MODULES = {
    "MessageCosts": "meshwright.predict.collective.message_costs",
    "LinkLoad": "meshwright.predict.collective.simulation",
    "SimNetwork": "meshwright.predict.collective.sim_network",
    "RankedAlgorithm": "meshwright.predict.collective.algorithm_ranking",
    "FailureImpact": "meshwright.predict.collective.component_failures",
    "SimulatedCollective": "meshwright.predict.collective.simulation",
    "find_best_algorithm": "meshwright.predict.collective.algorithm_ranking",
    "build_cluster_network": "meshwright.predict.collective.cluster_network",
    "build_graph_network": "meshwright.predict.collective.graph_network",
    "predict_nccl": "meshwright.predict.collective.nccl_simulation",
    "rank_algorithms": "meshwright.predict.collective.algorithm_ranking",
    "replan_after_failure": "meshwright.predict.collective.component_failures",
    "simulate_collective": "meshwright.predict.collective.simulation",
    "simulate_nccl": "meshwright.predict.collective.nccl_simulation",
    "simulate_nccl_us": "meshwright.predict.collective.nccl_simulation",
    "remove_components": "meshwright.spec.cluster.failed_components",
}

__all__ = [
    "FailureImpact",
    "LinkLoad",
    "MessageCosts",
    "RankedAlgorithm",
    "SimNetwork",
    "SimulatedCollective",
    "build_cluster_network",
    "build_graph_network",
    "find_best_algorithm",
    "predict_nccl",
    "rank_algorithms",
    "remove_components",
    "replan_after_failure",
    "simulate_collective",
    "simulate_nccl",
    "simulate_nccl_us",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
