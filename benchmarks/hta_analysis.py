"""What reading and analysing profiles costs, and Holistic Trace Analysis (HTA) beside it.

Both run on the same files, in turn, each time in a fresh process. Counted are CPU seconds of a
process and all its children, for reading and analysing; imports are counted apart, HTA's are about
a second. HTA runs what `hta_run` lists, ours the counterpart of each (`hta_jobs`). Measured apart:
`overview`, all that the screen says but findings (shapes and FLOP/s, MFU, stalls, regions, expected
bandwidths, what-if), and the command `mw analyze` with all findings.

HTA is not shipped. Make it an environment and name its interpreter; without, ours runs alone:

    python3 -m venv hta-venv
    hta-venv/bin/pip install 'HolisticTraceAnalysis==0.5.0' 'pandas==2.2.3' 'numpy<2.3'
    python -m benchmarks.hta_analysis --hta hta-venv/bin/python [--data DIR] [--quick]

A plain install takes pandas 3, with which HTA's critical path fails. The larger sets are made
once, 1.7 GB in DIR (a folder that goes away again where none is given). For the largest HTA takes
four minutes of CPU time and 4.8 GB.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.hta_jobs import CACHE
from benchmarks.hta_traces import longer, more_ranks
from benchmarks.processes import Run, run
from benchmarks.result import figure
from benchmarks.run import HERE, Benchmark, run_all

NAME = "hta_analysis"
QUESTION = "What does it cost to read profiles and analyse them, beside HTA?"

PYTHON, DATA, TRACES = "HTA_PYTHON", "HTA_DATA", "MESHWRIGHT_TRACES"
"""Variables: HTA's interpreter, where made traces are kept, the folder of the shared traces."""
OURS_TIMES = 5
NO_HTA = (
    "HTA was not measured: make it an environment as this module's first lines say, and name its "
    f"interpreter with --hta or {PYTHON}."
)
EIGHT = "modded-nanogpt/8rank-h100-2025-12-11"
LONG = "hta/df_index_resolver/df_index_resolver.json.gz"
SMALL = "hta/trace_filter"


class Set(NamedTuple):
    """Traces that both analyse."""

    name: str
    folder: Path
    least_ratio: float
    """How many times HTA's CPU seconds ours were promised to be less."""
    most_mb: float = 0.0
    critical_path: bool = False
    """Whether HTA's critical path is asked for: it takes hours on the large ones."""


def traces() -> Path:
    """The folder of the shared traces."""
    folder = Path(os.environ.get(TRACES, HERE.parent.parent / "shared" / "traces"))
    if not (folder / EIGHT).is_dir():
        raise SystemExit(f"{folder} has no {EIGHT}: name the shared traces with {TRACES}")
    return folder


def ours(what: str, folder: Path) -> Run:
    """One of our jobs, in a fresh process."""
    return run([sys.executable, "-m", "benchmarks.hta_jobs", what, str(folder)])


def theirs(python: str, one: Set) -> Run:
    """HTA on the same folder."""
    script = str(Path(__file__).with_name("hta_run.py"))
    return run([python, script, str(one.folder), *["--critical-path"] * one.critical_path])


def beside(one: Set, python: str, times: int) -> dict[str, Any]:
    """Run both in turn on one set; medians, and how many of HTA's figures differ from ours."""
    mine, peer = [ours("standard", one.folder)], []
    if python:
        peer.append(theirs(python, one))
    while len(mine) < times:
        mine.append(ours("standard", one.folder))
        if python and one.critical_path and len(peer) < 2:
            peer.append(theirs(python, one))
    found: dict[str, Any] = {
        "cpu_s": statistics.median(each.cpu_s for each in mine),
        "whole_s": statistics.median(each.whole_s for each in mine),
        "peak_mb": max(each.peak_mb for each in mine),
        "overview": ours("overview", one.folder),
        "command": ours("command", one.folder),
    }
    if peer:
        said = peer[-1].said
        found |= {
            "their_cpu_s": statistics.median(each.cpu_s for each in peer),
            "their_whole_s": statistics.median(each.whole_s for each in peer),
            "their_peak_mb": max(each.peak_mb for each in peer),
            "failed": said["failed"],
            "compared": _differences(said, ours("figures", one.folder).said),
        }
    return found


def _differences(printed: dict[str, Any], computed: dict[str, Any]) -> tuple[int, int]:
    """How many figures were compared, and how many differ by more than 1 µs or 0.01 points."""
    number = far = 0
    rows = zip(printed["temporal"], computed["temporal"], strict=True)
    for their, our in rows:
        for name, value in our.items():
            number += 1
            far += abs(their[f"{name}_time(us)"] - value) > 1
    overlaps = zip(printed["overlap"], computed["overlap"], strict=True)
    for row, value in overlaps:
        said = row["comp_comm_overlap_pctg"]
        number += 1
        far += abs((said or 0.0) - (value or 0.0)) > 0.0101
    return number, far


def scaling(eight: Path, one_file: Path, data: Path) -> list[dict[str, object]]:
    """How the cost for each span grows with the spans, and for each rank with the ranks."""

    def per_span(folder: Path) -> float:
        runs = [ours("standard", folder) for _ in range(3)]
        return statistics.median([one.cpu_s / float(one.said["spans"]) for one in runs])

    few = longer(one_file, data / "longer5" / "rank-0.json", 5).parent
    many = longer(one_file, data / "longer20" / "rank-0.json", 20).parent
    all_ranks = more_ranks(eight, data / "ranks64", 64)
    some = data / "ranks16"
    some.mkdir(exist_ok=True)
    for rank in range(16):
        if not (some / f"rank-{rank}.json").exists():
            os.link(all_ranks / f"rank-{rank}.json", some / f"rank-{rank}.json")
    return [
        figure("cost of a span, 20 times the trace over 5 times", per_span(many) / per_span(few),
               "x", "<= 1.15"),
        figure("cost of a span, 64 ranks over 16", per_span(all_ranks) / per_span(some),
               "x", "<= 1.15"),
    ]  # fmt: skip


