"""`mw queue pack JOBS`: how much of a cluster each placement gives away before nothing fits."""

import argparse
from statistics import fmean

from meshwright.cli.answer import Answer, Note, table
from meshwright.cli.parser import add_common
from meshwright.cli.queue_jobs import add_jobs, read_jobs, read_nodes
from meshwright.errors import InputError, Problem
from meshwright.predict.queue.packing import SCORERS, pack
from meshwright.spec.bounds import real, require, whole
from meshwright.spec.names import unknown_name
from meshwright.spec.units import parse_number

EXAMPLES = (
    "mw queue pack openb_pod_list_default.csv --nodes openb_node_list_gpu_node.csv",
    "mw queue pack jobs.csv --nodes nodes.csv --placements best-fit,fragmentation --runs 5",
)
_STEPS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.3)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw queue pack JOBS --nodes FILE [--placements A,B,…] [flags]"
    add_jobs(parser)
    group = parser.add_argument_group("cluster")
    group.add_argument("--nodes", metavar="FILE", help="a list of nodes, as mw fleet ingests it")
    group.add_argument(
        "--placements", metavar="A,B,…", default=",".join(SCORERS),
        help=f"placements side by side (default: all): {', '.join(SCORERS)}",
    )  # fmt: skip
    group.add_argument(
        "--upto", metavar="X", default="1.3",
        help="let jobs come until they ask for X times all GPUs (default: 1.3)",
    )  # fmt: skip
    group.add_argument(
        "--runs", metavar="N", type=int, default=1, help="orders of arrival (default: 1)"
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="what chance starts from")
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with what each placement gives away."""
    upto = parse_number(args.upto, "--upto")
    require(real("--upto", upto, 0.01, 100.0), whole("--runs", args.runs))
    names = [part.strip() for part in args.placements.split(",") if part.strip()]
    problems = [
        unknown_name("placement", name, list(SCORERS), "--placements")
        for name in names
        if name not in SCORERS
    ]
    if problems:
        raise InputError(problems)
    read = read_jobs(args, shared=True)
    nodes = read_nodes(args.nodes) if args.nodes else read.nodes
    if not nodes:
        raise InputError([Problem("--nodes", "nothing tells of nodes", "name a list of nodes")])
    steps = [step for step in _STEPS if step < upto] + [upto]
    runs = []
    for name in names:
        made = [
            pack(nodes, read.asks, name, ratio=upto, seed=args.seed + at) for at in range(args.runs)
        ]
        runs.append(
            {
                "placement": name,
                "given": {f"{s:g}": fmean(one.given_at(s) for one in made) for s in steps},
                "fragments": fmean(one.fragments for one in made),
                "refused": fmean(one.refused for one in made),
            }
        )
    gpus = sum(node.gpus for node in nodes)
    data = {
        "jobs": len(read.asks), "nodes": len(nodes), "gpus": gpus, "orders": args.runs,
        "runs": runs,
    }  # fmt: skip
    title = f"{len(read.asks):,} jobs on {gpus:,} GPUs of {len(nodes):,} nodes: given away, %"
    columns = ["placement", *(f"{step:.0%}" for step in steps), "fragments", "refused"]
    rows = [
        [
            one["placement"],
            *(f"{100 * share:.1f}" for share in one["given"].values()),
            f"{100 * one['fragments']:.1f}",
            f"{one['refused']:,.0f}",
        ]
        for one in runs
    ]  # fmt: skip
    views = (
        table(",".join(columns), rows, title, right=",".join(columns[1:])),
        Note(
            f"{steps[0]:.0%} and on: GPUs asked for so far, over all GPUs; "
            "jobs are drawn from the list, again where it is too short; "
            "fragments: free and of no use, % of all"
        ),
    )
    best = max(runs, key=lambda one: one["given"][f"{upto:g}"])
    return Answer("queue.pack/1", data, views, (str(best["placement"]),))
