"""`mw queue simulate JOBS`: jobs replayed through one queue."""

import argparse

import msgspec

from meshwright.cli.answer import Answer
from meshwright.cli.parser import add_common
from meshwright.cli.queue_cluster import (
    add_cluster,
    add_costs,
    add_settings,
    costs_of,
    failures_of,
    pool_of,
    settings_of,
)
from meshwright.cli.queue_jobs import Read, add_jobs, read_jobs
from meshwright.cli.queue_screen import about, one_screen
from meshwright.policy.queue.policies import POLICIES, make_policy
from meshwright.predict.queue.outcome import Outcome, outcome_of
from meshwright.predict.queue.simulate import simulate

EXAMPLES = (
    "mw queue simulate jobs.csv --gpus 512 --policy easy",
    "mw queue simulate fleet/ --policy srsf --per-node 8 --gpus 1024 --save 30s --restore 2m",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw queue simulate JOBS --gpus N [--policy NAME] [flags]"
    add_jobs(parser)
    parser.add_argument(
        "--policy", choices=tuple(POLICIES), default="fifo",
        help="who goes first (default: fifo): "
        + "; ".join(f"{name}: {one.summary}" for name, one in POLICIES.items()).replace("%", "%%"),
    )  # fmt: skip
    add_cluster(parser)
    add_costs(parser)
    add_settings(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with what the queue comes to."""
    read = read_jobs(args)
    found, gpus = replay(args, read, args.policy)
    data = {"policy": args.policy, **about(args, read, gpus), **msgspec.to_builtins(found)}
    views = one_screen(read, args.policy, found, gpus)
    return Answer("queue.simulate/1", data, views, (f"{found.jct_s.mean:.6g}",))


def replay(args: argparse.Namespace, read: Read, policy: str) -> tuple[Outcome, float]:
    """Take the jobs through one queue; return what it comes to, and on how many GPUs."""
    pool = pool_of(args, read)
    gpus = pool.total
    made = make_policy(policy, settings_of(args, read, gpus))
    ran = simulate(
        read.asks, read.run_s, pool, made, costs=costs_of(args), failures=failures_of(args)
    )
    return outcome_of(ran), gpus
