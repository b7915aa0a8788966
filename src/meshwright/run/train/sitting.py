"""`Sitting`: what one process does of a run, its figures read one step behind the device.

The host queues a step before it reads the figures of the one before, so reading never leaves the
device without work.
"""

import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.run.train.data.batch import Batch
from meshwright.run.train.evaluate import held_out_loss
from meshwright.run.train.guards import Verdict
from meshwright.run.train.optimizer.average import WeightAverage
from meshwright.run.train.optimizer.optimizer import StepReport
from meshwright.run.train.outputs import Outputs
from meshwright.run.train.peak import device_gpu
from meshwright.run.train.step import Losses
from meshwright.run.train.trainer import Trainer
from meshwright.spec.model import flops_per_token

AVERAGED = 20
"""Steps whose mean loss an outcome tells."""


class Outcome(NamedTuple):
    """How a run ended, or where it stands."""

    folder: Path
    device: str
    steps: int
    """Steps done, of all there are to do."""
    all_steps: int
    tokens: int
    """Tokens trained on, in all sittings."""
    loss: float | None
    """Mean loss of the last steps, as many as `AVERAGED`."""
    held_out_loss: float | None
    """On held-out text, at the end."""
    tokens_per_s: float | None
    """Median over the steps of this sitting."""
    mfu: float | None
    """Of the device's peak in the layout's precision; None where the catalog has no such device."""
    memory_bytes: int | None
    data_wait_share: float | None
    """Share of this sitting's time in which steps waited for data."""
    resumed_at: int | None


class _Queued(NamedTuple):
    """A step that the device may still be working on."""

    number: int
    """Counted from 1: how many steps are done after it."""
    losses: Losses
    update: StepReport | None
    """None where the step was judged first, and dropped."""
    learning_rate: float
    wait_s: float
    verdict: Verdict | None
    """What the guard said, where it was asked before the update."""


class Sitting:
    """Runs steps of a trainer, and writes down what they tell."""

    def __init__(self, trainer: Trainer, outputs: Outputs) -> None:
        self.trainer, self.outputs = trainer, outputs
        job = trainer.job
        self.flops_per_token = flops_per_token(job.model, job.workload.sequence_length)
        gpu = device_gpu(trainer.device)
        self.peak_flops = gpu.peak_flops(job.layout.precision) if gpu is not None else None
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.held_out: float | None = None
        self.began_s = self.marked_s = time.perf_counter()
        self.waited_s = 0.0
        self._unread: _Queued | None = None

    def step(self, batch: Batch, wait_s: float) -> None:
        """Queue the next step, then read the figures of the one before."""
        before, self._unread = self._unread, self._queue(batch, wait_s)
        if before is not None:
            self._read(before)
        if self.trainer.device.type == "cpu":  # nothing is queued there: the step is done
            self.catch_up()

    def catch_up(self) -> None:
        """Read the figures of every step so far; this waits for the device."""
        queued, self._unread = self._unread, None
        if queued is not None:
            self._read(queued)

    def _queue(self, batch: Batch, wait_s: float) -> _Queued:
        """Start a step; only a job that skips spikes waits for the loss before the update."""
        trainer, index = self.trainer, self.trainer.step_number
        rate = trainer.optimizer.learning_rate(index)
        losses = trainer.step.gradients(batch)
        verdict, update = None, None
        if trainer.job.guards.spike_action == "skip":
            verdict = self._judge(index + 1, float(losses.mean), 0.0)
        if verdict is not None and verdict.action == "skip":
            trainer.step.drop()
        else:
            update = trainer.step.update(losses, index).update
        trainer.step_number = index + 1
        trainer.tokens_seen += batch.targets
        return _Queued(index + 1, losses, update, rate, wait_s, verdict)

    def _read(self, queued: _Queued) -> None:
        """Fetch the figures of a step, judge them, and write them where they are due."""
        trainer, tokens = self.trainer, queued.losses.tokens
        loss = float(queued.losses.mean)
        norm = 0.0 if queued.update is None else float(queued.update.norm)
        now_s = time.perf_counter()
        taken_s, self.marked_s = now_s - self.marked_s, now_s
        self.losses = [*self.losses, loss][-AVERAGED:]
        self.rates.append(tokens / taken_s)
        self.waited_s += queued.wait_s
        if trainer.job.output.due(queued.number) or queued.number == trainer.steps:
            row = {
                "loss": loss,
                "auxiliary_loss": float(queued.losses.auxiliary) / tokens,
                "gradient_norm": norm,
                "learning_rate": queued.learning_rate,
                "tokens_per_s": tokens / taken_s,
                "step_s": taken_s,
                "data_wait_share": min(1.0, queued.wait_s / taken_s),
            }
            if self.peak_flops:
                row["mfu"] = tokens / taken_s * self.flops_per_token / self.peak_flops
            if trainer.device.type == "cuda":
                row["memory_bytes"] = float(torch.cuda.max_memory_allocated(trainer.device))
            self.outputs.write(queued.number, row)
        if queued.verdict is None:
            self._judge(queued.number, loss, norm)

    def _judge(self, number: int, loss: float, norm: float) -> Verdict:
        good = self.trainer.checkpoints.latest()
        verdict = self.trainer.guard.judge(
            number, loss, norm, last_good=None if good is None else good.path
        )
        if verdict.action != "go":
            warnings.warn(verdict.why, stacklevel=3)
        return verdict

    def evaluate(self) -> None:
        """Measure the loss on held-out text, where there is any."""
        trainer = self.trainer
        if trainer.held_out is None:
            return
        averages: dict[str, WeightAverage | None] = {"held_out_loss": None}
        if trainer.optimizer.average is not None:
            averages["held_out_loss_average"] = trainer.optimizer.average
        figures = {
            name: held_out_loss(
                trainer.decoder,
                trainer.held_out,
                sequences=trainer.job.evaluation.sequences,
                microbatch=trainer.job.layout.microbatch,
                device=trainer.device,
                average=average,
            )
            for name, average in averages.items()
        }
        self.held_out = figures["held_out_loss"]
        self.outputs.write(trainer.step_number, figures)
        self.marked_s = time.perf_counter()

    def outcome(self, resumed_at: int | None) -> Outcome:
        """Sum it up."""
        trainer = self.trainer
        spent_s = time.perf_counter() - self.began_s
        rate = sorted(self.rates)[len(self.rates) // 2] if self.rates else None
        on_gpu = trainer.device.type == "cuda"
        return Outcome(
            folder=trainer.folder,
            device=torch.cuda.get_device_name(trainer.device) if on_gpu else "CPU",
            steps=trainer.step_number,
            all_steps=trainer.steps,
            tokens=trainer.tokens_seen,
            loss=sum(self.losses) / len(self.losses) if self.losses else None,
            held_out_loss=self.held_out,
            tokens_per_s=rate,
            mfu=rate * self.flops_per_token / self.peak_flops if rate and self.peak_flops else None,
            memory_bytes=torch.cuda.max_memory_allocated(trainer.device) if on_gpu else None,
            data_wait_share=self.waited_s / spent_s if self.rates else None,
            resumed_at=resumed_at,
        )
