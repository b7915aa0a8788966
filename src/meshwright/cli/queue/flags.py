"""The cluster, the costs and the settings of `mw queue`, from flags."""

import argparse

from meshwright.cli.queue.jobs import QueueWorkload, parse_named_numbers, read_nodes
from meshwright.errors import InputError, Problem
from meshwright.policy.job_queue.policies.quota_policy import TeamQuota
from meshwright.policy.job_queue.policy_registry import QueueConfig
from meshwright.policy.job_queue.pool.node_pool import NodePool, NodeSpec, make_uniform_nodes
from meshwright.policy.job_queue.pool.placement import PLACEMENT_POLICIES
from meshwright.policy.job_queue.pool.pool import CountedPool, GpuPool
from meshwright.predict.job_queue.costs import NodeFailures, PreemptionCosts
from meshwright.spec.field_checks import check_integer, check_number, raise_problems
from meshwright.spec.units import parse_number, parse_seconds


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add what says which GPUs there are."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--gpus", metavar="N", type=int, help="GPUs (default: those of the nodes that are told of)"
    )
    group.add_argument(
        "--gpus-per-node", metavar="N", type=int,
        help="GPUs of a node; without it GPUs are only counted, and any will do",
    )  # fmt: skip
    group.add_argument(
        "--nodes-per-switch", metavar="N", type=int,
        help="nodes on one switch, for --placement topology",
    )  # fmt: skip
    group.add_argument("--nodes", metavar="FILE", help="a list of nodes, as mw fleet ingests it")
    group.add_argument(
        "--placement", choices=tuple(PLACEMENT_POLICIES), default="consolidate",
        help="which nodes a job gets (default: consolidate)",
    )  # fmt: skip


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add what stopping, failing and going on costs."""
    group = parser.add_argument_group("costs and failures")
    for flag, text in (
        ("--startup-time", "time without progress at each start"),
        ("--checkpoint-time", "time to save a job that is stopped for another"),
        ("--restore-time", "time to go on after that"),
    ):
        group.add_argument(flag, metavar="TIME", default="0s", help=f"{text} (default: 0s)")
    group.add_argument(
        "--checkpoint-interval", metavar="TIME",
        help="work between checkpoints, for failures of nodes",
    )  # fmt: skip
    group.add_argument(
        "--failures-per-node-day", metavar="RATE",
        help="failures of a node in a day: 0.0065 (needs nodes)",
    )  # fmt: skip
    group.add_argument(
        "--repair-time", metavar="TIME", default="4h", help="how long a node is away (default: 4h)"
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="what chance starts from")
    group.add_argument(
        "--restart-table", metavar="FILE",
        help="seconds that a start costs by job: a CSV file with gpus,model,restart_s (* for all "
        "others)",
    )  # fmt: skip
    group.add_argument(
        "--restart-every-decision",
        action="store_true",
        help="let every decision restart all that runs, as Muri's simulator does",
    )
    group.add_argument(
        "--stretch", metavar="X", default="1",
        help="let every job run X times as long as it did (default: 1)",
    )  # fmt: skip


def add_policy_flags(parser: argparse.ArgumentParser) -> None:
    """Add what single policies want to know."""
    group = parser.add_argument_group("policies")
    group.add_argument(
        "--shares", metavar="TEAM=N,…", help="shares of teams for multifactor (default: one each)"
    )
    group.add_argument(
        "--quotas", metavar="TEAM=N,…",
        help="GPUs of each team for quota (default: by how many GPU-hours each used)",
    )  # fmt: skip
    group.add_argument(
        "--migrate",
        action="store_true",
        help="place all jobs anew at each decision of srtf, srsf, las and gittins",
    )


def build_pool(args: argparse.Namespace, read: QueueWorkload) -> GpuPool:
    """Return the GPUs, all free."""
    nodes = choose_nodes(args, read)
    if nodes is not None:
        return NodePool(nodes, args.placement, seed=args.seed)
    if args.gpus is None:
        what = "nothing tells how many GPUs there are"
        most = max(ask.gpus for ask in read.requests)
        fix = (
            f"give --gpus; the largest job has {most:g}, and {find_peak_allocation(read):g} were "
            f"held at once"
        )
        raise InputError([Problem("--gpus", what, fix)])
    raise_problems(check_integer("--gpus", args.gpus))
    return CountedPool(args.gpus)


def choose_nodes(args: argparse.Namespace, read: QueueWorkload) -> list[NodeSpec] | None:
    """Return the nodes where some are told of; None: GPUs are only counted."""
    if args.nodes:
        return read_nodes(args.nodes)
    if args.gpus is not None and args.gpus_per_node is not None:
        raise_problems(
            check_integer("--gpus", args.gpus), check_integer("--gpus-per-node", args.gpus_per_node)
        )
        return make_uniform_nodes(args.gpus, args.gpus_per_node, per_domain=args.nodes_per_switch)
    if args.gpus_per_node is not None:
        raise InputError([Problem("--gpus-per-node", "says nothing alone", "give --gpus too")])
    return read.nodes if args.gpus is None and read.nodes else None


def find_peak_allocation(read: QueueWorkload) -> float:
    """Return the most GPUs that were held at once, as it was recorded."""
    edges: list[tuple[float, float]] = []
    for ask, run_s in zip(read.requests, read.durations_s, strict=True):
        edges += ((ask.submit_s, ask.gpus), (ask.submit_s + run_s, -ask.gpus))
    held = most = 0.0
    for _, gpus in sorted(edges):
        held += gpus
        most = max(most, held)
    return most


def read_costs(args: argparse.Namespace) -> PreemptionCosts:
    """Return what stopping and going on costs."""
    every = args.checkpoint_interval
    return PreemptionCosts(
        startup_s=parse_seconds(args.startup_time, "--startup-time"),
        checkpoint_s=parse_seconds(args.checkpoint_time, "--checkpoint-time"),
        restore_s=parse_seconds(args.restore_time, "--restore-time"),
        checkpoint_interval_s=None
        if every is None
        else parse_seconds(every, "--checkpoint-interval"),
        restart_every_round=args.restart_every_decision,
    )


def read_failures(args: argparse.Namespace) -> NodeFailures | None:
    """Return how nodes fail; None: they do not."""
    if args.failures_per_node_day is None:
        return None
    rate = parse_number(args.failures_per_node_day, "--failures-per-node-day")
    raise_problems(check_number("--failures-per-node-day", rate, 0.0, 1000.0))
    repair_s = parse_seconds(args.repair_time, "--repair-time")
    return NodeFailures(failures_per_node_day=rate, repair_s=repair_s, seed=args.seed)


def read_queue_config(args: argparse.Namespace, read: QueueWorkload, total: float) -> QueueConfig:
    """Return what policies want to know."""
    quotas = parse_named_numbers(args.quotas, "--quotas")
    if not quotas:
        quotas = _by_use(read, total)
    half = len(read.requests) // 2
    past = [
        ask.gpus * run
        for ask, run in zip(read.requests[:half], read.durations_s[:half], strict=True)
    ]
    return QueueConfig(
        team_shares=parse_named_numbers(args.shares, "--shares"),
        team_quotas={team: TeamQuota(nominal_quota=gpus) for team, gpus in quotas.items()},
        past_service_gpu_s=past or [1.0],
        allow_migration=args.migrate,
    )


def _by_use(read: QueueWorkload, total: float) -> dict[str, float]:
    """Divide GPUs by what teams used, so that quotas add up to all there are."""
    used: dict[str, float] = {}
    for ask, run_s in zip(read.requests, read.durations_s, strict=True):
        used[ask.team] = used.get(ask.team, 0.0) + ask.gpus * run_s
    whole_s = sum(used.values()) or 1.0
    return {team: total * one / whole_s for team, one in used.items()}
