"""`mw bench`: what this machine really does, against what its catalog entry says."""

import argparse
import io
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.cli import bench_serve
from meshwright.cli.answer import Answer
from meshwright.cli.bench_screen import answer_of, burn_in_answer, require_kind
from meshwright.cli.parser import add_common, verbs
from meshwright.errors import InputError, MissingPart, Problem
from meshwright.observe.bench.burn_in import burn_in
from meshwright.observe.bench.families import FAMILIES, families
from meshwright.observe.bench.family import Family, Place, Size
from meshwright.observe.bench.health import usual
from meshwright.observe.bench.host import cores, machine_of, others_here
from meshwright.observe.bench.mlperf_log import MlperfLog
from meshwright.observe.bench.suite import BUDGET_S, Bench, Progress, measure, read
from meshwright.spec.bounds import require, whole
from meshwright.spec.names import unknown_name
from meshwright.spec.units import format_some, parse_count, parse_number

if TYPE_CHECKING:
    import torch

    from meshwright.observe.bench.exchanges import Backend
    from meshwright.run.parallel.launch.environment import World

EXAMPLES = (
    "mw bench --quick",
    "mw bench -o bench.jsonl",
    "mw bench --only products,copies --health",
    "mw bench --burn-in 10",
    "mw bench --show bench.jsonl",
    "mw bench serve http://127.0.0.1:8000 --concurrency 64",
)
EXCHANGES = ("collectives", "messages")
MOST_RANKS = 64
MOST_MINUTES = 7 * 24 * 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = (
        "mw bench [--quick|--full] [--only FAMILY,…] [-o FILE [--resume]] [flags]\n"
        "       mw bench serve URL [flags]"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer cases, about a minute")
    size.add_argument("--full", action="store_true", help="all cases, up to six minutes (default)")
    parser.add_argument(
        "--only", default="", metavar="FAMILY,…",
        help=f"some of {', '.join(_names())}",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="keep rows here, for mw calibrate and --resume"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with FILE: measure what it lacks"
    )
    parser.add_argument("--show", metavar="FILE", help="show rows of FILE and measure nothing")
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: a GPU)")
    parser.add_argument(
        "--nproc", metavar="N", help="processes that exchange (default: one for each GPU, or 2)"
    )
    parser.add_argument(
        "--folder", default=".", metavar="DIR", help="where files are written and read (default: .)"
    )
    parser.add_argument(
        "--minutes", metavar="N", help="time for all families (default: 1 quick, 6 full)"
    )
    health = parser.add_argument_group("health")
    health.add_argument(
        "--health", action="store_true",
        help="exit with 1 where the device is slower than its kind",
    )  # fmt: skip
    health.add_argument(
        "--against", action="append", default=[], metavar="FILE",
        help="rows of sound devices to compare with, in place of the catalog's; may be repeated",
    )  # fmt: skip
    health.add_argument(
        "--burn-in", metavar="MINUTES", help="only repeat products under load, checking every bit"
    )
    parser.add_argument("--mlperf-log", metavar="FILE", help="write results as MLPerf's log lines")
    add_common(parser)
    serving = ("serve", bench_serve.SUMMARY, bench_serve.EXAMPLES)
    bench_serve.configure(verbs(parser, [serving], required=False)["serve"])


def _names() -> list[str]:
    return [family.name for family in families(ranks=1, backend="gloo", folder=Path())]


def run(args: argparse.Namespace) -> Answer:
    """Answer with what was measured, or is shown."""
    if args.verb == "serve":
        return bench_serve.run(args)
    size: Size = "quick" if args.quick else "full"
    only = _only(args.only)
    others = usual([read(_there(path)).rows for path in args.against])
    if args.against and not args.health:
        fix = "add --health"
        raise InputError([Problem("--against", "compares only where health is asked for", fix)])
    if args.show:
        bench = read(_there(args.show))
        rows = tuple(row for row in bench.rows if not only or row.case.family in only)
        return answer_of(bench._replace(rows=rows), health=args.health, others=others)
    here = _here(args, only)
    if args.burn_in is not None:
        return _burn_in(args, here)
    if args.health:
        require_kind(machine_of(here.place.device), others)
    asked = _families(args, here, only)
    others_run = others_here(1 if here.place.on_gpu else cores())
    bench, took_s = _measured(args, here, asked, size)
    if here.world.rank:
        # All ranks took part; one of them speaks.
        sys.stdout = io.StringIO()
        return Answer("bench/1", {"rows": []}, ())
    return answer_of(
        bench,
        health=args.health,
        others=others,
        took_s=took_s,
        out=args.out or "",
        gpu=here.gpu,
        remarks=[others_run] if others_run else [],
    )


class _Here(NamedTuple):
    """Where everything runs."""

    place: Place
    world: "World"
    ranks: int
    backend: "Backend"

    @property
    def gpu(self) -> "torch.device | None":
        """The GPU, if that is where."""
        return self.place.device if self.place.on_gpu else None


