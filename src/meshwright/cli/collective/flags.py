"""Which collective a command is about, and on what: the flags that all verbs share."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.cli.flags.topology import add_topology, read_topology
from meshwright.errors import InputError, Problem
from meshwright.policy.collective import (
    ALGORITHMS,
    AlgorithmInfo,
    Collective,
    build_algorithm,
    verify_collective,
)
from meshwright.policy.collective.collective import COLLECTIVE_OPS, CollectiveOp
from meshwright.policy.collective.formats import read_collective_json, read_msccl_xml
from meshwright.policy.collective.msccl.lifting import lift_program
from meshwright.predict.collective import remove_components
from meshwright.spec.cluster import Cluster, LinkGraph
from meshwright.spec.cluster.readers.nccl_graph import read_nccl_graphs
from meshwright.spec.file_formats import read_text
from meshwright.spec.job_spec import read_cluster
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import parse_bytes, parse_count

OP_ALIASES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all_v",
    "sendrecv": "send_recv",
}
DEFAULT_RANKS = 8


def add_algorithm(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the flags that name a collective."""
    parser.add_argument(
        "name", metavar="ALGORITHM", nargs="?" if optional else None,
        help="one of mw collective list, or a file (.json of this program, .xml of MSCCL)",
    )  # fmt: skip
    group = parser.add_argument_group("the collective")
    group.add_argument("--op", metavar="OP", help="what it achieves (default: what it does first)")
    group.add_argument("--ranks", metavar="N", help=f"ranks that take part (default: "
                       f"{DEFAULT_RANKS}, or the cluster's GPUs)")  # fmt: skip
    group.add_argument("--per-node", metavar="N", help="ranks of a node, for what is node-aware")
    group.add_argument("--nodes-per-pod", metavar="N", help="nodes of a pod, for three levels")
    group.add_argument("--channels", metavar="N", default="1", help="parallel lanes (default: 1)")
    group.add_argument("--pieces", metavar="N", help="chunks that stream through a tree or chain")
    group.add_argument("--root", metavar="RANK", default="0", help="who gives or gets (default: 0)")
    group.add_argument("--aggregate", metavar="N", help="for pat: ranks' chunks in one message")
    group.add_argument("--peers", metavar="RANKS", help="for send_recv: whom each rank sends to, "
                       "such as 1,0,-1 (default: the next one)")  # fmt: skip
    group.add_argument("--graph", metavar="FILE", help="for ring: take the orders of NCCL's own "
                       "rings from its NCCL_GRAPH_DUMP_FILE")  # fmt: skip
    group.add_argument("--counts", metavar="MATRIX", help="for all_to_all_v: chunks from each rank "
                       "(row) to each, such as [[0,2],[1,0]]")  # fmt: skip


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what it runs on."""
    group = parser.add_argument_group("the cluster")
    group.add_argument("--cluster", metavar="NAME", help="catalog name or TOML file")
    group.add_argument("--gpus", metavar="N", help="GPUs of it that take part")
    add_topology(parser)


def add_size(parser: argparse.ArgumentParser, default: str | None = "64MiB") -> None:
    """Add the size of a message."""
    said = "" if default is None else f" (default: {default})"
    parser.add_argument("--size", metavar="BYTES", default=default,
                        help=f"message as nccl-tests counts it, such as 64MiB{said}")  # fmt: skip


def add_failures(parser: argparse.ArgumentParser) -> None:
    """Add the flag that takes parts of the cluster away."""
    said = "a broken part: gpu3, node0.nic2, node1, or a link such as gpu0~gpu1 (several times)"
    parser.add_argument("--kill", metavar="PART", action="append", default=[], help=said)


def remove_failed_links(on: "CollectiveTarget", kills: Sequence[str]) -> LinkGraph:
    """Return the links of the GPUs that take part, without what is broken."""
    graph = on.cluster.build_link_graph()
    spare = [f"gpu{index}" for index in range(on.gpus, on.cluster.gpus)]
    dead: list[str] = []
    for part in kills:
        of_node = [vertex.name for vertex in graph.vertices if part and vertex.node == part]
        dead += of_node or [part]
    try:
        return remove_components(graph, [*spare, *dead]) if spare or dead else graph
    except InputError as error:
        raise InputError(
            problem._replace(where="--kill") if problem.where == "dead" else problem
            for problem in error.problems
        ) from None


def is_link(part: str) -> bool:
    """Tell whether a broken part is a link rather than what it joins."""
    return any(sign in part for sign in ("~", "→", "->"))


def parse_op(text: str) -> CollectiveOp:
    """Return an operation by any usual spelling of its name."""
    plain = text.lower().replace("-", "_")
    name = OP_ALIASES.get(plain.replace("_", ""), plain)
    if name not in COLLECTIVE_OPS:
        raise InputError([build_unknown_name_problem("operation", text, COLLECTIVE_OPS, "--op")])
    return next(op for op in COLLECTIVE_OPS if op == name)


def read_size(args: argparse.Namespace) -> int:
    """Return the message's bytes."""
    size = parse_bytes(args.size, "--size")
    if size < 1:
        raise InputError([Problem("--size", f"{args.size} is no message", "use 1 byte or more")])
    return size


