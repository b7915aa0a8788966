"""A cluster from what a real machine prints: NCCL's dump or `nvidia-smi topo -m`, and Slurm."""

import argparse
from pathlib import Path
from typing import get_args

from meshwright.errors import InputError, Problem
from meshwright.spec import catalog
from meshwright.spec.cluster import (
    Cluster,
    Fabric,
    build_cluster,
    read_nccl_topology,
    read_nvidia_smi_topology,
    read_slurm_topology,
)
from meshwright.spec.cluster.cluster_components import FabricKind
from meshwright.spec.file_formats import read_text
from meshwright.spec.units import parse_count, parse_rate

FABRICS = tuple(kind for kind in get_args(FabricKind) if kind != "none")


def add_topology(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe a machine by what it prints."""
    group = parser.add_argument_group("from a real machine")
    group.add_argument(
        "--topology", metavar="FILE", help="NCCL_TOPO_DUMP_FILE (.xml) or nvidia-smi topo -m"
    )
    group.add_argument("--gpu", metavar="NAME", help="its GPU, a name of mw gpus")
    group.add_argument("--nodes", metavar="N", default="1", help="machines like it (default: 1)")
    group.add_argument("--nic", metavar="RATE", help="speed of a NIC, such as 400Gb/s")
    group.add_argument("--switches", metavar="FILE", help="Slurm's topology.conf")
    group.add_argument(
        "--fabric", choices=FABRICS, default="infiniband",
        help="what joins the machines (default: infiniband)",
    )  # fmt: skip


def read_topology(args: argparse.Namespace) -> Cluster:
    """Return the cluster that the files describe."""
    if args.gpu is None:
        raise InputError([Problem("--gpu", "is needed to read a topology", "--gpu h100")])
    gpu = catalog.get_gpu(args.gpu)
    text = read_text(args.topology)
    if Path(args.topology).suffix == ".xml":
        graph = read_nccl_topology(text, args.topology)
    else:
        graph = read_nvidia_smi_topology(text, gpu, args.topology)
    nodes = parse_count(args.nodes, "--nodes")
    fabric: Fabric | None = None
    if args.switches is not None:
        fabric = read_slurm_topology(read_text(args.switches), args.switches).to_fabric(args.fabric)
    nic = parse_rate(args.nic, "--nic") if args.nic else None
    name = Path(args.topology).stem
    try:
        return build_cluster(graph, gpu, name=name, nodes=nodes, fabric=fabric, nic_bytes_per_s=nic)
    except InputError as error:
        raise InputError(
            problem._replace(fix="give their speed, such as --nic 400Gb/s")
            if problem.where == "nics"
            else problem
            for problem in error.problems
        ) from None
