"""`mw queue compare JOBS`: the same jobs through several policies."""

import argparse

import msgspec

from meshwright.cli.parser import add_common
from meshwright.cli.queue.flags import add_cluster, add_costs, add_policy_flags
from meshwright.cli.queue.jobs import add_jobs, read_jobs
from meshwright.cli.queue.policy_inputs import describe_gaps, parse_policies, require_inputs
from meshwright.cli.queue.restart_table import apply_run_changes
from meshwright.cli.queue.screen import describe_run, render_comparison
from meshwright.cli.queue.simulate import replay_jobs
from meshwright.cli.result import CommandResult, NoteView
from meshwright.policy.job_queue.policy_registry import POLICIES, list_missing_inputs

EXAMPLES = (
    "mw queue compare jobs.csv --gpus 512 --policies fifo,easy,sjf,srsf,las",
    "mw queue compare fleet/ --policies all --runtime-estimate predicted --restore-time 2m",
)
_DEFAULT = "fifo,easy,multifactor,sjf,srsf,las"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw queue compare JOBS --gpus N [--policies A,B,…] [flags]"
    add_jobs(parser)
    parser.add_argument(
        "--policies", metavar="A,B,…", default=_DEFAULT,
        help=f"policies side by side, or all (default: {_DEFAULT}); there are "
        + ", ".join(POLICIES),
    )  # fmt: skip
    add_cluster(parser)
    add_costs(parser)
    add_policy_flags(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what each policy comes to."""
    names = parse_policies(args.policies, "--policies")
    read = apply_run_changes(args, read_jobs(args))
    skipped = {name: list_missing_inputs(name, read.requests) for name in names}
    if args.policies == "all":
        names = [name for name in names if not skipped[name]]
    require_inputs(names, read, "--policies")
    notes = [
        f"left out: {name}, as no job has {missing[0]}" for name, missing in skipped.items()
        if missing
    ]  # fmt: skip
    runs = {name: replay_jobs(args, read, name) for name in names}
    gpus = next(iter(runs.values()))[1]
    found = {name: one for name, (one, _) in runs.items()}
    data = {
        **describe_run(args, read, gpus),
        "runs": [{"policy": name, **msgspec.to_builtins(one)} for name, one in found.items()],
    }
    told = (*notes, *describe_gaps(names, read))
    views = (*render_comparison(read, found, gpus), *map(NoteView, told))
    best = min(found, key=lambda name: found[name].jct_s.mean)
    return CommandResult("queue.compare/2", data, views, (best,))
