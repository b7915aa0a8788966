"""Records steps of a real training run, clean ones and then ones that are slower on purpose.

One run of the trainer on the device at hand. First a long stretch in which nothing is changed;
then, one after another, stretches with a fault and clean ones between them:

    gradients   products of matrices run in the passes' stream
    update      memory is copied before the weights are updated
    data        a batch comes only so often: a loader that is too slow
    clocks      the GPU's clock is locked lower (`nvidia-smi -lgc`, where that is allowed)
    creeping    products in the passes' stream, more of them with every step

Each by 5 % and by 20 % of a clean step. What is written is what a run's `metrics.jsonl` has of each
step, in whole microseconds; `benchmarks/drift.py` reads it.

    python -m benchmarks.drift_record FILE.json [--cores] [--tiny]

`--cores` trains a small model on one core, whether there is a GPU or not; `--tiny` runs a few steps
of it, which shows that this works. Where others use the machine, their work is in the figures: let
nothing else run.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.machine import describe
from meshwright.observe.hardware.nvml import NvmlDevice
from meshwright.run.train.async_metrics import DeviceTimestamp
from meshwright.run.train.job.job_file import read_job
from meshwright.run.train.job.train_job import TrainJob
from meshwright.run.train.logging import MetricLoggers
from meshwright.run.train.train_session import TrainSession
from meshwright.run.train.trainer import Trainer

FIGURES = ("step_s", "step_gap_s", "forward_backward_s", "optimizer_s")
SHARES = (0.05, 0.20)


class Lengths(NamedTuple):
    """How many steps each stretch has."""

    clean: int
    faulty: int
    between: int
    creeping: int


LONG = Lengths(3000, 300, 150, 600)
SHORT = Lengths(40, 12, 6, 12)


class Stretch(NamedTuple):
    """Steps of one kind."""

    fault: str
    """Empty where there is none."""
    share: float
    """How much longer a step is meant to be."""
    first: int
    last: int


def job_of(folder: Path, *, on_gpu: bool, tiny: bool) -> TrainJob:
    """Return what is trained: 135 million parameters on a GPU, a small model on cores."""
    block = {
        "name": "dense",
        "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 16, "rotary": {}},
        "mlp": {"kind": "mlp", "width": 192},
    }
    small: dict[str, Any] = {"name": "small", "hidden": 64, "vocab": 260, "max_positions": 128,
                             "pattern": "4*dense", "blocks": [block]}  # fmt: skip
    length, batch = (1024, 8) if on_gpu else (128, 2 if tiny else 4)
    steps = 100_000  # more than are run: the schedule of the learning rate has no part in it
    return read_job(
        {
            "model": "smollm2-135m" if on_gpu else small,
            "layout": {"precision": "bf16" if on_gpu else "fp32", "microbatch": batch},
            "workload": {"tokens": steps * batch * length, "sequence_length": length,
                         "global_batch": batch, "packing": "concat"},
            "data": {"sources": ["builtin:1MB"], "tokenizer": "bytes", "cache_dir": str(folder)},
            "logging": {"progress": "none"},
            "device": {} if on_gpu else {"threads": 1, "type": "cpu"},
        }
    )  # fmt: skip


class Kept:
    """An output that keeps its rows."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def write(self, step: int, figures: Any, /) -> None:
        """Keep a row."""
        self.rows[step] = dict(figures)

    def close(self) -> None:
        """Do nothing."""


class Load:
    """Work of which a chosen number of seconds can be queued on the device."""

    def __init__(self, device: torch.device, *, moves: bool) -> None:
        on_gpu = device.type == "cuda"
        size = (2048 if on_gpu else 96) if not moves else (8 << 20 if on_gpu else 1 << 14)
        shape = (size,) if moves else (size, size)
        self.device = device
        self._a, self._b = (torch.ones(shape, device=device) for _ in range(2))
        self._moves = moves
        self._each_s = self._timed()

    def _once(self) -> None:
        if self._moves:
            self._b.copy_(self._a)
        else:
            torch.mm(self._a, self._a, out=self._b)

    def _timed(self) -> float:
        found = []
        for _ in range(5):
            begin = DeviceTimestamp(self.device)
            for _ in range(50):
                self._once()
            end = DeviceTimestamp(self.device)
            end.wait()
            found.append(end.elapsed_since_s(begin) / 50)
        return median(found)

    def run(self, seconds: float) -> None:
        """Queue so much work, to the nearest piece."""
        for _ in range(round(seconds / self._each_s)):
            self._once()


