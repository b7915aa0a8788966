"""`mw bench`: what this machine really does, against what its catalog entry says."""

import argparse
import io
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.cli.bench.screen import make_burn_in_result, make_result, require_known_device
from meshwright.cli.bench.serve import command
from meshwright.cli.parser import add_common, add_verbs
from meshwright.cli.render.progress import ProgressLine
from meshwright.cli.result import CommandResult
from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.observe.bench.bench_family import BenchFamily, BenchTarget, Size
from meshwright.observe.bench.burn_in import run_burn_in
from meshwright.observe.bench.families import FAMILIES, list_families
from meshwright.observe.bench.health_check import compute_median_times
from meshwright.observe.bench.mlperf_log import MlperfLog
from meshwright.observe.bench.suite import (
    TIME_BUDGET_S,
    BenchProgress,
    BenchResult,
    read_bench,
    run_bench,
)
from meshwright.observe.hardware.machine import count_cores, describe_machine, describe_other_load
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import format_quantity, parse_count, parse_number, parse_seconds

if TYPE_CHECKING:
    import torch

    from meshwright.observe.bench.communication import Backend
    from meshwright.run.parallel.launch.world import World


EXAMPLES = (
    "mw bench --quick",
    "mw bench -o bench.jsonl",
    "mw bench --families gemm,memory_copies --health-check",
    "mw bench --burn-in 10",
    "mw bench --show bench.jsonl",
    "mw bench serve http://127.0.0.1:8000 --concurrency 64",
)

COLLECTIVE_SUITES = ("collectives", "p2p")

MAX_RANKS = 64

MAX_MINUTES = 7 * 24 * 60.0

