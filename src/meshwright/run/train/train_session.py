"""`TrainSession`: what one process does of a run, its figures read one step behind the device.

The host queues a step before it reads the figures of the one before, so reading never leaves the
device without work.
"""

import math
import warnings
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.train.async_metrics import AsyncMetricReader, DeviceTimestamp
from meshwright.run.train.data.batch import TrainBatch
from meshwright.run.train.evaluation import compute_eval_loss
from meshwright.run.train.logging import MetricLoggers
from meshwright.run.train.loss_guard import GuardDecision, TrainingStoppedError
from meshwright.run.train.profiling.device_peak import find_catalog_gpu_of_device
from meshwright.run.train.step_backend import MeshStepBackend, ReplicaStep
from meshwright.run.train.train_step import StepLosses
from meshwright.run.train.trainer import Trainer

_SEEN = "seen."
"""What figures of the learner are called on their way from the device."""

LOSS_WINDOW = 20
"""Steps whose mean loss a session tells."""


class GuardOutcome(NamedTuple):
    """What the guard said of a step."""

    decision: GuardDecision
    stop_error: TrainingStoppedError | None
    """Why the run ends here, where it does."""


class _Phases(NamedTuple):
    """When the device came to the parts of a step, and how long other ranks were waited for."""

    began: DeviceTimestamp
    graded: DeviceTimestamp
    """Gradients are there, and the update begins."""
    waits_s: tuple[float, float] | None
    """In gradients and in the update; None where nobody counts."""

    def figures(self, before: DeviceTimestamp, done: DeviceTimestamp) -> dict[str, float]:
        """Split the time from the step before to this one's end; the parts add up to it."""
        waits = self.waits_s or (0.0, 0.0)
        row = {
            "step_gap_s": self.began.elapsed_since_s(before),
            "forward_backward_s": self.graded.elapsed_since_s(self.began) - waits[0],
            "optimizer_s": done.elapsed_since_s(self.graded) - waits[1],
        }
        return row if self.waits_s is None else row | {"comm_wait_s": sum(waits)}


class _Queued(NamedTuple):
    """A step that the device may still be working on."""

    number: int
    """Counted from 1: how many steps are done after it."""
    tokens: int | None
    """Trained tokens; None where the figures tell, as replicas have their own."""
    figures: AsyncMetricReader
    """Mean loss, auxiliary loss, length of the gradients before clipping, and the scale of the
    loss where there is one."""
    learning_rate: float
    wait_s: float
    flops_per_token: float
    judged: GuardOutcome | None
    """What the guard said, where it was asked before the update."""
    phases: _Phases


