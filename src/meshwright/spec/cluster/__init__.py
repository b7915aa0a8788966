"""What a cluster is: devices, nodes, links, fabric, price; and readers of real machines."""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

# Not on first use: the module of this name would take the place of the function.
from meshwright.spec.cluster.rails import Rail, find_rails

if TYPE_CHECKING:
    from meshwright.spec.cluster.cluster import Cluster
    from meshwright.spec.cluster.cluster_components import (
        Fabric,
        Host,
        Nics,
        ScaleUpDomain,
        Storage,
        SwitchTier,
    )
    from meshwright.spec.cluster.cluster_from_graph import build_cluster, find_closest_nics
    from meshwright.spec.cluster.gpu import Gpu, SpecSource
    from meshwright.spec.cluster.link_graph import GraphLink, GraphPath, GraphVertex, LinkGraph
    from meshwright.spec.cluster.readers.nccl_graph import (
        NcclGraphChannel,
        NcclGraphGpu,
        NcclSearchGraph,
        read_nccl_graphs,
        write_nccl_graphs,
    )
    from meshwright.spec.cluster.readers.nccl_topology import read_nccl_topology
    from meshwright.spec.cluster.readers.nvidia_smi_topology import read_nvidia_smi_topology
    from meshwright.spec.cluster.readers.slurm_topology import (
        SlurmBlock,
        SlurmSwitch,
        SwitchTree,
        read_slurm_topology,
    )

_MODULES = {
    "SlurmBlock": "meshwright.spec.cluster.readers.slurm_topology",
    "Cluster": "meshwright.spec.cluster.cluster",
    "Fabric": "meshwright.spec.cluster.cluster_components",
    "Gpu": "meshwright.spec.cluster.gpu",
    "NcclGraphChannel": "meshwright.spec.cluster.readers.nccl_graph",
    "NcclGraphGpu": "meshwright.spec.cluster.readers.nccl_graph",
    "Host": "meshwright.spec.cluster.cluster_components",
    "GraphLink": "meshwright.spec.cluster.link_graph",
    "LinkGraph": "meshwright.spec.cluster.link_graph",
    "Nics": "meshwright.spec.cluster.cluster_components",
    "GraphPath": "meshwright.spec.cluster.link_graph",
    "ScaleUpDomain": "meshwright.spec.cluster.cluster_components",
    "NcclSearchGraph": "meshwright.spec.cluster.readers.nccl_graph",
    "SpecSource": "meshwright.spec.cluster.gpu",
    "Storage": "meshwright.spec.cluster.cluster_components",
    "SlurmSwitch": "meshwright.spec.cluster.readers.slurm_topology",
    "SwitchTree": "meshwright.spec.cluster.readers.slurm_topology",
    "SwitchTier": "meshwright.spec.cluster.cluster_components",
    "GraphVertex": "meshwright.spec.cluster.link_graph",
    "build_cluster": "meshwright.spec.cluster.cluster_from_graph",
    "find_closest_nics": "meshwright.spec.cluster.cluster_from_graph",
    "read_nccl_graphs": "meshwright.spec.cluster.readers.nccl_graph",
    "read_nccl_topology": "meshwright.spec.cluster.readers.nccl_topology",
    "read_nvidia_smi_topology": "meshwright.spec.cluster.readers.nvidia_smi_topology",
    "read_slurm_topology": "meshwright.spec.cluster.readers.slurm_topology",
    "write_nccl_graphs": "meshwright.spec.cluster.readers.nccl_graph",
}

__all__ = [
    "Cluster",
    "Fabric",
    "Gpu",
    "GraphLink",
    "GraphPath",
    "GraphVertex",
    "Host",
    "LinkGraph",
    "NcclGraphChannel",
    "NcclGraphGpu",
    "NcclSearchGraph",
    "Nics",
    "Rail",
    "ScaleUpDomain",
    "SlurmBlock",
    "SlurmSwitch",
    "SpecSource",
    "Storage",
    "SwitchTier",
    "SwitchTree",
    "build_cluster",
    "find_closest_nics",
    "find_rails",
    "read_nccl_graphs",
    "read_nccl_topology",
    "read_nvidia_smi_topology",
    "read_slurm_topology",
    "write_nccl_graphs",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
