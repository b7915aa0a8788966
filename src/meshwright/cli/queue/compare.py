"""`mw queue compare JOBS`: the same jobs through several policies."""

import argparse

import msgspec

from meshwright.cli.parser import add_common
from meshwright.cli.queue.flags import add_cluster, add_costs, add_policy_flags
from meshwright.cli.queue.jobs import add_jobs, read_jobs
from meshwright.cli.queue.screen import describe_run, render_comparison
from meshwright.cli.queue.simulate import replay_jobs
from meshwright.cli.result import CommandResult
from meshwright.errors import InputError, Problem
from meshwright.policy.job_queue.policy_registry import POLICIES
from meshwright.spec.name_suggestions import build_unknown_name_problem

EXAMPLES = (
    "mw queue compare jobs.csv --gpus 512 --policies fifo,easy,sjf,srsf,las",
    "mw queue compare fleet/ --policies all --runtime-estimate predicted --restore-time 2m",
)
_DEFAULT = "fifo,easy,multifactor,sjf,srsf,las,finish-time"


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
    names = _names(args.policies)
    read = read_jobs(args)
    runs = {name: replay_jobs(args, read, name) for name in names}
    gpus = next(iter(runs.values()))[1]
    found = {name: one for name, (one, _) in runs.items()}
    data = {
        **describe_run(args, read, gpus),
        "runs": [{"policy": name, **msgspec.to_builtins(one)} for name, one in found.items()],
    }
    best = min(found, key=lambda name: found[name].jct_s.mean)
    return CommandResult("queue.compare/2", data, render_comparison(read, found, gpus), (best,))


def _names(text: str) -> list[str]:
    if text == "all":
        return list(POLICIES)
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    problems = [
        build_unknown_name_problem("policy", name, list(POLICIES), "--policies")
        for name in names
        if name not in POLICIES
    ]
    if problems:
        raise InputError(problems)
    if not names:
        raise InputError([Problem("--policies", "names none", "use all")])
    return names
