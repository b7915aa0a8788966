"""What it costs a job that `mw watch` watches it.

The same job runs by turns with and without watching, in processes of its own and over the same
number of steps; what is compared is the time of those steps, not of starting. Runs are as long as
it takes the default budget to pay for captures. Beside it stands what the watch itself counts. On
processors one process trains, which leaves the watch a core, and then two ranks over gloo on two
cores; where there is a GPU, one process trains on that instead.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

NAME = "watch_overhead"
QUESTION = "What does watching cost a job?"


class Size(NamedTuple):
    """How large the job is, how long it runs and how often."""

    width: int
    layers: int
    batch: int
    run_s: float
    rounds: int
    every: int | None = None
    """Steps between captures; None leaves that to the budget."""
    ranks: int = 1


ONE_FULL = Size(width=256, layers=12, batch=256, run_s=100, rounds=2)
TWO_FULL = Size(width=256, layers=12, batch=256, run_s=100, rounds=2, ranks=2)
TWO_QUICK = Size(width=32, layers=2, batch=8, run_s=2, rounds=1, every=20, ranks=2)
GPU_FULL = Size(width=1024, layers=12, batch=4352, run_s=75, rounds=1)
GPU_QUICK = Size(width=128, layers=2, batch=256, run_s=2, rounds=1, every=20)
# A first capture is taken to cost a quarter of a second, which the budget has after half a minute,
# and captures are taken at powers of two of steps; on an H200 a step of this batch takes ten ms,
# so that step 4096 is in the middle of the run.
TRIED_STEPS, WARMUP, PIECES = 80, 10, 40

JOB = """
import json, os, sys, time
import torch
device = sys.argv[1]
width, layers, batch, steps, warmup, pieces = map(int, sys.argv[2:])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[
    layer for _ in range(layers)
    for layer in (torch.nn.LayerNorm(width), torch.nn.Linear(width, width), torch.nn.GELU())
]).to(device)
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
given = torch.randn(batch, width, device=device)

def now():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()

def run(count):
    for number in range(count):
        optimizer.zero_grad()
        loss = model(given).square().mean()
        loss.backward()
        optimizer.step()
        if number % 10 == 0:
            loss.item()

run(warmup)
marks = [now()]
for _ in range(pieces):
    run(steps // pieces)
    marks.append(now())
if os.environ.get("RANK", "0") == "0":
    print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""


class Watched(NamedTuple):
    """One run that was watched."""

    pieces_s: list[float]
    counted: float
    """What the watch says that it took, as a part of the time."""
    costs_ms: list[float]
    """Of its captures."""


def measure(quick: bool) -> dict[str, object]:
    """Measure on the GPU where there is one, else on processors."""
    if _has_gpu():
        figures = _figures("one GPU", "cuda", GPU_QUICK if quick else GPU_FULL)
    elif quick:
        figures = _figures("two ranks on processors", "cpu", TWO_QUICK)
    else:
        figures = _figures("one process, a core to spare", "cpu", ONE_FULL)
        figures += _figures("two ranks on two cores", "cpu", TWO_FULL)
    notes = (
        "In turns: the mean time of all steps of the watched runs over that of the others, less "
        f"one; how well it is known, from the spread of the {PIECES} pieces that each run is timed "
        "in. The budget is the default, 0.8 %. Counted: by the watch's own account (hooks, "
        "starting, stopping and writing captures, and by how much captured steps are longer). "
        "Where turns are known to within more than 1 %, as on a busy machine, they neither confirm "
        "nor refute the target."
    )
    return {"figures": figures, "peers": [], "notes": notes}


def _has_gpu() -> bool:
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _figures(label: str, device: str, size: Size) -> list[dict[str, object]]:
    tried = _plain(device, size, TRIED_STEPS)
    step_s = sum(tried) / TRIED_STEPS
    steps = max(PIECES, int(size.run_s / step_s / PIECES) * PIECES)
    plain: list[float] = []
    watched: list[Watched] = []
    for number in range(size.rounds):
        for watch in (False, True) if number % 2 == 0 else (True, False):
            if watch:
                watched.append(_watched(device, size, steps))
            else:
                plain += _plain(device, size, steps)
    beside = [piece_s for one in watched for piece_s in one.pieces_s]
    change = fmean(beside) / fmean(plain) - 1
    first = [one.costs_ms[0] for one in watched if one.costs_ms]
    later = [cost_ms for one in watched for cost_ms in one.costs_ms[1:]]
    rows = [
        ("step", 1e3 * fmean(plain) * PIECES / steps, "ms", 3, ""),
        ("watching, in turns", 100 * change, "%", 2, "< 1"),
        ("in turns, known to within", 100 * _known(plain, beside), "± %", 2, ""),
        ("watching, counted", 100 * median(one.counted for one in watched), "%", 3, "< 1"),
        ("captures in a run", median(len(one.costs_ms) for one in watched), "", 1, ""),
        ("first capture", median(first) if first else 0.0, "ms", 1, ""),
        ("later capture", median(later) if later else 0.0, "ms", 1, ""),
    ]
    return [
        {"name": f"{label}: {name}", "value": round(value, digits), "unit": unit}
        | ({"target": target} if target else {})
        for name, value, unit, digits, target in rows
    ]


def _known(plain: list[float], watched: list[float]) -> float:
    """Return the standard error of the ratio of two means, by the spread of their pieces."""
    return math.hypot(
        *(stdev(times) / fmean(times) / math.sqrt(len(times)) for times in (plain, watched))
    )


def _command(device: str, size: Size, steps: int, script: Path) -> list[str]:
    start = [sys.executable]
    if size.ranks > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(size.ranks)]
    sizes = (size.width, size.layers, size.batch, steps, WARMUP, min(PIECES, steps))
    script.write_text(JOB, encoding="utf-8")
    return [*start, str(script), device, *map(str, sizes)]


def _plain(device: str, size: Size, steps: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return _times(_command(device, size, steps, Path(folder) / "job.py"))


def _watched(device: str, size: Size, steps: int) -> Watched:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "watch"
        watch = [sys.executable, "-m", "meshwright", "watch", "--out", str(out), "-q"]
        watch += ["--capture-interval", str(size.every)] if size.every else []
        times = _times([*watch, "--", *_command(device, size, steps, Path(folder) / "job.py")])
        status = json.loads((out / "status.json").read_text(encoding="utf-8"))
    return Watched(times, status["overhead_share"], status["capture_costs_ms"])


def _times(command: list[str]) -> list[float]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ) | {"OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"the job failed ({done.returncode}):\n{done.stderr[-4000:]}")
    return [float(took_s) for took_s in json.loads(lines[0])]
