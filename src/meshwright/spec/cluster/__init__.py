"""What a cluster is: devices, nodes, links, fabric, price; and readers of real machines."""

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
from meshwright.spec.cluster.rails import Rail, rails
from meshwright.spec.cluster.slurm_topology import Block, Switch, SwitchTree, read_slurm_topology

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
