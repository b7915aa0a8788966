"""`mw collective bench`: run collectives here and measure them, in the manner of nccl-tests."""

import argparse
import io
import os
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli.answer import Answer, Note, View, table
from meshwright.cli.collective_source import is_file, op_of, read_file
from meshwright.cli.parser import add_common
from meshwright.errors import InputError, MissingPart, Problem
from meshwright.policy.collective import ALGORITHMS, Collective, build
from meshwright.policy.collective.collective import Op
from meshwright.spec.names import unknown_name
from meshwright.spec.units import format_bytes, parse_bytes, parse_count

if TYPE_CHECKING:
    from meshwright.run.parallel.collective.bench import Backend, Row

EXAMPLES = (
    "mw collective bench --ranks 2 --begin 64KiB --end 16MiB",
    "mw collective bench ring,halving_doubling --ranks 4 --plot bench.svg",
    "torchrun --nproc-per-node 8 -m meshwright collective bench ring --backend nccl",
)
MOST_PROCESSES = 64
_DEFAULT = {"all_reduce": "ring,two_shot", "all_to_all": "pairwise"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("names", metavar="ALGORITHMS", nargs="?",
                        help="names of mw collective list or files, comma-separated")  # fmt: skip
    parser.add_argument("--op", metavar="OP", default="all_reduce", help="default: all_reduce")
    parser.add_argument("--ranks", metavar="N", default="2",
                        help="processes to start here (default: 2)")  # fmt: skip
    parser.add_argument("--begin", metavar="BYTES", default="1KiB", help="default: 1KiB")
    parser.add_argument("--end", metavar="BYTES", default="16MiB", help="default: 16MiB")
    parser.add_argument("--factor", metavar="N", default="4", help="from size to size (default: 4)")
    parser.add_argument("--iterations", metavar="N", default="10", help="default: 10")
    parser.add_argument("--warmup", metavar="N", default="2", help="default: 2")
    parser.add_argument("--dtype", metavar="TYPE", default="float32", help="default: float32")
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto",
                        help="auto: nccl under torchrun with GPUs, else gloo")  # fmt: skip
    parser.add_argument("--transport", choices=("auto", "shared", "torch"), default="auto",
                        help="what carries chunks: memory that processes share, or torch's "
                        "point-to-point (default: auto)")  # fmt: skip
    parser.add_argument("--no-native", action="store_true", help="leave the backend's own out")
    parser.add_argument("--plot", metavar="FILE", help="draw bus bandwidth by size: .svg or .png")
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with one row per size, algorithm and place of the result."""
    op = op_of(args.op)
    # Under torchrun the launcher says how many take part.
    launched = os.environ.get("WORLD_SIZE")
    ranks = int(launched or parse_count(args.ranks, "--ranks"))
    if not launched and not 2 <= ranks <= MOST_PROCESSES:
        what = f"{ranks} processes on one machine"
        raise InputError([Problem("--ranks", what, f"use 2 to {MOST_PROCESSES}")])
    chosen = [_built(name, op, ranks) for name in _names(args, op)]
    rows = measured(args, chosen)
    if int(os.environ.get("RANK", "0")):
        # All ranks have all rows; one of them speaks.
        sys.stdout = io.StringIO()
        return Answer("collective.bench/1", {"rows": []}, ())
    notes: list[View] = []
    if args.plot:
        from meshwright.cli.collective_plot import plot

        plot(args.plot, rows)
        notes.append(Note(f"wrote {args.plot}"))
    wrong = sum(row.wrong for row in rows)
    if wrong:
        notes.append(Note(f"{wrong:,} elements are wrong"))
    data: dict[str, Any] = {"rows": [msgspec.to_builtins(row) for row in rows], "wrong": wrong}
    quiet = tuple(f"{row.algorithm}\t{row.size_bytes}\t{row.time_us:.6g}" for row in rows)
    return Answer("collective.bench/1", data, (_view(rows), *notes), quiet, 1 if wrong else 0)


def measured(args: argparse.Namespace, chosen: list[Collective]) -> list["Row"]:
    """Run the sweep."""
    try:
        from meshwright.run.parallel.collective.bench import SizeSweep, bench
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        hint = "pip install 'meshwright[train]'"
        raise MissingPart("running collectives needs torch", hint) from None
    sweep = SizeSweep(
        begin_bytes=parse_bytes(args.begin, "--begin"),
        end_bytes=parse_bytes(args.end, "--end"),
        factor=parse_count(args.factor, "--factor"),
        dtype=args.dtype,
        warmup=parse_count(args.warmup, "--warmup"),
        iterations=parse_count(args.iterations, "--iterations"),
        backend=_backend(args.backend),
        transport=args.transport,
        native=not args.no_native,
    )
    return bench(chosen, sweep)


def _backend(asked: str) -> "Backend":
    """Return the backend to run on: NCCL where a launcher gave every process a GPU."""
    if asked == "auto":
        import torch

        return "nccl" if "RANK" in os.environ and torch.cuda.is_available() else "gloo"
    return "nccl" if asked == "nccl" else "gloo"


def _names(args: argparse.Namespace, op: Op) -> list[str]:
    known = [found.name for found in ALGORITHMS if op in found.ops]
    words = args.names or _DEFAULT.get(op, known[0])
    given = [word.strip() for word in words.split(",") if word.strip()]
    names = [n if is_file(n) else n.lower().replace("-", "_") for n in given]
    other = [name for name in names if name in {found.name for found in ALGORITHMS} - set(known)]
    if other:
        what = f"{other[0]} does no {op}"
        raise InputError([Problem("ALGORITHMS", what, f"use {', '.join(known)}")])
    strange = [name for name in names if name not in known and not is_file(name)]
    if strange:
        raise InputError([unknown_name("algorithm", name, known, "ALGORITHMS") for name in strange])
    return names


def _built(name: str, op: Op, ranks: int) -> Collective:
    if is_file(name):
        found = read_file(name)
        if (found.op, found.ranks) != (op, ranks):
            what = f"{name} is {found.op} over {found.ranks} ranks"
            fix = f"--op {found.op} --ranks {found.ranks}"
            raise InputError([Problem("ALGORITHMS", what, fix)])
        return found
    if op == "all_to_all_v":
        what = "all_to_all_v has no size of its own"
        raise InputError([Problem("--op", what, "measure all_to_all instead")])
    peers = [(rank + 1) % ranks for rank in range(ranks)] if op == "send_recv" else None
    return build(name, op, ranks, per_node=ranks, peers=peers)


def _view(rows: list["Row"]) -> View:
    shown = [
        (format_bytes(row.size_bytes), row.algorithm, row.transport,
         "in" if row.in_place else "out of", f"{row.time_us:,.1f}", f"{row.algbw_gbps:.3f}",
         f"{row.busbw_gbps:.3f}", row.wrong)
        for row in rows
    ]  # fmt: skip
    first = rows[0] if rows else None
    title = "" if first is None else f"{first.op}, {first.ranks} ranks, {first.dtype}; GB/s"
    return table(
        "size, algorithm, over, place, time µs, algbw, busbw, wrong", shown, title,
        right="size, time µs, algbw, busbw, wrong",
    )  # fmt: skip
