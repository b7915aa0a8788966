"""`mw queue pack JOBS`: how much of a cluster each placement allocates before nothing fits."""

import argparse
from statistics import fmean

from meshwright.cli.parser import add_common
from meshwright.cli.queue.jobs import add_jobs, read_jobs, read_nodes
from meshwright.cli.result import CommandResult, NoteView, make_table
from meshwright.errors import InputError, Problem
from meshwright.predict.job_queue.packing import SCORERS, pack_cluster
from meshwright.spec.field_checks import check_integer, check_number, raise_problems
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import parse_number

EXAMPLES = (
    "mw queue pack openb_pod_list_default.csv --nodes openb_node_list_gpu_node.csv",
    "mw queue pack jobs.csv --nodes nodes.csv --placements best-fit,fragmentation --trials 5",
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
        "--demand-ratio", metavar="X", default="1.3",
        help="let jobs come until they ask for X times all GPUs (default: 1.3)",
    )  # fmt: skip
    group.add_argument(
        "--trials", metavar="N", type=int, default=1, help="orders of arrival (default: 1)"
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="what chance starts from")
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what each placement allocates."""
    upto = parse_number(args.demand_ratio, "--demand-ratio")
    raise_problems(
        check_number("--demand-ratio", upto, 0.01, 100.0), check_integer("--trials", args.trials)
    )
    names = [part.strip() for part in args.placements.split(",") if part.strip()]
    problems = [
        build_unknown_name_problem("placement", name, list(SCORERS), "--placements")
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
            pack_cluster(nodes, read.requests, name, ratio=upto, seed=args.seed + at)
            for at in range(args.trials)
        ]
        runs.append(
            {
                "placement": name,
                "allocated": {
                    f"{s:g}": fmean(one.allocated_fraction_at(s) for one in made) for s in steps
                },
                "fragmented_fraction": fmean(one.fragmented_fraction for one in made),
                "rejected": fmean(one.rejected for one in made),
            }
        )
    gpus = sum(node.gpus for node in nodes)
    data = {
        "jobs": len(read.requests), "nodes": len(nodes), "gpus": gpus, "trials": args.trials,
        "runs": runs,
    }  # fmt: skip
    title = f"{len(read.requests):,} jobs on {gpus:,} GPUs of {len(nodes):,} nodes: allocated, %"
    columns = ["placement", *(f"{step:.0%}" for step in steps), "fragments", "rejected"]
    rows = [
        [
            one["placement"],
            *(f"{100 * share:.1f}" for share in one["allocated"].values()),
            f"{100 * one['fragmented_fraction']:.1f}",
            f"{one['rejected']:,.0f}",
        ]
        for one in runs
    ]  # fmt: skip
    views = (
        make_table(",".join(columns), rows, title, right=",".join(columns[1:])),
        NoteView(
            f"{steps[0]:.0%} and on: GPUs asked for so far, over all GPUs; "
            "jobs are drawn from the list, again where it is too short; "
            "fragments: free and of no use, % of all"
        ),
    )
    best = max(runs, key=lambda one: one["allocated"][f"{upto:g}"])
    return CommandResult("queue.pack/2", data, views, (str(best["placement"]),))
