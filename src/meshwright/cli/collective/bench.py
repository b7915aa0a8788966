"""`mw collective bench`: run collectives here and measure them, in the manner of nccl-tests."""

import argparse
import io
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli.collective.flags import is_collective_file, parse_op, read_collective_file
from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView, View, make_table
from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.file_errors import make_parent_folder
from meshwright.policy.collective import ALGORITHMS, Collective, build_algorithm
from meshwright.policy.collective.collective import CollectiveOp
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import format_bytes, parse_bytes, parse_count

if TYPE_CHECKING:
    from meshwright.run.parallel.collective.bench.bench_row import BenchBackend, CollectiveBenchRow


def plot_bus_bandwidth(path: str, rows: Sequence["CollectiveBenchRow"]) -> None:
    """Draw the rows that keep input and output apart."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        hint = "pip install 'meshwright[plots]'"
        raise MissingDependency("--plot needs matplotlib, which is not installed", hint) from None
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if not row.in_place:
            name = row.algorithm if row.transport != "shm" else f"{row.algorithm} (shared memory)"
            lines[name].append((row.size_bytes, row.busbw_gbps))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        across, rates = zip(*points, strict=True)
        axes.plot(across, rates, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row.size_bytes for row in rows})
    shown = sizes[:: max(1, len(sizes) // 8)]
    axes.set_xticks(shown, [format_bytes(size) for size in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("message")
    axes.set_ylabel("bus bandwidth in GB/s")
    first = rows[0]
    axes.set_title(f"{first.op}, {first.ranks} ranks, {first.dtype}, out of place")
    axes.grid(alpha=0.3)
    axes.legend()
    make_parent_folder(Path(path))
    try:
        figure.savefig(path, format=Path(path).suffix.lstrip(".") or "svg")
    except (OSError, ValueError) as error:
        fix = "name an .svg or .png file that can be written"
        raise InputError([Problem(path, f"cannot write: {error}", fix)]) from None


EXAMPLES = (
    "mw collective bench --ranks 2 --minbytes 64KiB --maxbytes 16MiB",
    "mw collective bench ring,halving_doubling --ranks 4 --plot bench.svg",
    "torchrun --nproc-per-node 8 -m meshwright collective bench ring --backend nccl",
)

MAX_PROCESSES = 64

_DEFAULT = {"all_reduce": "ring,two_shot", "all_to_all": "pairwise"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("names", metavar="ALGORITHMS", nargs="?",
                        help="names of mw collective list or files, comma-separated")  # fmt: skip
    parser.add_argument("--op", metavar="OP", default="all_reduce", help="default: all_reduce")
    parser.add_argument("--ranks", metavar="N", default="2",
                        help="processes to start here (default: 2)")  # fmt: skip
    parser.add_argument("--minbytes", metavar="BYTES", default="1KiB", help="default: 1KiB")
    parser.add_argument("--maxbytes", metavar="BYTES", default="16MiB", help="default: 16MiB")
    parser.add_argument(
        "--stepfactor", metavar="N", default="4", help="from size to size (default: 4)"
    )
    parser.add_argument("--iters", metavar="N", default="10", help="default: 10")
    parser.add_argument("--warmup-iters", metavar="N", default="2", help="default: 2")
    parser.add_argument("--datatype", metavar="TYPE", default="float32", help="default: float32")
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto",
                        help="auto: nccl under torchrun with GPUs, else gloo")  # fmt: skip
    parser.add_argument("--transport", choices=("auto", "shm", "torch"), default="auto",
                        help="what carries chunks: memory that processes share, or torch's "
                        "point-to-point (default: auto)")  # fmt: skip
    parser.add_argument("--no-baseline", action="store_true", help="leave the backend's own out")
    parser.add_argument("--plot", metavar="FILE", help="draw bus bandwidth by size: .svg or .png")
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with one row per size, algorithm and place of the result."""
    op = parse_op(args.op)
    # Under torchrun the launcher says how many take part.
    launched = os.environ.get("WORLD_SIZE")
    ranks = int(launched or parse_count(args.ranks, "--ranks"))
    if not launched and not 2 <= ranks <= MAX_PROCESSES:
        what = f"{ranks} processes on one machine"
        raise InputError([Problem("--ranks", what, f"use 2 to {MAX_PROCESSES}")])
    chosen = [_built(name, op, ranks) for name in _names(args, op)]
    rows = run_sweep(args, chosen)
    if int(os.environ.get("RANK", "0")):
        # All ranks have all rows; one of them speaks.
        sys.stdout = io.StringIO()
        return CommandResult("collective.bench/1", {"rows": []}, ())
    notes: list[View] = []
    if args.plot:
        plot_bus_bandwidth(args.plot, rows)
        notes.append(NoteView(f"wrote {args.plot}"))
    wrong = sum(row.wrong for row in rows)
    if wrong:
        notes.append(NoteView(f"{wrong:,} elements are wrong"))
    data: dict[str, Any] = {"rows": [msgspec.to_builtins(row) for row in rows], "wrong": wrong}
    quiet = tuple(f"{row.algorithm}\t{row.size_bytes}\t{row.time_us:.6g}" for row in rows)
    return CommandResult(
        "collective.bench/1", data, (_view(rows), *notes), quiet, 1 if wrong else 0
    )


