"""How fast a full training step is on one GPU, beside torchtitan in the same run.

Contenders take turns, each in a process of its own, and each at its own best batch of those
listed. The last rows are ceilings, measured when all are done: a copy, a large product, products of
the shapes these models have, and attention. See `train_contenders` for what a step is and how FLOPs
are counted. MESHWRIGHT_BENCH_S in the environment is how many seconds may pass before the last case
begins; cases that come too late are named in the notes.
"""

import os
import subprocess
import sys
import time
from typing import NamedTuple

import msgspec

from benchmarks.train_contenders import Timed
from meshwright.errors import MissingDependency

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
    Case("torchtitan", "8b", "bf16", 4),
    Case("ours", "8b", "bf16", 4),
    Case("ours", "8b", "bf16", 5),
    Case("torchtitan", "8b", "fp8-tensorwise", 4),
    Case("ours", "8b", "fp8-tensorwise", 4),
    Case("ours", "8b", "fp8-tensorwise", 4, 4096, "layernorm,mlp_act"),
    Case("ours", "1b", "fp8-tensorwise", 8),
    Case("ours", "8b", "bf16", 4, 8192, "layernorm,mlp"),
    Case("ours", "1b", "bf16-masters", 8),
    Case("ours", "moe", "bf16", 4),
    Case("torchtitan", "1b", "bf16-masters", 8),
    Case("torchtitan", "1b", "fp8-tensorwise", 8),
)
QUICK = (Case("ours", "tiny", "bf16", 2, 64),)

TARGETS = {
    ("ours", "1b", "bf16"): ("MFU", ">= 57"),
    ("ours", "8b", "bf16"): ("MFU", ">= 61"),
    ("ours", "1b", "fp8-tensorwise"): ("tokens/s", ">= 80000"),
    ("ours", "8b", "fp8-tensorwise"): ("TFLOP/s", ">= 820"),
}
RATIOS = {("1b", "bf16"): ">= 1.07", ("8b", "bf16"): ">= 1.05", ("8b", "fp8-tensorwise"): ">= 1.05"}
"""How much faster than the best peer at equal precision."""
UNITS = {"tokens/s": "tokens/s", "TFLOP/s": "TFLOP/s", "MFU": "%", "peak memory": "GiB"}


def measure(quick: bool) -> dict[str, object]:
    """Time every case in turn, then the ceilings of the device."""
    import torch

    if not quick and not torch.cuda.is_available():
        raise MissingDependency(
            "training steps of real models are timed on a GPU", "use --quick here"
        )
    results: dict[Case, Timed] = {}
    failed, late = [], []
    last_s = float(os.environ.get("MESHWRIGHT_BENCH_S", "inf")) + time.monotonic()
    for case in QUICK if quick else CASES:
        if time.monotonic() > last_s:
            late.append(case.title)
            continue
        try:
            results[case] = run(case)
        except RuntimeError as error:
            failed.append(case.title)
            print(error, file=sys.stderr, flush=True)
    limits = {} if quick else ceilings()
    return report(results, limits, failed, late)


def ceilings() -> dict[str, float]:
    """Measure what the device can do at best, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.train_ceilings"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, float])


def run(case: Case) -> Timed:
    """Time one case in a process of its own."""
    counts = {"tiny": (1, 2), "8b": (4, 8)}.get(case.shape, (5, 12))
    steps = ["--warm-up", str(counts[0]), "--steps", str(counts[1])]
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


def report(
    results: dict[Case, Timed], limits: dict[str, float], failed: list[str], late: list[str]
) -> dict[str, object]:
    """Return the figures, peers and ceilings beside ours, with what was promised."""
    figures: list[dict[str, object]] = []
    peers: list[dict[str, object]] = []
    for case, timed in results.items():
        rows = {
            "tokens/s": round(timed.tokens_per_s),
            "TFLOP/s": round(timed.teraflops, 1),
            "MFU": round(100 * timed.mfu, 2),
            "peak memory": round(timed.memory_gib, 1),
        }
        if case.precision.startswith("fp8"):
            del rows["MFU"]
        goal, target = TARGETS.get(case[:3], ("", ""))
        for name, value in rows.items():
            figure = _figure(f"{case.title}: {name}", value, UNITS[name])
            if name == goal and case == _best(case, results):
                figure["target"] = target
            (figures if case.contender == "ours" else peers).append(figure)
    figures += _beside(results)
    for name, value in limits.items():
        what, _, unit = name.rpartition(", ")
        peers.append(_figure(f"ceiling: {what}", value, unit))
    notes = (
        "A step is forward, backward, clipping and AdamW on one batch; each contender in a process"
        " of its own, the median of 12 steps (8 of the 8B). MFU counts against 989.4 TFLOP/s,"
        " causal attention once. bf16: weights and moments in bf16; masters: fp32 masters and"
        " moments; fp8: as bf16 with the blocks' linear layers in fp8, the head in bf16."
    )
    if failed:
        notes += f" Failed: {', '.join(failed)}."
    if late:
        notes += f" Not measured, as time was up: {', '.join(late)}."
    return {"figures": figures, "peers": peers, "notes": notes}


def _figure(name: str, value: float, unit: str) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit}


def _best(case: Case, results: dict[Case, Timed]) -> Case:
    """Return the fastest of a contender's cases of one shape and precision, at 4096 tokens."""
    alike = [other for other in results if other[:3] == case[:3] and other.length == 4096]
    return max(alike or [case], key=lambda other: results[other].tokens_per_s)


def _beside(results: dict[Case, Timed]) -> list[dict[str, object]]:
    """Return how much faster and smaller we are than the peer of equal precision."""
    found = []
    for peer in (case for case in results if case.contender != "ours"):
        key = (peer.shape, peer.precision)
        mine = [case for case in results if case.contender == "ours" and case[1:3] == key]
        if not mine:
            continue
        best = _best(mine[0], results)
        ratio = results[best].tokens_per_s / results[_best(peer, results)].tokens_per_s
        figure = _figure(f"{' '.join(key)}: speed over {peer.contender}'s", round(ratio, 3), "×")
        if key in RATIOS:
            figure["target"] = RATIOS[key]
        found.append(figure)
        equal = [case for case in mine if (case.batch, case.length) == (peer.batch, peer.length)]
        if equal:
            least = min(results[case].memory_gib for case in equal)
            share = least / results[peer].memory_gib
            name = f"{' '.join(key)}: least memory over {peer.contender}'s, equal batch"
            found.append(_figure(name, round(share, 3), "×") | {"target": "< 1"})
    return found
