"""`mw validate`: predictions beside what other people measured and published, row by row."""

import argparse
from pathlib import Path

from meshwright.cli.parser import add_common, add_verbs
from meshwright.cli.result import CommandResult
from meshwright.cli.validate import collectives, fleet, rl, serving, training
from meshwright.errors import MissingDependency

EXAMPLES = (training.EXAMPLES[0], collectives.EXAMPLES[0])
_VERBS = (
    (
        "training",
        "score predicted training steps against published runs",
        training.EXAMPLES,
    ),
    (
        "collectives",
        "score predicted collectives against published benchmarks, and NCCL's choice too",
        collectives.EXAMPLES,
    ),
    (
        "serving",
        "score predicted serving against published runs: throughput, TPOT, TTFT",
        serving.EXAMPLES,
    ),
    (
        "rl",
        "score predicted steps of reinforcement learning against published ones",
        rl.EXAMPLES,
    ),
    (
        "fleet",
        "reproduce published statistics of GPU clusters from their traces",
        fleet.EXAMPLES,
    ),
)
VALIDATION_RUNS = {
    verb: Path(f"validation/{verb}/runs.json") for verb in ("training", "collectives", "rl")
}
"""Runs that the repository has; those of serving are given with `--runs`."""
NCCL_TUNING_LOG = Path("validation/collectives/nccl_tuning_h100_2_27_5.json")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags."""
    found = add_verbs(parser, _VERBS)
    for verb, of_verb in found.items():
        if verb == "fleet":
            continue
        usual = (
            f" (default: {VALIDATION_RUNS[verb]} of the repository)"
            if verb in VALIDATION_RUNS
            else ""
        )
        of_verb.add_argument(
            "--runs",
            metavar="FILE",
            required=verb not in VALIDATION_RUNS,
            help=f"JSON list of runs{usual}",
        )
    found["fleet"].add_argument(
        "--traces", metavar="FOLDER", required=True, help="folder of public cluster traces"
    )
    found["fleet"].add_argument(
        "--published",
        metavar="FILE",
        help="JSON of published statistics to compare ours with (default: ours alone)",
    )
    found["fleet"].add_argument(
        "--simulate",
        action="store_true",
        help="take workloads through the queue as well, which takes a minute",
    )
    found["collectives"].add_argument(
        "--tuning",
        metavar="FILE",
        help="NCCL's tuning log as JSON (default: the repository's, where there is one)",
    )
    found["collectives"].add_argument(
        "--by",
        choices=("formula", "simulation"),
        default="formula",
        help="predict in closed form, or simulate NCCL's algorithm move by move",
    )
    for parser_of_verb in found.values():
        add_common(parser_of_verb)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with every row and the summary."""
    if args.verb == "fleet":
        published = Path(args.published) if args.published else None
        return fleet.run_validation(published, Path(args.traces), args.simulate)
    runs = Path(args.runs) if args.runs else _own(VALIDATION_RUNS[args.verb])
    if runs is None:
        raise MissingDependency(
            "the published runs are not installed with the package",
            "run it in a clone of the repository, or give a file with --runs",
        )
    if args.verb == "training":
        return training.run_validation(runs)
    if args.verb == "rl":
        return rl.run_validation(runs)
    if args.verb == "serving":
        return serving.run_validation(runs, silent=args.quiet or args.json)
    tuning = Path(args.tuning) if args.tuning else _own(NCCL_TUNING_LOG)
    return collectives.run_validation(runs, tuning, args.by)


def _own(path: Path) -> Path | None:
    """Return a file of the repository, where the package runs in a clone of it."""
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        if (folder / path).exists():
            return folder / path
    return None