def _here(args: argparse.Namespace, only: frozenset[str]) -> _Here:
    """Find this process's place; among others all are told what keeps one of them from it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        hint = "pip install 'meshwright[train]'; mw bench --show FILE works without"
        raise MissingPart("mw bench measures with torch, which is not installed", hint) from None
    from meshwright.run.parallel.launch.environment import connect, world_of

    device, world = _device(args.device), world_of()
    problems = [*_problems(args, world, device), *_of_ranks(args, world, only)]
    if world.size > 1:
        device = connect(world, device, problems=problems)
    require(problems)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    backend: Backend = "nccl" if gpus > 1 or (gpus and world.size > 1) else "gloo"
    ranks = world.size if world.size > 1 else (gpus if backend == "nccl" else 2)
    if args.nproc:
        ranks = parse_count(args.nproc, "--nproc")
        require(whole("--nproc", ranks, 1, gpus if backend == "nccl" else MOST_RANKS))
    return _Here(Place(device, args.folder, ranks), world, ranks, backend)


def _problems(args: argparse.Namespace, world: "World", device: "torch.device") -> list[Problem]:
    """Return what is wrong with files and folders, before anything is begun."""
    found = list[Problem]()
    if not Path(args.folder).is_dir():
        what = f"{args.folder}: there is no such folder"
        found.append(Problem("--folder", what, "make it, or name another"))
    if args.resume and not args.out:
        found.append(Problem("--resume", "goes on with a file", "name it with -o FILE"))
    if not args.out or world.rank or not Path(args.out).exists():
        return found
    if not args.resume:
        fix = "add --resume to go on with it, or name another"
        return [*found, Problem(args.out, "is there already", fix)]
    try:
        read(Path(args.out), machine_of(device))
    except InputError as error:
        found += error.problems
    return found


def _of_ranks(args: argparse.Namespace, world: "World", only: frozenset[str]) -> list[Problem]:
    """Return what processes of one job cannot do together."""
    if world.size == 1:
        return []
    found, started = list[Problem](), f"{world.size} processes were started"
    if args.nproc:
        found.append(Problem("--nproc", started, "leave it out"))
    if args.burn_in is not None:
        fix = "start it once for each device, without a launcher's variables"
        found.append(Problem("--burn-in", f"heats one device, and {started}", fix))
    for name in sorted(only - set(EXCHANGES)):
        fix = f"use {', '.join(EXCHANGES)}"
        found.append(Problem("--only", f"{name} is measured by one process, and {started}", fix))
    return found


def _device(name: str | None) -> "torch.device":
    import torch

    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cuda", "cpu"):
        raise InputError([Problem("--device", f"{name!r} is none", "use cuda, cuda:N or cpu")])
    if device.type == "cuda":
        index, count = device.index or 0, torch.cuda.device_count()
        if index >= count:
            what = f"{name} is not here: torch sees {format_some(count, 'GPU')}"
            raise MissingPart(what, "use --device cpu, or install a torch with CUDA")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return device


def _there(path: str) -> Path:
    if not Path(path).is_file():
        fix = "give a file that mw bench -o FILE wrote"
        raise InputError([Problem(path, "there is no such file", fix)])
    return Path(path)


def _only(text: str) -> frozenset[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    known = _names()
    strange = [name for name in found if name not in known]
    if strange:
        raise InputError([unknown_name("family", name, known, "--only") for name in strange])
    return frozenset(found)


def _families(args: argparse.Namespace, here: _Here, only: frozenset[str]) -> tuple[Family, ...]:
    every = families(ranks=here.ranks, backend=here.backend, folder=Path(args.folder))
    if here.world.size > 1:
        only = only or frozenset(EXCHANGES)
    elif args.health and not only and not args.against:
        # What the catalog has expectations of.
        only = frozenset(family.name for family in FAMILIES)
    return tuple(family for family in every if not only or family.name in only)


def _measured(
    args: argparse.Namespace, here: _Here, asked: tuple[Family, ...], size: Size
) -> tuple[Bench, float]:
    machine = machine_of(here.place.device)
    first = here.world.rank == 0
    path = Path(args.out) if args.out and first else None
    budget_s = BUDGET_S[size]
    if args.minutes:
        budget_s = 60.0 * _minutes(args.minutes, "--minutes")
    log = MlperfLog(Path(args.mlperf_log)) if args.mlperf_log and first else None
    begun = time.monotonic()
    quiet = args.quiet or args.json or not first
    with nullcontext() if quiet else _Watching() as watching:

        def say(progress: Progress) -> None:
            if log is not None and progress.row is not None:
                log.row(progress.row)
            if watching is not None:
                watching.show(progress)

        status: Any = "aborted"
        if log is not None:
            log.start(machine)
        try:
            bench = measure(
                asked, here.place, machine, size=size, path=path, budget_s=budget_s, say=say
            )
            status = "success"
        finally:
            if log is not None:
                log.stop(status)
    return bench, time.monotonic() - begun


def _minutes(text: str, where: str) -> float:
    found = parse_number(text, where)
    if not 0 < found <= MOST_MINUTES:
        what = f"{text} is not above 0 and at most {MOST_MINUTES:,.0f}"
        raise InputError([Problem(where, what, "give minutes, such as 10 or 0.5")])
    return found


class _Watching:
    """A line on stderr that says how far a bench is, where a person watches."""

    def __init__(self) -> None:
        import os

        self._shown = sys.stderr.isatty() and not os.environ.get("MESHWRIGHT_NO_PROGRESS")

    def __enter__(self) -> "_Watching":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def show(self, progress: Progress) -> None:
        """Say it."""
        if self._shown:
            words = f"{progress.family.title}: {progress.done} of {progress.of}"
            sys.stderr.write(f"\r\x1b[K{words}")
            sys.stderr.flush()


def _burn_in(args: argparse.Namespace, here: _Here) -> Answer:
    seconds = 60.0 * _minutes(args.burn_in, "--burn-in")
    found = []
    watched = sys.stderr.isatty() and not (args.quiet or args.json)
    for stretch in burn_in(here.place, seconds):
        found.append(stretch)
        if watched:
            sys.stderr.write(f"\r\x1b[K{stretch.began_s:.0f} s of {seconds:.0f}")
            sys.stderr.flush()
    if watched:
        sys.stderr.write("\r\x1b[K")
    return burn_in_answer(machine_of(here.place.device), found, shared=not here.place.on_gpu)