class CollectiveTarget(NamedTuple):
    """The cluster that a command is about, and how many of its GPUs take part."""

    cluster: Cluster
    gpus: int


def read_target(args: argparse.Namespace, *, needed: bool = True) -> CollectiveTarget | None:
    """Return the cluster that the flags describe."""
    if args.topology:
        cluster = read_topology(args)
    elif args.cluster:
        cluster = read_cluster(args.cluster)
    elif needed:
        raise InputError([Problem("--cluster", "is needed", "--cluster h100-superpod --gpus 16")])
    else:
        return None
    gpus = cluster.gpus_per_node if args.gpus is None else parse_count(args.gpus, "--gpus")
    if not args.topology:
        cluster = cluster.with_gpus(gpus)
    if not 2 <= gpus <= cluster.gpus:
        what = f"{gpus} GPUs of {cluster.gpus} cannot hold a collective"
        raise InputError([Problem("--gpus", what, f"use 2 to {cluster.gpus}")])
    return CollectiveTarget(cluster, gpus)


def find_algorithm(name: str) -> AlgorithmInfo:
    """Return an algorithm of the library by name."""
    known = {found.name: found for found in ALGORITHMS}
    name = name.lower().replace("-", "_")
    if name not in known:
        raise InputError([build_unknown_name_problem("algorithm", name, known, "ALGORITHM")])
    return known[name]


def build_collective(args: argparse.Namespace, on: CollectiveTarget | None = None) -> Collective:
    """Return the collective that the flags name: from the library, or from a file."""
    if is_collective_file(args.name):
        return read_collective(args)
    found = find_algorithm(args.name)
    op = found.ops[0] if args.op is None else parse_op(args.op)
    if op not in found.ops:
        what = f"{found.name} does no {op}"
        raise InputError([Problem("--op", what, f"use {', '.join(found.ops)}")])
    ranks, channels = read_ranks(args, on), parse_count(args.channels, "--channels")
    orders = None if args.graph is None else read_nccl_rings(args.graph)
    if orders is not None:
        if args.ranks is not None:
            raise InputError([Problem("--ranks", "the graph says how many", "leave it out")])
        ranks, channels = len(orders[0]), len(orders)
    return build_algorithm(
        found.name,
        op,
        ranks,
        per_node=_per_node(args, on),
        nodes_per_pod=_number(args.nodes_per_pod, "--nodes-per-pod"),
        channels=channels,
        orders=orders,
        peers=_peers(args.peers, ranks) if op == "send_recv" or args.peers else None,
        aggregate=_number(args.aggregate, "--aggregate"),
        pieces=_number(args.pieces, "--pieces"),
        root=int(parse_count(args.root, "--root")),
        counts=_matrix(args.counts),
    )