def run_sweep(args: argparse.Namespace, chosen: list[Collective]) -> list["CollectiveBenchRow"]:
    """Run the sweep."""
    try:
        from meshwright.run.parallel.collective.bench.bench import run_collective_bench
        from meshwright.run.parallel.collective.bench.bench_row import MessageSizeSweep
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        hint = "pip install 'meshwright[train]'"
        raise MissingDependency("running collectives needs torch", hint) from None
    sweep = MessageSizeSweep(
        min_bytes=parse_bytes(args.minbytes, "--minbytes"),
        max_bytes=parse_bytes(args.maxbytes, "--maxbytes"),
        step_factor=parse_count(args.stepfactor, "--stepfactor"),
        dtype=args.datatype,
        warmup=parse_count(args.warmup_iters, "--warmup-iters"),
        iterations=parse_count(args.iters, "--iters"),
        backend=_backend(args.backend),
        transport=args.transport,
        baseline=not args.no_baseline,
    )
    return run_collective_bench(chosen, sweep)


def _backend(asked: str) -> "BenchBackend":
    """Return the backend to run on: NCCL where a launcher gave every process a GPU."""
    if asked == "auto":
        import torch

        return "nccl" if "RANK" in os.environ and torch.cuda.is_available() else "gloo"
    return "nccl" if asked == "nccl" else "gloo"


def _names(args: argparse.Namespace, op: CollectiveOp) -> list[str]:
    known = [found.name for found in ALGORITHMS if op in found.ops]
    words = args.names or _DEFAULT.get(op, known[0])
    given = [word.strip() for word in words.split(",") if word.strip()]
    names = [n if is_collective_file(n) else n.lower().replace("-", "_") for n in given]
    other = [name for name in names if name in {found.name for found in ALGORITHMS} - set(known)]
    if other:
        what = f"{other[0]} does no {op}"
        raise InputError([Problem("ALGORITHMS", what, f"use {', '.join(known)}")])
    strange = [name for name in names if name not in known and not is_collective_file(name)]
    if strange:
        raise InputError(
            [build_unknown_name_problem("algorithm", name, known, "ALGORITHMS") for name in strange]
        )
    return names


def _built(name: str, op: CollectiveOp, ranks: int) -> Collective:
    if is_collective_file(name):
        found = read_collective_file(name)
        if (found.op, found.ranks) != (op, ranks):
            what = f"{name} is {found.op} over {found.ranks} ranks"
            fix = f"--op {found.op} --ranks {found.ranks}"
            raise InputError([Problem("ALGORITHMS", what, fix)])
        return found
    if op == "all_to_all_v":
        what = "all_to_all_v has no size of its own"
        raise InputError([Problem("--op", what, "measure all_to_all instead")])
    peers = [(rank + 1) % ranks for rank in range(ranks)] if op == "send_recv" else None
    return build_algorithm(name, op, ranks, per_node=ranks, peers=peers)


def _view(rows: list["CollectiveBenchRow"]) -> View:
    shown = [
        (format_bytes(row.size_bytes), row.algorithm, row.transport,
         "in" if row.in_place else "out of", f"{row.time_us:,.1f}", f"{row.algbw_gbps:.3f}",
         f"{row.busbw_gbps:.3f}", row.wrong)
        for row in rows
    ]  # fmt: skip
    first = rows[0] if rows else None
    title = "" if first is None else f"{first.op}, {first.ranks} ranks, {first.dtype}; GB/s"
    return make_table(
        "size, algorithm, over, place, time µs, algbw, busbw, wrong", shown, title,
        right="size, time µs, algbw, busbw, wrong",
    )  # fmt: skip
