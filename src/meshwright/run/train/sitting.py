"""`Sitting`: what one process does of a run, its figures read one step behind the device.

The host queues a step before it reads the figures of the one before, so reading never leaves the
device without work.
"""

import math
import warnings
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.train.data.batch import Batch
from meshwright.run.train.evaluate import held_out_loss
from meshwright.run.train.guards import TrainingStopped, Verdict
from meshwright.run.train.outputs import Outputs
from meshwright.run.train.peak import device_gpu
from meshwright.run.train.readback import Moment, Readback
from meshwright.run.train.replica_step import ReplicaStep
from meshwright.run.train.spread_step import SpreadStep
from meshwright.run.train.step import Losses
from meshwright.run.train.trainer import Trainer

_SEEN = "seen."
"""What figures of the learner are called on their way from the device."""

AVERAGED = 20
"""Steps whose mean loss a sitting tells."""


class Judged(NamedTuple):
    """What the guard said of a step."""

    verdict: Verdict
    stop: TrainingStopped | None
    """Why the run ends here, where it does."""


class _Phases(NamedTuple):
    """When the device came to the parts of a step, and how long other ranks were waited for."""

    began: Moment
    graded: Moment
    """Gradients are there, and the update begins."""
    waits_s: tuple[float, float] | None
    """In gradients and in the update; None where nobody counts."""

    def figures(self, before: Moment, done: Moment) -> dict[str, float]:
        """Split the time from the step before to this one's end; the parts add up to it."""
        waits = self.waits_s or (0.0, 0.0)
        row = {
            "between_s": self.began.seconds_after(before),
            "gradients_s": self.graded.seconds_after(self.began) - waits[0],
            "update_s": done.seconds_after(self.graded) - waits[1],
        }
        return row if self.waits_s is None else row | {"exchange_wait_s": sum(waits)}


class _Queued(NamedTuple):
    """A step that the device may still be working on."""

    number: int
    """Counted from 1: how many steps are done after it."""
    tokens: int | None
    """Trained tokens; None where the figures tell, as replicas have their own."""
    figures: Readback
    """Mean loss, auxiliary loss, length of the gradients before clipping, and the scale of the
    loss where there is one."""
    learning_rate: float
    wait_s: float
    flops_per_token: float
    judged: Judged | None
    """What the guard said, where it was asked before the update."""
    phases: _Phases


