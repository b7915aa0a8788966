"""Runs the benchmarks of this folder, prints their figures and keeps dated results.

A benchmark is a module here that defines three names:

    NAME = "timeline_write"                     # also the name of its result files
    QUESTION = "How fast are spans written?"    # one sentence
    def measure(quick: bool) -> dict[str, object]: ...

`measure` returns `{"figures": [...], "peers": [...], "notes": "..."}`, each figure being
`{"name", "value", "unit"}` and, where something was promised, `"target"` such as "< 15". `quick`
asks for a small run that shows the benchmark works; its figures are printed but never kept.
Each benchmark runs in a process of its own, so that none sees another's memory or imports.

    python -m benchmarks.run [NAME ...] [--quick] [--list]
"""

import argparse
import ast
import importlib
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.machine import describe
from benchmarks.result import Figure, Measured, Result, met, pretty, write

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


class Benchmark(NamedTuple):
    """A benchmark as found on disk, not yet imported."""

    name: str
    question: str
    module: str


class ChildReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the measuring process hands to the runner."""

    measured: Measured
    wall_s: float
    peak_memory_bytes: int


def discover(folder: Path) -> list[Benchmark]:
    """Find the benchmarks by reading the sources, so that listing them imports nothing."""
    found = []
    for path in sorted(folder.glob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        texts = _texts(body)
        measures = any(
            isinstance(node, ast.FunctionDef) and node.name == "measure" for node in body
        )
        if measures and {"NAME", "QUESTION"} <= texts.keys():
            module = f"{folder.name}.{path.stem}"
            found.append(Benchmark(texts["NAME"], texts["QUESTION"], module))
    return found


def _texts(body: list[ast.stmt]) -> dict[str, str]:
    """The module-level names that are bound to a plain string."""
    texts = {}
    for node in body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                texts[target.id] = node.value.value
    return texts


def run_here(module: str, *, quick: bool) -> ChildReport:
    """Measure in this process."""
    started = time.perf_counter()
    answer = importlib.import_module(module).measure(quick)
    wall_s = time.perf_counter() - started
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    measured = msgspec.convert(answer, Measured)
    return ChildReport(measured=measured, wall_s=wall_s, peak_memory_bytes=peak)


def run_in_child(benchmark: Benchmark, *, quick: bool) -> ChildReport | None:
    """Measure in a fresh process; None where it failed (its error went to stderr)."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.run", "--child", benchmark.module, str(answer)]
        finished = subprocess.run(
            command + ["--quick"] * quick, cwd=HERE.parent, stdout=sys.stderr, check=False
        )
        if finished.returncode != 0 or not answer.exists():
            return None
        return msgspec.json.decode(answer.read_bytes(), type=ChildReport)


def show(benchmark: Benchmark, report: ChildReport) -> None:
    """Print one benchmark's figures and those of its peers."""
    print(f"\n{benchmark.name}: {benchmark.question}")
    for figure in report.measured.figures:
        print(f"  {_line(figure)}")
    for figure in report.measured.peers:
        print(f"  peer: {_line(figure)}")
    peak_gib = report.peak_memory_bytes / 2**30
    print(f"  ran {report.wall_s:.1f} s, peak memory {peak_gib:.2f} GiB")


def _line(figure: Figure) -> str:
    verdict = {True: "met", False: "MISSED", None: ""}[met(figure)]
    promise = f"   target {figure.target}: {verdict}" if figure.target else ""
    return f"{figure.name:<48} {pretty(figure.value):>14} {figure.unit}{promise}"


def _choose(names: list[str]) -> list[Benchmark]:
    every = discover(HERE)
    unknown = sorted(set(names) - {benchmark.name for benchmark in every})
    if unknown:
        known = ", ".join(benchmark.name for benchmark in every) or "none"
        print(f"no benchmark named {', '.join(unknown)}; there are: {known}", file=sys.stderr)
        raise SystemExit(2)
    return [benchmark for benchmark in every if not names or benchmark.name in names]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.run",
        description="Run the benchmarks, print their figures, keep dated results.",
    )
    parser.add_argument("names", nargs="*", help="benchmarks to run (all)")
    parser.add_argument("--quick", action="store_true", help="small sizes; results are not kept")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and stop")
    parser.add_argument("--child", nargs=2, metavar=("MODULE", "FILE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _keep(benchmark: Benchmark, report: ChildReport) -> Path:
    result = Result(
        name=benchmark.name,
        question=benchmark.question,
        date=datetime.now(UTC).date().isoformat(),
        wall_s=round(report.wall_s, 3),
        peak_memory_bytes=report.peak_memory_bytes,
        machine=describe(),
        measured=report.measured,
    )
    return write(result, RESULTS)


def run_all(chosen: list[Benchmark], *, quick: bool) -> list[str]:
    """Run them one after the other; returns what failed or missed its target."""
    bad = []
    for benchmark in chosen:
        print(f"running {benchmark.name} ...", file=sys.stderr)
        report = run_in_child(benchmark, quick=quick)
        if report is None:
            bad.append(f"{benchmark.name} failed")
            continue
        show(benchmark, report)
        if not quick:
            missed = [figure.name for figure in report.measured.figures if met(figure) is False]
            bad += [f"{benchmark.name}: {name} missed its target" for name in missed]
            print(f"  kept as {_keep(benchmark, report).relative_to(HERE.parent)}")
    return bad


def main() -> int:
    """Run what was asked; 1 where a benchmark failed or missed its target."""
    arguments = _arguments()
    if arguments.child:
        module, answer = arguments.child
        report = run_here(module, quick=arguments.quick)
        Path(answer).write_bytes(msgspec.json.encode(report))
        return 0
    chosen = _choose(arguments.names)
    if arguments.list:
        for benchmark in chosen:
            print(f"{benchmark.name:<24} {benchmark.question}")
        return 0
    bad = run_all(chosen, quick=arguments.quick)
    for line in bad:
        print(line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
