"""`mw queue compare JOBS`: the same jobs through several policies."""

import argparse

import msgspec

from meshwright.cli.answer import Answer
from meshwright.cli.parser import add_common
from meshwright.cli.queue_cluster import add_cluster, add_costs, add_settings
from meshwright.cli.queue_jobs import add_jobs, read_jobs
from meshwright.cli.queue_screen import about, compared
from meshwright.cli.queue_simulate import replay
from meshwright.errors import InputError, Problem
from meshwright.policy.queue.policies import POLICIES
from meshwright.spec.names import unknown_name

EXAMPLES = (
    "mw queue compare jobs.csv --gpus 512 --policies fifo,easy,sjf,srsf,las",
    "mw queue compare fleet/ --policies all --estimate predicted --save 30s --restore 2m",
)
_DEFAULT = "fifo,easy,fair-share,sjf,srsf,las,finish-time"


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
    add_settings(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with what each policy comes to."""
    names = _names(args.policies)
    read = read_jobs(args)
    runs = {name: replay(args, read, name) for name in names}
    gpus = next(iter(runs.values()))[1]
    found = {name: one for name, (one, _) in runs.items()}
    data = {
        **about(args, read, gpus),
        "runs": [{"policy": name, **msgspec.to_builtins(one)} for name, one in found.items()],
    }
    best = min(found, key=lambda name: found[name].jct_s.mean)
    return Answer("queue.compare/1", data, compared(read, found, gpus), (best,))


def _names(text: str) -> list[str]:
    if text == "all":
        return list(POLICIES)
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    problems = [
        unknown_name("policy", name, list(POLICIES), "--policies")
        for name in names
        if name not in POLICIES
    ]
    if problems:
        raise InputError(problems)
    if not names:
        raise InputError([Problem("--policies", "names none", "use all")])
    return names