class Recording:
    """A run whose steps can be made slower."""

    def __init__(self, trainer: Trainer, lengths: Lengths) -> None:
        self.lengths, self.kept = lengths, Kept()
        self.session = TrainSession(trainer, MetricLoggers({"kept": self.kept}))
        self.stretches: list[Stretch] = []
        self.clocks: dict[int, float] = {}
        self.extra_s = {"gradients": 0.0, "update": 0.0, "data": 0.0}
        self.usual_s = 0.0
        self._nvml = NvmlDevice(trainer.device) if trainer.device.type == "cuda" else None
        self._plant(trainer)

    def _plant(self, trainer: Trainer) -> None:
        products, copies = (Load(trainer.device, moves=moves) for moves in (False, True))
        step: Any = trainer.train_step
        forward_backward, update = step.forward_backward, step.update

        def slower_gradients(batch: Any) -> Any:
            found = forward_backward(batch)
            products.run(self.extra_s["gradients"])
            return found

        def slower_update(losses: Any, number: int) -> Any:
            copies.run(self.extra_s["update"])
            return update(losses, number)

        step.forward_backward, step.update = slower_gradients, slower_update

    def run(self) -> None:
        """Run every stretch."""
        trainer, lengths = self.session.trainer, self.lengths
        with trainer.train_dataset.iterate(0, device=trainer.device) as loader:
            self.session.reset_timer()
            self._steps(loader, "", 0.0, lengths.clean)
            rows = sorted(self.kept.rows)[lengths.clean // 2 :]
            self.usual_s = median(self.kept.rows[step]["step_s"] for step in rows)
            for fault in ("gradients", "update", "data"):
                for share in SHARES:
                    self.extra_s[fault] = share * self.usual_s
                    self._steps(loader, fault, share, lengths.faulty)
                    self.extra_s[fault] = 0.0
                    self._steps(loader, "", 0.0, lengths.between)
            for clock_mhz in (1500, 1100) if trainer.device.type == "cuda" else ():
                with _locked(clock_mhz) as locked:
                    if locked:
                        self._steps(loader, f"clocks at {clock_mhz} MHz", 0.0, lengths.faulty)
                if locked:
                    self._steps(loader, "", 0.0, lengths.between)
            self._steps(loader, "creeping", 0.10, lengths.creeping, growing=True)
            self.session.flush_metrics()

    def _steps(
        self, loader: Any, fault: str, share: float, count: int, *, growing: bool = False
    ) -> None:
        first = self.session.trainer.step_number + 1
        due = time.perf_counter()
        for number in range(count):
            if growing:
                self.extra_s["gradients"] = share * self.usual_s * number / count
            batch, wait_s = next(loader), loader.wait_s
            if self.extra_s["data"]:  # batches come at a pace of their own, and are waited for
                due = max(due, time.perf_counter() - self.usual_s)
                due += self.usual_s + self.extra_s["data"]
                begun = time.perf_counter()
                time.sleep(max(0.0, due - begun))
                wait_s += time.perf_counter() - begun
            self.session.step(batch, wait_s)
            if self._nvml is not None and number % 25 == 0:
                self.clocks[first + number] = self._nvml.clock_mhz() or 0.0
        self.extra_s["gradients"] = 0.0 if growing else self.extra_s["gradients"]
        self.stretches.append(Stretch(fault, share, first, first + count - 1))


@contextmanager
def _locked(clock_mhz: int) -> Iterator[bool]:
    """Hold the GPU's clock down, where that is allowed; it is let go in any case."""

    def ask(*words: str) -> bool:
        try:
            done = subprocess.run(["nvidia-smi", *words], capture_output=True, check=False)
        except OSError:
            return False
        return done.returncode == 0

    locked = ask("-lgc", f"0,{clock_mhz}")
    try:
        yield locked
    finally:
        if locked:
            ask("-rgc")


def record(*, cores: bool = False, tiny: bool = False) -> dict[str, Any]:
    """Run everything; return steps, stretches and the device."""
    began, machine = time.perf_counter(), describe()
    on_gpu = torch.cuda.is_available() and not (cores or tiny)
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(Path(folder) / "cache", on_gpu=on_gpu, tiny=tiny)
        trainer = Trainer(job, Path(folder) / "run")
        try:
            recording = Recording(trainer, SHORT if tiny else LONG)
            recording.run()
            moment_s = _each_s(lambda: DeviceTimestamp(trainer.device))
        finally:
            trainer.close()
    rows = recording.kept.rows
    numbers = sorted(rows)
    return {
        "model": job.model.name,
        "device": machine.gpus[0] if on_gpu else f"one core of {machine.cpu}",
        "date": datetime.now(UTC).date().isoformat(),
        "ran_s": round(time.perf_counter() - began, 1),
        "moment_us": round(1e6 * moment_s, 2),
        "stretches": [one._asdict() for one in recording.stretches],
        "clocks_mhz": recording.clocks,
        "first": numbers[0],
        "data_wait_us": [
            round(1e6 * rows[n].get("data_wait_fraction", 0.0) * rows[n]["step_s"]) for n in numbers
        ],
        **{f"{name[:-2]}_us": [round(1e6 * rows[n][name]) for n in numbers] for name in FIGURES},
    }


def _each_s(work: Callable[[], object], times: int = 2000) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def main(words: list[str]) -> int:
    """Record, write, and say what came out."""
    found = record(cores="--cores" in words, tiny="--tiny" in words)
    Path(words[0]).write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    for one in found["stretches"]:
        steps = found["step_us"][one["first"] - found["first"] : one["last"] - found["first"] + 1]
        name = one["fault"] or "clean"
        print(f"{name:20} {one['share']:5.2f} {len(steps):5} steps {median(steps) / 1e3:9.3f} ms")
    print(f"a moment takes {found['moment_us']} us; ran {found['ran_s']} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
