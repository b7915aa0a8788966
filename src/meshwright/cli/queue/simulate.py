"""`mw queue simulate JOBS`: jobs replayed through one queue."""

import argparse

import msgspec

from meshwright.cli.parser import add_common
from meshwright.cli.queue.flags import (
    add_cluster,
    add_costs,
    add_policy_flags,
    build_pool,
    read_costs,
    read_failures,
    read_queue_config,
)
from meshwright.cli.queue.jobs import QueueWorkload, add_jobs, read_jobs
from meshwright.cli.queue.policy_inputs import describe_gaps, require_inputs
from meshwright.cli.queue.restart_table import apply_run_changes
from meshwright.cli.queue.screen import describe_run, render_run
from meshwright.cli.result import CommandResult, NoteView
from meshwright.errors import InputError
from meshwright.policy.job_queue.policy_registry import (
    POLICIES,
    build_unknown_policy_problem,
    make_policy,
)
from meshwright.predict.job_queue.outcome import QueueOutcome, summarize_run
from meshwright.predict.job_queue.simulator import simulate_queue

EXAMPLES = (
    "mw queue simulate jobs.csv --gpus 512 --policy easy",
    "mw queue simulate fleet/ --policy srsf --gpus-per-node 8 --gpus 1024 --restore-time 2m",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw queue simulate JOBS --gpus N [--policy NAME] [flags]"
    add_jobs(parser)
    parser.add_argument(
        "--policy", metavar="NAME", default="fifo",
        help="who goes first (default: fifo): "
        + "; ".join(f"{name}: {one.summary}" for name, one in POLICIES.items()).replace("%", "%%"),
    )  # fmt: skip
    add_cluster(parser)
    add_costs(parser)
    add_policy_flags(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what the queue comes to."""
    if args.policy not in POLICIES:
        raise InputError([build_unknown_policy_problem(args.policy, "--policy")])
    read = apply_run_changes(args, read_jobs(args))
    require_inputs([args.policy], read, "--policy")
    found, gpus = replay_jobs(args, read, args.policy)
    data = {"policy": args.policy, **describe_run(args, read, gpus), **msgspec.to_builtins(found)}
    notes = map(NoteView, describe_gaps([args.policy], read))
    views = (*render_run(read, args.policy, found, gpus), *notes)
    return CommandResult("queue.simulate/2", data, views, (f"{found.jct_s.mean:.6g}",))


def replay_jobs(
    args: argparse.Namespace, read: QueueWorkload, policy: str
) -> tuple[QueueOutcome, float]:
    """Take the jobs through one queue; return what it comes to, and on how many GPUs."""
    pool = build_pool(args, read)
    gpus = pool.total
    made = make_policy(policy, read_queue_config(args, read, gpus))
    ran = simulate_queue(
        read.requests,
        read.durations_s,
        pool,
        made,
        costs=read_costs(args),
        failures=read_failures(args),
    )
    return summarize_run(ran), gpus
