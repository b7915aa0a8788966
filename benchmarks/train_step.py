"""How fast a full training step is on one GPU, beside torchtitan in the same run.

Contenders take turns, each in a process of its own, and each at its own best batch of those
listed. The last rows are ceilings measured between them: a copy, a large product, and products of
the shapes these models have. See `train_contenders` for what a step is and how FLOPs are counted.
"""

import subprocess
import sys
from statistics import median
from typing import NamedTuple

import msgspec

from benchmarks.train_contenders import Timed
from meshwright.errors import MissingPart

NAME = "train_step"
QUESTION = "How fast is a training step on one GPU, beside the best peer?"


class Case(NamedTuple):
    """One row of the table."""

    contender: str
    shape: str
    precision: str
    batch: int
    length: int = 4096
    recompute: str = ""

    @property
    def title(self) -> str:
        """How the row is called."""
        again = f", {self.recompute} recomputed" if self.recompute else ""
        batch = f"{self.batch} × {self.length}"
        return f"{self.shape} {self.precision} {self.contender}, {batch}{again}"


CASES = (
    Case("torchtitan", "1b", "bf16", 8),
    Case("ours", "1b", "bf16", 8),
    Case("ours", "1b", "bf16", 16),
    Case("torchtitan", "1b", "bf16-masters", 8),
    Case("ours", "1b", "bf16-masters", 8),
    Case("ours", "1b", "bf16-masters", 16),
    Case("torchtitan", "8b", "bf16", 4),
    Case("ours", "8b", "bf16", 4),
    Case("torchtitan", "1b", "fp8-tensorwise-masters", 8),
    Case("ours", "1b", "fp8-tensorwise", 8),
    Case("ours", "1b", "fp8-tensorwise", 16),
    Case("torchtitan", "8b", "fp8-tensorwise", 4),
    Case("ours", "8b", "fp8-tensorwise", 4),
    Case("ours", "8b", "bf16", 4, 8192, "full"),
)
QUICK = (Case("ours", "tiny", "bf16", 2, 64),)

TARGETS = {
    ("ours", "1b", "bf16"): ("MFU", ">= 57"),
    ("ours", "8b", "bf16"): ("MFU", ">= 61"),
    ("ours", "1b", "fp8-tensorwise"): ("tokens/s", ">= 80000"),
    ("ours", "8b", "fp8-tensorwise"): ("TFLOP/s", ">= 820"),
}


def measure(quick: bool) -> dict[str, object]:
    """Time every case in turn, twice, and keep the better half of the story: the median."""
    cases, rounds = (QUICK, 1) if quick else (CASES, 1)
    import torch

    if not quick and not torch.cuda.is_available():
        raise MissingPart("training steps of real models are timed on a GPU", "use --quick here")
    results: dict[Case, list[Timed]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            results[case].append(run(case, quick))
    return report({case: _middle(found) for case, found in results.items()})


def run(case: Case, quick: bool) -> Timed:
    """Time one case in a process of its own."""
    steps = ["--warm-up", "1", "--steps", "2"] if quick else []
    command = [
        sys.executable, "-W", "ignore", "-m", "benchmarks.train_contenders", case.contender,
        "--shape", case.shape, "--precision", case.precision, "--batch", str(case.batch),
        "--length", str(case.length), "--recompute", case.recompute, *steps,
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case.title} failed:\n{done.stderr[-2000:]}")
    timed = msgspec.json.decode(done.stdout.splitlines()[-1], type=Timed)
    print(
        f"{case.title:50} {timed.tokens_per_s:9,.0f} tokens/s {timed.teraflops:6.1f} TFLOP/s "
        f"{100 * timed.mfu:5.1f} % {timed.memory_gib:6.1f} GiB",
        file=sys.stderr,
        flush=True,
    )
    return timed


def report(results: dict[Case, Timed]) -> dict[str, object]:
    """Return the figures, peers beside ours, with what was promised."""
    figures, peers = [], []
    for case, timed in results.items():
        rows = {
            "tokens/s": round(timed.tokens_per_s),
            "TFLOP/s": round(timed.teraflops, 1),
            "MFU": round(100 * timed.mfu, 2),
            "peak memory": round(timed.memory_gib, 1),
        }
        units = {"tokens/s": "tokens/s", "TFLOP/s": "TFLOP/s", "MFU": "%", "peak memory": "GiB"}
        goal, target = TARGETS.get(case[:3], ("", ""))
        for name, value in rows.items():
            figure: dict[str, object] = {
                "name": f"{case.title}: {name}", "value": value, "unit": units[name],
            }  # fmt: skip
            if name == goal and case.length == 4096 and _is_best(case, results):
                figure["target"] = target
            (figures if case.contender == "ours" else peers).append(figure)
    figures += _ratios(results)
    notes = "MFU counts against 989.4 TFLOP/s, causal attention once."
    return {"figures": figures, "peers": peers, "notes": notes}


def _is_best(case: Case, results: dict[Case, Timed]) -> bool:
    alike = [other for other in results if other[:3] == case[:3] and other.length == case.length]
    return max(alike, key=lambda other: results[other].tokens_per_s) == case


def _ratios(results: dict[Case, Timed]) -> list[dict[str, object]]:
    """Return how much faster our best batch is than the peer's, at equal precision."""
    found: list[dict[str, object]] = []
    best: dict[tuple[str, str, str], float] = {}
    for case, timed in results.items():
        if case.length == 4096:
            key = case[:3]
            best[key] = max(best.get(key, 0.0), timed.tokens_per_s)
    least = {("1b", "bf16"): ">= 1.07", ("8b", "bf16"): ">= 1.05",
             ("8b", "fp8-tensorwise"): ">= 1.05"}  # fmt: skip
    for (contender, shape, precision), rate in best.items():
        peer = best.get(("torchtitan", shape, precision))
        if contender == "ours" and peer:
            figure: dict[str, object] = {
                "name": f"{shape} {precision}: ours over torchtitan",
                "value": round(rate / peer, 3),
                "unit": "×",
            }
            if (shape, precision) in least:
                figure["target"] = least[shape, precision]
            found.append(figure)
    return found


def _middle(found: list[Timed]) -> Timed:
    wanted = median(each.step_ms for each in found)
    return min(found, key=lambda each: abs(each.step_ms - wanted))
