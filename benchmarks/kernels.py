"""How near the memory-bound kernels of `run/kernels` come to the bandwidth of the GPU.

Bytes are those a job cannot do without, each counted once (`kernel_rows` lists the jobs), so a
kernel that reads something twice is charged for it. The yardstick is torch's own `copy_` of large
buffers in the same run. Each job is queued many times behind copies that keep the GPU busy, so
that what is timed is the device and never the launching program.

    python -m benchmarks.kernels [--out FILE] [--only WORD ...]

prints a table and writes the result where asked; `python -m benchmarks.run kernels` keeps it.
"""

import argparse
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.kernel_rows import ELEMENTS, MODEL_ROWS, Place, Row, Work
from benchmarks.kernel_rows_training import TRAINING_ROWS
from benchmarks.machine import describe
from benchmarks.result import Measured, Result, figure, met
from meshwright.errors import MissingDependency

NAME = "kernels"
QUESTION = "How near do memory-bound kernels come to the copy bandwidth of one GPU?"

ROWS = (*MODEL_ROWS, *TRAINING_ROWS)
GIB = 2**30
TARGET = ">= 85"
ERROR_TARGET = "< 0.004"
"""Half of bfloat16's last place is 2⁻⁸ of a number just above a power of two."""
QUEUED_S = 0.02
"""How long copies keep the GPU busy while a group of calls is queued behind them."""


class Timed(NamedTuple):
    """A row's outcome."""

    name: str
    device_s: float
    share: float
    """Of the copy bandwidth."""
    host_s: float
    """What the launching program needs for one call."""
    error: float | None
    torch_share: float | None


def measure(quick: bool) -> dict[str, object]:
    """Measure on the GPU; `quick` takes small tensors, and makes do with the interpreter."""
    import torch

    if quick and not torch.cuda.is_available():
        return _measure_interpreted()
    return _report(*_measure_gpu(ROWS, ELEMENTS // 16 if quick else ELEMENTS))


class _Queue:
    """Times calls on the device alone: they are queued while copies keep it busy."""

    def __init__(self, size: int) -> None:
        import torch

        self._here = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self._there = torch.empty_like(self._here)
        self._copy()
        once_s = self._elapsed_s(self._copy, 10)
        self.copy_per_s = 2 * size / once_s
        self._copies = max(4, round(QUEUED_S / once_s))

    def _copy(self) -> None:
        self._there.copy_(self._here)

    def time_s(self, call: Callable[[], object]) -> tuple[float, float]:
        """Return the seconds of one call, on the device and on the host."""
        import torch

        call()
        torch.cuda.synchronize()
        for _ in range(self._copies):
            self._copy()
        begun = time.perf_counter()
        for _ in range(3):
            call()
        host_s = (time.perf_counter() - begun) / 3
        repeats = int(min(20, max(3, 0.5 * QUEUED_S / host_s)))
        groups = []
        for _ in range(5):
            torch.cuda.synchronize()
            for _ in range(self._copies):
                self._copy()
            groups.append(self._elapsed_s(call, repeats))
        return statistics.median(groups), host_s

    @staticmethod
    def _elapsed_s(call: Callable[[], object], repeats: int) -> float:
        import torch

        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats


def _measure_gpu(rows: tuple[Row, ...], elements: int) -> tuple[list[Timed], list[str], float]:
    import torch

    if not torch.cuda.is_available():
        hint = "see it work with python -m benchmarks.run kernels --quick"
        raise MissingDependency("this benchmark needs a CUDA GPU", hint)
    torch.manual_seed(0)
    queue = _Queue(2 * GIB)
    timed, absent = [], []
    for row in rows:
        try:
            work = row.make(Place("cuda", "auto", elements))
        except ImportError as missing:
            absent.append(f"{row.name} ({missing})")
            continue
        timed.append(_time(row.name, work, queue))
        _print_row(timed[-1])
        del work
        gc.collect()
        torch.cuda.empty_cache()
    return timed, absent, queue.copy_per_s


def _time(name: str, work: Work, queue: _Queue) -> Timed:
    error = None if work.error is None else work.error()
    device_s, host_s = queue.time_s(work.call)
    bytes_per_s = work.bytes_moved / queue.copy_per_s
    theirs = None if work.torch is None else bytes_per_s / queue.time_s(work.torch)[0]
    return Timed(name, device_s, bytes_per_s / device_s, host_s, error, theirs)


def _print_row(row: Timed) -> None:
    error = "" if row.error is None else f"error {row.error:.1e}"
    theirs = "" if row.torch_share is None else f"torch {100 * row.torch_share:.0f} %"
    print(
        f"{row.name:<46} {1e6 * row.device_s:9.1f} µs {100 * row.share:6.1f} % of copy   "
        f"host {1e6 * row.host_s:6.0f} µs  {theirs:<12} {error}",
        flush=True,
    )


def _report(timed: list[Timed], absent: list[str], copy_per_s: float) -> dict[str, object]:
    import triton

    figures = [figure(row.name, 100 * row.share, "% of copy_", TARGET) for row in timed]
    errors = [row.error for row in timed if row.error is not None]
    if errors:
        figures.append(
            figure("largest error against float64", max(errors), "of largest", ERROR_TARGET)
        )
    peers = [figure("torch copy_ of 2 GiB, read and written", copy_per_s / 1e9, "GB/s")]
    peers += [
        figure(f"torch, {row.name}", 100 * row.torch_share, "% of copy_")
        for row in timed
        if row.torch_share is not None
    ]
    notes = (
        "Device time of calls queued behind copies, the median of five groups. Activations of "
        f"{ELEMENTS * 2 // 2**20} MiB in bfloat16. Errors are shares of a tensor's largest "
        f"element. Triton {triton.__version__}."
    )
    if absent:
        notes += f" Not measured: {'; '.join(absent)}."
    return {"figures": figures, "peers": peers, "notes": notes}


def _measure_interpreted() -> dict[str, object]:
    """Show that it works, without a GPU: no figure of this says anything about speed."""
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    errors, calls = [], 0
    for row in ROWS:
        work = row.make(Place("cpu", "triton", 2))
        work.call()
        calls += 1
        if work.error is not None:
            errors.append(work.error())
    figures = [
        figure("rows that ran", calls, "rows"),
        figure("largest error against float64", max(errors), "of largest"),
    ]
    return {"figures": figures, "notes": "Triton's interpreter on the CPU: correctness only."}


def main() -> int:
    """Measure, print, and write the result where asked; 1 where a target was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=QUESTION)
    parser.add_argument("--out", type=Path, help="write the result to this file, as JSON")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="rows with a word")
    arguments = parser.parse_args()
    chosen = tuple(row for row in ROWS if any(word in row.name for word in arguments.only))
    started = time.perf_counter()
    try:
        timed, absent, copy_per_s = _measure_gpu(chosen, ELEMENTS)
    except MissingDependency as missing:
        print(f"{missing}\nhint: {missing.hint}", file=sys.stderr)
        return missing.exit_code
    measured = msgspec.convert(_report(timed, absent, copy_per_s), Measured)
    print(f"copy_ {copy_per_s / 1e12:.2f} TB/s, {time.perf_counter() - started:.0f} s in all")
    if arguments.out is not None:
        result = Result(
            name=NAME,
            question=QUESTION,
            date=datetime.now(UTC).date().isoformat(),
            wall_s=round(time.perf_counter() - started, 3),
            peak_memory_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            machine=describe(),
            measured=measured,
        )
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2))
    missed = [each.name for each in measured.figures if met(each) is False]
    print("\n".join(f"missed: {name}" for name in missed) or "all targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