class Sitting:
    """Runs steps of a trainer, and writes down what they tell."""

    def __init__(self, trainer: Trainer, outputs: Outputs) -> None:
        self.trainer, self.outputs = trainer, outputs
        job = trainer.job
        self.flops_per_token = cache(job.flops_per_token)
        gpu = device_gpu(trainer.device)
        self.peak_flops = None
        if gpu is not None:
            self.peak_flops = gpu.peak_flops(job.layout.precision) * job.layout.gpus
        self.losses: list[float] = []
        self.rates: list[float] = []
        """Tokens per second of each step but the first, which the device warms up in."""
        self.used: list[float] = []
        """FLOPs per second of the same steps."""
        self.stepped_s = self.waited_s = 0.0
        """Time of the same steps, and how much of it they waited for data."""
        self.stop_agreed = False
        """Some rank was asked to stop, and all have heard of it."""
        self.held_out: float | None = None
        self.held_out_figures: dict[str, float] = {}
        self._read_any = False
        self._marked = Moment(trainer.device)
        self._unread: _Queued | None = None

    def step(self, batch: Batch, wait_s: float) -> None:
        """Queue the next step, then read the figures of the one before."""
        queued = self._queue(batch, wait_s)
        before, self._unread = self._unread, queued
        if before is not None:
            self._read(before)
        # On a CPU nothing is queued: the step is done.
        if self.trainer.device.type == "cpu" or (queued.judged and queued.judged.stop):
            self.catch_up()

    def shall_stop(self, asked: bool) -> bool:
        """Say whether to end after this step; several ranks end after the same one."""
        step = self.trainer.step
        if not isinstance(step, SpreadStep | ReplicaStep):
            return asked
        step.wants_stop = asked
        return self.stop_agreed

    def catch_up(self) -> None:
        """Read the figures of every step so far; this waits for the device."""
        queued, self._unread = self._unread, None
        if queued is not None:
            self._read(queued)

    def mark(self) -> None:
        """Let the next step's time begin now, and not with the end of the step before."""
        self._marked = Moment(self.trainer.device)

    def _queue(self, batch: Batch, wait_s: float) -> _Queued:
        """Start a step; only a job that skips spikes waits for the loss before the update."""
        trainer, index = self.trainer, self.trainer.step_number
        rate = trainer.optimizer.learning_rate(index)
        waited_s, began = [self._waited_s()], Moment(trainer.device)
        losses = trainer.step.gradients(batch)
        waited_s.append(self._waited_s())
        graded = Moment(trainer.device)
        judged, norm = None, torch.zeros((), device=trainer.device)
        if trainer.job.guards.spike_action == "skip":
            norm = trainer.step.norm().norm
            scale = trainer.optimizer.loss_scale
            if scale is not None:
                norm = norm / scale.scale
            judged = self._judge(index + 1, self._figures(losses, norm).read())
        if judged is not None and judged.verdict.action == "skip" and torch.isfinite(norm):
            trainer.step.drop()
        else:  # the device itself leaves out gradients that are not finite
            norm = trainer.step.update(losses, index).update.norm
        trainer.step_number = index + 1
        flops = self.flops_per_token(self._length(batch))
        waited_s.append(self._waited_s())
        figures = self._figures(losses, norm)
        tokens = losses.tokens if isinstance(losses.tokens, int) else None
        phases = _Phases(began, graded, _lengths(waited_s))
        return _Queued(index + 1, tokens, figures, rate, wait_s, flops, judged, phases)

    def _waited_s(self) -> float | None:
        """Return how long this rank has waited for others; None where it is not the host's wait."""
        mesh = self.trainer.mesh
        if mesh is None or mesh.recorder is None or self.trainer.device.type != "cpu":
            return None
        return mesh.recorder.waited_s

    def _figures(self, losses: Losses, norm: Tensor) -> Readback:
        auxiliary = losses.auxiliary / losses.divisor
        scalars = {"loss": losses.mean, "auxiliary_loss": auxiliary, "gradient_norm": norm}
        if not isinstance(losses.tokens, int):
            scalars["tokens"] = losses.tokens
        if losses.stop is not None:
            scalars["stop"] = losses.stop
        if losses.dropped is not None and self.trainer.job.experts.capacity_factor is not None:
            scalars["dropped_share"] = losses.dropped[0] / losses.dropped[1].clamp(min=1)
        scalars |= {f"{_SEEN}{name}": value for name, value in losses.figures.items()}
        scale = self.trainer.optimizer.loss_scale
        return Readback(scalars if scale is None else scalars | {"loss_scale": scale.scale})

    def _length(self, batch: Batch) -> int:
        """Return how many positions attention spans, at least on average, in a batch.

        Packed documents attend to themselves alone. Their mean length gives too few FLOPs where
        lengths differ, never too many.
        """
        if batch.documents is None:
            return self.trainer.job.workload.sequence_length
        documents = sum(sequence.documents for sequence in batch.sequences)
        return max(1, sum(sequence.filled for sequence in batch.sequences) // documents)

    def _read(self, queued: _Queued) -> None:
        """Fetch the figures of a step, judge them, and write them where they are due."""
        trainer = self.trainer
        figures = queued.figures.read()
        loss, norm = figures["loss"], figures["gradient_norm"]
        tokens = int(figures["tokens"]) if queued.tokens is None else queued.tokens
        trainer.tokens_seen += tokens
        self.stop_agreed = self.stop_agreed or figures.get("stop", 0.0) > 0
        done, before = queued.figures.done, self._marked
        taken_s, self._marked = done.seconds_after(before), done
        if math.isfinite(loss):
            self.losses = [*self.losses, loss][-AVERAGED:]
        judged = queued.judged or self._judge(queued.number, figures)
        row = {
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": queued.learning_rate,
            "step_s": taken_s,
            **queued.phases.figures(before, done),
        }
        if self._read_any:
            row |= self._speed(queued, tokens, taken_s)
        self._read_any = True
        row |= self._extras(figures)
        last = queued.number == trainer.steps or judged.stop is not None
        if last or trainer.job.output.due(queued.number):
            self.outputs.write(queued.number, row)
        if judged.stop is not None:
            raise judged.stop
        if judged.verdict.action != "go":
            warnings.warn(judged.verdict.why, stacklevel=3)

    def _speed(self, queued: _Queued, tokens: int, taken_s: float) -> dict[str, float]:
        rate = tokens / taken_s
        used = rate * queued.flops_per_token
        self.rates.append(rate)
        self.used.append(used)
        self.stepped_s += taken_s
        self.waited_s += min(queued.wait_s, taken_s)
        row = {"tokens_per_s": rate, "data_wait_share": min(1.0, queued.wait_s / taken_s)}
        if self.peak_flops:
            row["mfu"] = used / self.peak_flops
        return row

    def _extras(self, figures: dict[str, float]) -> dict[str, float]:
        """Return the figures that only some runs have."""
        trainer, row = self.trainer, {}
        if figures["auxiliary_loss"]:
            row["auxiliary_loss"] = figures["auxiliary_loss"]
        for name in ("dropped_share", "loss_scale"):
            if name in figures:
                row[name] = figures[name]
        seen = (name for name in figures if name.startswith(_SEEN))
        row |= {name.removeprefix(_SEEN): figures[name] for name in seen}
        if trainer.guard.state.skipped:
            row["skipped_steps"] = float(trainer.guard.state.skipped)
        if trainer.device.type == "cuda":
            row["memory_bytes"] = float(torch.cuda.max_memory_allocated(trainer.device))
        return row

    def _judge(self, number: int, figures: dict[str, float]) -> Judged:
        trainer, loss, norm = self.trainer, figures["loss"], figures["gradient_norm"]
        if figures.get("loss_scale", 1.0) > 1.0 and math.isfinite(loss) and not math.isfinite(norm):
            norm = 0.0  # fp16 gradients overflowed for their scale, which halves: no fault
        try:
            verdict = trainer.guard.judge(number, loss, norm, last_good=_Newest(trainer))
        except TrainingStopped as stop:
            return Judged(Verdict("skip"), stop)
        return Judged(verdict, None)

    def evaluate(self) -> dict[str, float]:
        """Measure the loss on held-out text; nothing where there is none."""
        trainer = self.trainer
        if trainer.held_out is None:
            return {}
        measure = partial(
            held_out_loss,
            trainer.step,
            trainer.held_out,
            sequences=trainer.job.evaluation.sequences,
            device=trainer.device,
        )
        figures = {"held_out_loss": measure()}
        seen = trainer.learner.figures()
        self.held_out_figures = {f"held_out_{name}": float(one) for name, one in seen.items()}
        figures |= self.held_out_figures
        if trainer.optimizer.average is not None:
            with trainer.step.averaged(trainer.optimizer.average):
                figures["held_out_loss_average"] = measure()
            trainer.learner.figures()
        self.held_out = figures["held_out_loss"]
        return figures


def _lengths(waited_s: list[float | None]) -> tuple[float, float] | None:
    """Return what was waited in gradients and in the update, of the sums around each."""
    first, second, third = waited_s
    if first is None or second is None or third is None:
        return None
    return second - first, third - second


class _Newest:
    """The newest checkpoint, looked for only where an error names it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __bool__(self) -> bool:
        return self._trainer.last_good() is not None

    def __str__(self) -> str:
        return str(self._trainer.last_good())