class TrainSession:
    """Runs steps of a trainer, and writes down what they tell."""

    def __init__(self, trainer: Trainer, loggers: MetricLoggers) -> None:
        self.trainer, self.loggers = trainer, loggers
        job = trainer.job
        self.flops_per_token = cache(job.flops_per_token)
        gpu = find_catalog_gpu_of_device(trainer.device)
        self.peak_flops = None
        if gpu is not None:
            self.peak_flops = gpu.peak_flops(job.layout.precision) * job.layout.gpus
        self.losses: list[float] = []
        self.tokens_per_s: list[float] = []
        """Tokens per second of each step but the first, which the device warms up in."""
        self.flops_per_s: list[float] = []
        """FLOPs per second of the same steps."""
        self.step_time_s = self.data_wait_s = 0.0
        """Time of the same steps, and how much of it they waited for data."""
        self.is_stop_agreed = False
        """Some rank was asked to stop, and all have heard of it."""
        self.eval_loss: float | None = None
        self.eval_metrics: dict[str, float] = {}
        self._read_any = False
        self._marked = DeviceTimestamp(trainer.device)
        self._unread: _Queued | None = None

    def step(self, batch: TrainBatch, wait_s: float) -> None:
        """Queue the next step, then read the figures of the one before."""
        queued = self._queue(batch, wait_s)
        before, self._unread = self._unread, queued
        if before is not None:
            self._read(before)
        # On a CPU nothing is queued: the step is done.
        if self.trainer.device.type == "cpu" or (queued.judged and queued.judged.stop_error):
            self.flush_metrics()

    def should_stop(self, asked: bool) -> bool:
        """Say whether to end after this step; several ranks end after the same one."""
        step = self.trainer.train_step
        if not isinstance(step, MeshStepBackend | ReplicaStep):
            return asked
        step.is_stop_requested = asked
        return self.is_stop_agreed

    def flush_metrics(self) -> None:
        """Read the figures of every step so far; this waits for the device."""
        queued, self._unread = self._unread, None
        if queued is not None:
            self._read(queued)

    def reset_timer(self) -> None:
        """Let the next step's time begin now, and not with the end of the step before."""
        self._marked = DeviceTimestamp(self.trainer.device)

    def _queue(self, batch: TrainBatch, wait_s: float) -> _Queued:
        """Start a step; only a job that skips spikes waits for the loss before the update."""
        trainer, index = self.trainer, self.trainer.step_number
        rate = trainer.optimizer.learning_rate(index)
        waited_s, began = [self._waited_s()], DeviceTimestamp(trainer.device)
        losses = trainer.train_step.forward_backward(batch)
        waited_s.append(self._waited_s())
        graded = DeviceTimestamp(trainer.device)
        judged, norm = None, torch.zeros((), device=trainer.device)
        if trainer.job.loss_guard.spike_action == "skip":
            norm = trainer.train_step.grad_norm().norm
            scale = trainer.optimizer.grad_scaler
            if scale is not None:
                norm = norm / scale.scale
            judged = self._judge(index + 1, self._figures(losses, norm).read())
        if judged is not None and judged.decision.action == "skip" and torch.isfinite(norm):
            trainer.train_step.discard()
        else:  # the device itself leaves out gradients that are not finite
            norm = trainer.train_step.update(losses, index).optimizer_report.grad_norm
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
        return mesh.recorder.comm_wait_s

    def _figures(self, losses: StepLosses, norm: Tensor) -> AsyncMetricReader:
        auxiliary = losses.auxiliary_loss / losses.divisor
        scalars = {"loss": losses.mean_loss, "auxiliary_loss": auxiliary, "grad_norm": norm}
        if not isinstance(losses.tokens, int):
            scalars["tokens"] = losses.tokens
        if losses.stop_requests is not None:
            scalars["stop"] = losses.stop_requests
        if losses.dropped_counts is not None and self.trainer.job.moe.capacity_factor is not None:
            scalars["dropped_token_fraction"] = losses.dropped_counts[0] / losses.dropped_counts[
                1
            ].clamp(min=1)
        scalars |= {f"{_SEEN}{name}": value for name, value in losses.metrics.items()}
        scale = self.trainer.optimizer.grad_scaler
        return AsyncMetricReader(
            scalars if scale is None else scalars | {"loss_scale": scale.scale}
        )

    def _length(self, batch: TrainBatch) -> int:
        """Return how many positions attention spans, at least on average, in a batch.

        Packed documents attend to themselves alone. Their mean length gives too few FLOPs where
        lengths differ, never too many.
        """
        if batch.documents is None:
            return self.trainer.job.workload.sequence_length
        documents = sum(sequence.documents for sequence in batch.sequences)
        return max(1, sum(sequence.num_tokens for sequence in batch.sequences) // documents)

    def _read(self, queued: _Queued) -> None:
        """Fetch the figures of a step, judge them, and write them where they are due."""
        trainer = self.trainer
        figures = queued.figures.read()
        loss, norm = figures["loss"], figures["grad_norm"]
        tokens = int(figures["tokens"]) if queued.tokens is None else queued.tokens
        trainer.tokens_seen += tokens
        self.is_stop_agreed = self.is_stop_agreed or figures.get("stop", 0.0) > 0
        done, before = queued.figures.done_timestamp, self._marked
        taken_s, self._marked = done.elapsed_since_s(before), done
        if math.isfinite(loss):
            self.losses = [*self.losses, loss][-LOSS_WINDOW:]
        judged = queued.judged or self._judge(queued.number, figures)
        row = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": queued.learning_rate,
            "step_s": taken_s,
            **queued.phases.figures(before, done),
        }
        if self._read_any:
            row |= self._speed(queued, tokens, taken_s)
        self._read_any = True
        row |= self._extras(figures)
        last = queued.number == trainer.total_steps or judged.stop_error is not None
        if last or trainer.job.logging.should_log(queued.number):
            self.loggers.write(queued.number, row)
        if judged.stop_error is not None:
            raise judged.stop_error
        if judged.decision.action != "go":
            warnings.warn(judged.decision.reason, stacklevel=3)

    def _speed(self, queued: _Queued, tokens: int, taken_s: float) -> dict[str, float]:
        rate = tokens / taken_s
        used = rate * queued.flops_per_token
        self.tokens_per_s.append(rate)
        self.flops_per_s.append(used)
        self.step_time_s += taken_s
        self.data_wait_s += min(queued.wait_s, taken_s)
        row = {"tokens_per_s": rate, "data_wait_fraction": min(1.0, queued.wait_s / taken_s)}
        if self.peak_flops:
            row["mfu"] = used / self.peak_flops
        return row

    def _extras(self, figures: dict[str, float]) -> dict[str, float]:
        """Return the figures that only some runs have."""
        trainer, row = self.trainer, {}
        if figures["auxiliary_loss"]:
            row["auxiliary_loss"] = figures["auxiliary_loss"]
        for name in ("dropped_token_fraction", "loss_scale"):
            if name in figures:
                row[name] = figures[name]
        seen = (name for name in figures if name.startswith(_SEEN))
        row |= {name.removeprefix(_SEEN): figures[name] for name in seen}
        if trainer.loss_guard.state.skipped:
            row["skipped_steps"] = float(trainer.loss_guard.state.skipped)
        if trainer.device.type == "cuda":
            row["max_memory_allocated_bytes"] = float(
                torch.cuda.max_memory_allocated(trainer.device)
            )
        return row

    def _judge(self, number: int, figures: dict[str, float]) -> GuardOutcome:
        trainer, loss, norm = self.trainer, figures["loss"], figures["grad_norm"]
        if figures.get("loss_scale", 1.0) > 1.0 and math.isfinite(loss) and not math.isfinite(norm):
            norm = 0.0  # fp16 gradients overflowed for their scale, which halves: no fault
        try:
            verdict = trainer.loss_guard.check_step(number, loss, norm, last_good=_Newest(trainer))
        except TrainingStoppedError as stop:
            return GuardOutcome(GuardDecision("skip"), stop)
        return GuardOutcome(verdict, None)

    def evaluate(self) -> dict[str, float]:
        """Measure the loss on held-out text; nothing where there is none."""
        trainer = self.trainer
        if trainer.eval_dataset is None:
            return {}
        measure = partial(
            compute_eval_loss,
            trainer.train_step,
            trainer.eval_dataset,
            sequences=trainer.job.eval.sequences,
            device=trainer.device,
        )
        figures = {"eval_loss": measure()}
        seen = trainer.objective.pop_metrics()
        self.eval_metrics = {f"eval_{name}": float(one) for name, one in seen.items()}
        figures |= self.eval_metrics
        if trainer.optimizer.ema is not None:
            with trainer.train_step.with_ema_weights(trainer.optimizer.ema):
                figures["eval_loss_ema"] = measure()
            trainer.objective.pop_metrics()
        self.eval_loss = figures["eval_loss"]
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
        return self._trainer.find_latest_checkpoint() is not None

    def __str__(self) -> str:
        return str(self._trainer.find_latest_checkpoint())