def is_collective_file(name: str) -> bool:
    """Tell whether a collective is named by the file it lies in."""
    return Path(name).suffix in (".json", ".xml")


def reject_flags_with_file(args: argparse.Namespace) -> None:
    """Refuse flags that a file has already decided."""
    decided = {
        "--op": args.op, "--ranks": args.ranks, "--per-node": args.per_node,
        "--nodes-per-pod": args.nodes_per_pod, "--pieces": args.pieces, "--counts": args.counts,
        "--aggregate": args.aggregate, "--peers": args.peers, "--graph": args.graph,
        "--channels": None if args.channels == "1" else args.channels,
    }  # fmt: skip
    given = [flag for flag, value in decided.items() if value is not None]
    if given:
        what = f"{args.name} says that already"
        raise InputError(Problem(flag, what, "leave it out") for flag in given)


def read_collective(args: argparse.Namespace) -> Collective:
    """Read a collective from a file of ours or of MSCCL."""
    reject_flags_with_file(args)
    return read_collective_file(args.name, parse_count(args.root, "--root"))


def read_collective_file(path: str, root: int = 0) -> Collective:
    """Read a collective; a program of MSCCL does not say which rank is the root."""
    text = read_text(path)
    if path.endswith(".xml"):
        return lift_program(read_msccl_xml(text, path, root=root))
    return read_collective_json(text, path)


def require_verified(args: argparse.Namespace, found: Collective) -> Collective:
    """Refuse a collective from a file that does not do what it promises."""
    if args.name.endswith(".json"):
        proof = verify_collective(found)
        if not proof.is_correct:
            raise InputError(proof.problems)
    return found


def read_nccl_rings(path: str) -> list[list[int]]:
    """Return the rings that NCCL found, as it dumped them: the ranks of each channel in order."""
    graphs = read_nccl_graphs(read_text(path), path)
    ring = next((graph for graph in graphs if graph.kind == "ring"), None)
    if ring is None or not ring.channels:
        fix = "dump it with NCCL_GRAPH_DUMP_FILE from a run that uses rings"
        raise InputError([Problem(path, "the dump holds no ring", fix)])
    orders = []
    for channel in ring.channels:
        numbers = [gpu.device if gpu.rank is None else gpu.rank for gpu in channel.gpus]
        orders.append([sorted(numbers).index(number) for number in numbers])
    return orders


def _peers(text: str | None, ranks: int) -> list[int]:
    if text is None:
        return [(rank + 1) % ranks for rank in range(ranks)]
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        fix = "write one rank for each, such as 1,0,-1"
        raise InputError([Problem("--peers", f"{text!r} is no list of ranks", fix)]) from None


def read_ranks(args: argparse.Namespace, on: CollectiveTarget | None = None) -> int:
    """Return the ranks that take part."""
    if args.ranks is not None:
        return parse_count(args.ranks, "--ranks")
    return DEFAULT_RANKS if on is None else on.gpus


def _per_node(args: argparse.Namespace, on: CollectiveTarget | None) -> int | None:
    if args.per_node is not None or on is None:
        return _number(args.per_node, "--per-node")
    unit = max(on.cluster.gpus_per_node, on.cluster.scale_up.gpus)
    return min(unit, on.gpus)


def _number(text: str | None, flag: str) -> int | None:
    return None if text is None else parse_count(text, flag)


def _matrix(text: str | None) -> Sequence[Sequence[int]] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
        if all(type(cell) is int for row in found for cell in row):
            return [list(row) for row in found]
        raise ValueError
    except (ValueError, TypeError):
        fix = "write rows of whole numbers, such as [[0,2],[1,0]]"
        raise InputError([Problem("--counts", f"{text!r} is no matrix", fix)]) from None
