"""What a cluster is: devices, nodes, links, fabric, price; and readers of real machines."""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

# Not on first use: the module of this name would take the place of the function.
from meshwright.spec.cluster.rails import Rail, rails

if TYPE_CHECKING:
    from meshwright.spec.cluster.cluster import Cluster
    from meshwright.spec.cluster.gpu import Gpu, Source
    from meshwright.spec.cluster.links import Link, LinkGraph, Route, Vertex
    from meshwright.spec.cluster.machine import cluster_of, nearest_nics
    from meshwright.spec.cluster.nccl_graph import (
        GraphChannel,
        GraphGpu,
        SearchGraph,
        read_nccl_graphs,
        write_nccl_graphs,
    )
    from meshwright.spec.cluster.nccl_topology import read_nccl_topology
    from meshwright.spec.cluster.nvidia_smi import read_nvidia_smi
    from meshwright.spec.cluster.parts import Fabric, Host, Nics, ScaleUp, Storage, Tier
    from meshwright.spec.cluster.slurm_topology import (
        Block,
        Switch,
        SwitchTree,
        read_slurm_topology,
    )

_HOMES = {
    "Block": "meshwright.spec.cluster.slurm_topology",
    "Cluster": "meshwright.spec.cluster.cluster",
    "Fabric": "meshwright.spec.cluster.parts",
    "Gpu": "meshwright.spec.cluster.gpu",
    "GraphChannel": "meshwright.spec.cluster.nccl_graph",
    "GraphGpu": "meshwright.spec.cluster.nccl_graph",
    "Host": "meshwright.spec.cluster.parts",
    "Link": "meshwright.spec.cluster.links",
    "LinkGraph": "meshwright.spec.cluster.links",
    "Nics": "meshwright.spec.cluster.parts",
    "Route": "meshwright.spec.cluster.links",
    "ScaleUp": "meshwright.spec.cluster.parts",
    "SearchGraph": "meshwright.spec.cluster.nccl_graph",
    "Source": "meshwright.spec.cluster.gpu",
    "Storage": "meshwright.spec.cluster.parts",
    "Switch": "meshwright.spec.cluster.slurm_topology",
    "SwitchTree": "meshwright.spec.cluster.slurm_topology",
    "Tier": "meshwright.spec.cluster.parts",
    "Vertex": "meshwright.spec.cluster.links",
    "cluster_of": "meshwright.spec.cluster.machine",
    "nearest_nics": "meshwright.spec.cluster.machine",
    "read_nccl_graphs": "meshwright.spec.cluster.nccl_graph",
    "read_nccl_topology": "meshwright.spec.cluster.nccl_topology",
    "read_nvidia_smi": "meshwright.spec.cluster.nvidia_smi",
    "read_slurm_topology": "meshwright.spec.cluster.slurm_topology",
    "write_nccl_graphs": "meshwright.spec.cluster.nccl_graph",
}

__all__ = [
    "Block",
    "Cluster",
    "Fabric",
    "Gpu",
    "GraphChannel",
    "GraphGpu",
    "Host",
    "Link",
    "LinkGraph",
    "Nics",
    "Rail",
    "Route",
    "ScaleUp",
    "SearchGraph",
    "Source",
    "Storage",
    "Switch",
    "SwitchTree",
    "Tier",
    "Vertex",
    "cluster_of",
    "nearest_nics",
    "rails",
    "read_nccl_graphs",
    "read_nccl_topology",
    "read_nvidia_smi",
    "read_slurm_topology",
    "write_nccl_graphs",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
