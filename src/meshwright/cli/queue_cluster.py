"""The cluster, the costs and the settings of `mw queue`, from flags."""

import argparse

from meshwright.cli.queue_jobs import Read, numbers, read_nodes
from meshwright.errors import InputError, Problem
from meshwright.policy.queue.nodes import Node, Nodes, even_nodes
from meshwright.policy.queue.placing import PLACINGS
from meshwright.policy.queue.policies import Settings
from meshwright.policy.queue.pool import Counted, Pool
from meshwright.policy.queue.quotas import Quota
from meshwright.predict.queue.costs import Costs, Failures
from meshwright.spec.bounds import real, require, whole
from meshwright.spec.units import parse_number, parse_seconds


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add what says which GPUs there are."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--gpus", metavar="N", type=int, help="GPUs (default: those of the nodes that are told of)"
    )
    group.add_argument(
        "--per-node", metavar="N", type=int,
        help="GPUs of a node; without it GPUs are only counted, and any will do",
    )  # fmt: skip
    group.add_argument(
        "--per-domain", metavar="N", type=int, help="nodes on one switch, for --placement topology"
    )
    group.add_argument("--nodes", metavar="FILE", help="a list of nodes, as mw fleet ingests it")
    group.add_argument(
        "--placement", choices=tuple(PLACINGS), default="consolidate",
        help="which nodes a job gets (default: consolidate)",
    )  # fmt: skip


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add what stopping, failing and going on costs."""
    group = parser.add_argument_group("costs and failures")
    for flag, text in (
        ("--start", "time without progress at each start"),
        ("--save", "time to save a job that is stopped for another"),
        ("--restore", "time to go on after that"),
    ):
        group.add_argument(flag, metavar="TIME", default="0s", help=f"{text} (default: 0s)")
    group.add_argument(
        "--saved-every", metavar="TIME", help="work between checkpoints, for failures of nodes"
    )
    group.add_argument(
        "--failures", metavar="RATE", help="failures of a node in a day: 0.0065 (needs nodes)"
    )
    group.add_argument(
        "--repair", metavar="TIME", default="4h", help="how long a node is away (default: 4h)"
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="what chance starts from")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add what single policies want to know."""
    group = parser.add_argument_group("policies")
    group.add_argument(
        "--shares", metavar="TEAM=N,…", help="shares of teams for fair-share (default: one each)"
    )
    group.add_argument(
        "--quotas", metavar="TEAM=N,…",
        help="GPUs of each team for quotas (default: by how many GPU-hours each used)",
    )  # fmt: skip


def pool_of(args: argparse.Namespace, read: Read) -> Pool:
    """Return the GPUs, all free."""
    nodes = nodes_of(args, read)
    if nodes is not None:
        return Nodes(nodes, args.placement, seed=args.seed)
    if args.gpus is None:
        what = "nothing tells how many GPUs there are"
        most = max(ask.gpus for ask in read.asks)
        fix = f"give --gpus; the largest job has {most:g}, and {busiest(read):g} were held at once"
        raise InputError([Problem("--gpus", what, fix)])
    require(whole("--gpus", args.gpus))
    return Counted(args.gpus)


def nodes_of(args: argparse.Namespace, read: Read) -> list[Node] | None:
    """Return the nodes where some are told of; None: GPUs are only counted."""
    if args.nodes:
        return read_nodes(args.nodes)
    if args.gpus is not None and args.per_node is not None:
        require(whole("--gpus", args.gpus), whole("--per-node", args.per_node))
        return even_nodes(args.gpus, args.per_node, per_domain=args.per_domain)
    if args.per_node is not None:
        raise InputError([Problem("--per-node", "says nothing alone", "give --gpus too")])
    return read.nodes if args.gpus is None and read.nodes else None


def busiest(read: Read) -> float:
    """Return the most GPUs that were held at once, as it was recorded."""
    edges: list[tuple[float, float]] = []
    for ask, run_s in zip(read.asks, read.run_s, strict=True):
        edges += ((ask.submit_s, ask.gpus), (ask.submit_s + run_s, -ask.gpus))
    held = most = 0.0
    for _, gpus in sorted(edges):
        held += gpus
        most = max(most, held)
    return most


def costs_of(args: argparse.Namespace) -> Costs:
    """Return what stopping and going on costs."""
    every = args.saved_every
    return Costs(
        start_s=parse_seconds(args.start, "--start"),
        save_s=parse_seconds(args.save, "--save"),
        restore_s=parse_seconds(args.restore, "--restore"),
        saved_every_s=None if every is None else parse_seconds(every, "--saved-every"),
    )


def failures_of(args: argparse.Namespace) -> Failures | None:
    """Return how nodes fail; None: they do not."""
    if args.failures is None:
        return None
    rate = parse_number(args.failures, "--failures")
    require(real("--failures", rate, 0.0, 1000.0))
    repair_s = parse_seconds(args.repair, "--repair")
    return Failures(per_node_day=rate, repair_s=repair_s, seed=args.seed)


def settings_of(args: argparse.Namespace, read: Read, total: float) -> Settings:
    """Return what policies want to know."""
    quotas = numbers(args.quotas, "--quotas")
    if not quotas:
        quotas = _by_use(read, total)
    half = len(read.asks) // 2
    past = [ask.gpus * run for ask, run in zip(read.asks[:half], read.run_s[:half], strict=True)]
    return Settings(
        shares=numbers(args.shares, "--shares"),
        quotas={team: Quota(gpus=gpus) for team, gpus in quotas.items()},
        past_gpu_s=past or [1.0],
    )


def _by_use(read: Read, total: float) -> dict[str, float]:
    """Divide GPUs by what teams used, so that quotas add up to all there are."""
    used: dict[str, float] = {}
    for ask, run_s in zip(read.asks, read.run_s, strict=True):
        used[ask.team] = used.get(ask.team, 0.0) + ask.gpus * run_s
    whole_s = sum(used.values()) or 1.0
    return {team: total * one / whole_s for team, one in used.items()}