MAX_TIME_LIMIT_S = 60.0 * MAX_MINUTES


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = (
        "mw bench [--quick|--full] [--families FAMILY,…] [-o FILE [--resume]] [flags]\n"
        "       mw bench serve URL [flags]"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer cases, about a minute")
    size.add_argument("--full", action="store_true", help="all cases, up to six minutes (default)")
    parser.add_argument(
        "--families", default="", metavar="FAMILY,…",
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
        "--nproc-per-node",
        metavar="N",
        help="processes that exchange (default: one for each GPU, or 2)",
    )
    parser.add_argument(
        "--folder", default=".", metavar="DIR", help="where files are written and read (default: .)"
    )
    parser.add_argument(
        "--time-limit",
        metavar="TIME",
        help="of all families, such as 10min (default: 1min quick, 6min full)",
    )
    health = parser.add_argument_group("health")
    health.add_argument(
        "--health-check", action="store_true",
        help="exit with 1 where the device is slower than its kind",
    )  # fmt: skip
    health.add_argument(
        "--baseline", action="append", default=[], metavar="FILE",
        help="rows of sound devices to compare with, in place of the catalog's; may be repeated",
    )  # fmt: skip
    health.add_argument(
        "--burn-in", metavar="MINUTES", help="only repeat products under load, checking every bit"
    )
    parser.add_argument("--mlperf-log", metavar="FILE", help="write results as MLPerf's log lines")
    add_common(parser)
    serving = ("serve", command.SUMMARY, command.EXAMPLES)
    command.configure(add_verbs(parser, [serving], required=False)["serve"])


def _names() -> list[str]:
    return [family.name for family in list_families(ranks=1, backend="gloo", folder=Path())]


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what was measured, or is shown."""
    if args.verb == "serve":
        return command.run(args)
    size: Size = "quick" if args.quick else "full"
    only = _only(args.families)
    others = compute_median_times([read_bench(_there(path)).rows for path in args.baseline])
    if args.baseline and not args.health_check:
        fix = "add --health-check"
        raise InputError([Problem("--baseline", "compares only where health is asked for", fix)])
    if args.show:
        bench = read_bench(_there(args.show))
        rows = tuple(row for row in bench.rows if not only or row.case.family in only)
        return make_result(bench._replace(rows=rows), health=args.health_check, others=others)
    here = _here(args, only)
    if args.burn_in is not None:
        return _burn_in(args, here)
    if args.health_check:
        require_known_device(describe_machine(here.place.device), others)
    asked = _families(args, here, only)
    others_run = describe_other_load(1 if here.place.on_gpu else count_cores())
    bench, took_s = _measured(args, here, asked, size)
    if here.world.rank:
        # All ranks took part; one of them speaks.
        sys.stdout = io.StringIO()
        return CommandResult("bench/2", {"rows": []}, ())
    return make_result(
        bench,
        health=args.health_check,
        others=others,
        took_s=took_s,
        out=args.out or "",
        gpu=here.gpu,
        remarks=[others_run] if others_run else [],
    )


class _Here(NamedTuple):
    """Where everything runs."""

    place: BenchTarget
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
        raise MissingDependency(
            "mw bench measures with torch, which is not installed", hint
        ) from None
    from meshwright.run.parallel.launch.world import init_process_group, read_world

    device, world = _device(args.device), read_world()
    problems = [*_problems(args, world, device), *_of_ranks(args, world, only)]
    if world.size > 1:
        device = init_process_group(world, device, problems=problems)
    raise_problems(problems)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    backend: Backend = "nccl" if gpus > 1 or (gpus and world.size > 1) else "gloo"
    ranks = world.size if world.size > 1 else (gpus if backend == "nccl" else 2)
    if args.nproc_per_node:
        ranks = parse_count(args.nproc_per_node, "--nproc-per-node")
        raise_problems(
            check_integer("--nproc-per-node", ranks, 1, gpus if backend == "nccl" else MAX_RANKS)
        )
    return _Here(BenchTarget(device, args.folder, ranks), world, ranks, backend)


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
        read_bench(Path(args.out), describe_machine(device))
    except InputError as error:
        found += error.problems
    return found


def _of_ranks(args: argparse.Namespace, world: "World", only: frozenset[str]) -> list[Problem]:
    """Return what processes of one job cannot do together."""
    if world.size == 1:
        return []
    found, started = list[Problem](), f"{world.size} processes were started"
    if args.nproc_per_node:
        found.append(Problem("--nproc-per-node", started, "leave it out"))
    if args.burn_in is not None:
        fix = "start it once for each device, without a launcher's variables"
        found.append(Problem("--burn-in", f"heats one device, and {started}", fix))
    for name in sorted(only - set(COLLECTIVE_SUITES)):
        fix = f"use {', '.join(COLLECTIVE_SUITES)}"
        found.append(
            Problem("--families", f"{name} is measured by one process, and {started}", fix)
        )
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
            what = f"{name} is not here: torch sees {format_quantity(count, 'GPU')}"
            raise MissingDependency(what, "use --device cpu, or install a torch with CUDA")
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
        raise InputError(
            [build_unknown_name_problem("family", name, known, "--families") for name in strange]
        )
    return frozenset(found)


def _families(
    args: argparse.Namespace, here: _Here, only: frozenset[str]
) -> tuple[BenchFamily, ...]:
    every = list_families(ranks=here.ranks, backend=here.backend, folder=Path(args.folder))
    if here.world.size > 1:
        only = only or frozenset(COLLECTIVE_SUITES)
    elif args.health_check and not only and not args.baseline:
        # What the catalog has expectations of.
        only = frozenset(family.name for family in FAMILIES)
    return tuple(family for family in every if not only or family.name in only)


def _measured(
    args: argparse.Namespace, here: _Here, asked: tuple[BenchFamily, ...], size: Size
) -> tuple[BenchResult, float]:
    machine = describe_machine(here.place.device)
    first = here.world.rank == 0
    path = Path(args.out) if args.out and first else None
    budget_s = TIME_BUDGET_S[size]
    if args.time_limit:
        budget_s = _time_limit(args.time_limit)
    log = MlperfLog(Path(args.mlperf_log)) if args.mlperf_log and first else None
    begun = time.monotonic()
    quiet = args.quiet or args.json or not first
    with ProgressLine(quiet=quiet) as line:

        def say(progress: BenchProgress) -> None:
            if log is not None and progress.row is not None:
                log.row(progress.row)
            done = f"{progress.num_done} of {progress.num_cases}"
            line.show(f"{progress.family.title}: {done}")

        status: Any = "aborted"
        if log is not None:
            log.start(machine)
        try:
            bench = run_bench(
                asked, here.place, machine, size=size, path=path, budget_s=budget_s, say=say
            )
            status = "success"
        finally:
            if log is not None:
                log.stop(status)
    return bench, time.monotonic() - begun


def _time_limit(text: str) -> float:
    found = parse_seconds(text, "--time-limit")
    if not 0 < found <= MAX_TIME_LIMIT_S:
        what = f"{text} is not above 0 and at most {MAX_TIME_LIMIT_S / 86400:,.0f} days"
        raise InputError([Problem("--time-limit", what, "give a time, such as 10min or 30s")])
    return found


def _minutes(text: str, where: str) -> float:
    found = parse_number(text, where)
    if not 0 < found <= MAX_MINUTES:
        what = f"{text} is not above 0 and at most {MAX_MINUTES:,.0f}"
        raise InputError([Problem(where, what, "give minutes, such as 10 or 0.5")])
    return found


def _burn_in(args: argparse.Namespace, here: _Here) -> CommandResult:
    seconds = 60.0 * _minutes(args.burn_in, "--burn-in")
    found = []
    with ProgressLine(quiet=args.quiet or args.json) as line:
        for stretch in run_burn_in(here.place, seconds):
            found.append(stretch)
            line.show(f"{stretch.start_s:.0f} s of {seconds:.0f}")
    return make_burn_in_result(
        describe_machine(here.place.device), found, shared=not here.place.on_gpu
    )