def reading(folders: list[tuple[str, Path]]) -> list[dict[str, object]]:
    """What a first read takes, and a second from the cache."""
    figures = []
    for name, folder in folders:
        plain = statistics.median(ours("read", folder).cpu_s for _ in range(3))
        with tempfile.TemporaryDirectory() as cache:
            os.environ[CACHE] = cache
            ours("cached read", folder)
            again = statistics.median(ours("cached read", folder).cpu_s for _ in range(3))
        figures += [
            figure(f"{name}: reading", plain, "cpu-s"),
            figure(f"{name}: second read over the first", again / plain, "x", "<= 0.1"),
        ]
    return figures


@contextmanager
def _kept(named: str) -> Iterator[Path]:
    if named:
        yield Path(named)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def measure(quick: bool) -> dict[str, object]:
    """Measure all sets; `quick` takes a small one."""
    folder, python = traces(), os.environ.get(PYTHON, "")
    if quick:
        small = Set("2 ranks, 3.5 MB", folder / SMALL, 1, critical_path=False)
        return _told([(small, beside(small, python, 1))], [], python)
    with _kept(os.environ.get(DATA, "")) as data:
        eight, one_file = folder / EIGHT, folder / LONG
        sets = [
            Set("8 ranks, 71 MB", eight, 25, 150, critical_path=True),
            Set("64 ranks, 512 MB", more_ranks(eight, data / "ranks64", 64), 25),
            Set(
                "one file, 852 MB",
                longer(one_file, data / "longer20" / "rank-0.json", 20).parent,
                40,
                700,
            ),
        ]
        found = [(one, beside(one, python, OURS_TIMES if one.critical_path else 3)) for one in sets]
        more = scaling(eight, one_file, data)
        more += reading([(sets[0].name, eight), (sets[2].name, sets[2].folder)])
    return _told(found, more, python)


def _told(
    found: list[tuple[Set, dict[str, Any]]], more: list[dict[str, object]], python: str
) -> dict[str, object]:
    figures: list[dict[str, object]] = []
    peers = []
    failed: dict[str, str] = {}
    for one, took in found:
        command: Run = took["command"]
        screen: Run = took["overview"]
        figures += [
            figure(f"{one.name}: read and analysed", took["cpu_s"], "cpu-s"),
            figure(f"{one.name}: with imports", took["whole_s"], "cpu-s"),
            figure(
                f"{one.name}: peak memory", took["peak_mb"], "MB",
                f"<= {one.most_mb:g}" if one.most_mb else "",
            ),
            figure(f"{one.name}: all the screen says but findings", screen.cpu_s, "cpu-s"),
            figure(f"{one.name}: its peak memory", screen.peak_mb, "MB"),
            figure(f"{one.name}: mw analyze with findings and imports", command.whole_s, "cpu-s"),
            figure(f"{one.name}: its peak memory", command.peak_mb, "MB"),
        ]  # fmt: skip
        if "their_cpu_s" not in took:
            continue
        ratio, number = took["their_cpu_s"] / took["cpu_s"], took["compared"][0]
        figures += [
            figure(f"{one.name}: HTA's time over ours", ratio, "x", f">= {one.least_ratio:g}"),
            figure(
                f"{one.name}: the same with imports", took["their_whole_s"] / took["whole_s"], "x"
            ),
            figure(
                f"{one.name}: figures of {number} that differ from HTA's by more than 1 µs",
                took["compared"][1], "", "<= 0",
            ),
        ]  # fmt: skip
        peers += [
            figure(f"HTA 0.5, {one.name}: parsed and analysed", took["their_cpu_s"], "cpu-s"),
            figure(f"HTA 0.5, {one.name}: with imports", took["their_whole_s"], "cpu-s"),
            figure(f"HTA 0.5, {one.name}: peak memory", took["their_peak_mb"], "MB"),
        ]
        failed |= took["failed"]
    notes = (
        "CPU seconds of the process and its children, in turn with HTA's, medians of ours and of "
        "HTA's one or two runs. Figures compared: temporal breakdown and overlap, ours by "
        "--compat hta. "
    )
    notes += "" if python else NO_HTA
    notes += "".join(f"HTA failed at {name}: {why}. " for name, why in failed.items())
    return {"figures": figures + more, "peers": peers, "notes": notes.strip()}


def main() -> int:
    """Run the benchmark by itself."""
    parser = argparse.ArgumentParser(prog="benchmarks.hta_analysis", description=QUESTION)
    parser.add_argument("--hta", metavar="PYTHON", help="an interpreter that has HTA 0.5")
    parser.add_argument("--data", metavar="DIR", help="keep the traces that are made here")
    parser.add_argument("--quick", action="store_true", help="a small set; results are not kept")
    arguments = parser.parse_args()
    for name, value in ((PYTHON, arguments.hta), (DATA, arguments.data)):
        if value:
            os.environ[name] = str(Path(value).absolute())
    bad = run_all([Benchmark(NAME, QUESTION, "benchmarks.hta_analysis")], quick=arguments.quick)
    for line in bad:
        print(line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
