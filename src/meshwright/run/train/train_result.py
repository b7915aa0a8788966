"""`TrainResult`: how a session of a run ended."""

import signal
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from meshwright.run.train.train_session import TrainSession


class TrainResult(NamedTuple):
    """How a run ended, or where it stands."""

    folder: Path
    device: str
    steps: int
    """Steps done, of all there are to do."""
    total_steps: int
    tokens: int
    """Tokens trained on, in all sessions."""
    loss: float | None
    """Mean loss of the last steps of this session."""
    eval_loss: float | None
    """On held-out text, where it was last measured in this session."""
    eval_metrics: dict[str, float]
    """What a learner saw of it besides, such as how often it was right."""
    tokens_per_s: float | None
    """Median over the steps of this session, without the first."""
    mfu: float | None
    """Likewise; of the device's peak in the layout's precision, None where that is not known."""
    max_memory_allocated_bytes: int | None
    """The most that the device had allocated."""
    data_wait_fraction: float | None
    """Share of the steps' time in which they waited for data, without the first."""
    skipped_steps: int
    """Steps of the whole run whose update was left out."""
    resumed_at_step: int | None
    stop_signal: str | None
    """The signal that ended this session, where one did."""

    @property
    def exit_code(self) -> int:
        """0 where the session did what it was to; as a shell counts where a signal ended it."""
        if self.stop_signal is None or self.steps >= self.total_steps:
            return 0
        return 128 + signal.Signals[self.stop_signal]


def make_train_result(
    session: TrainSession, resumed_at: int | None, stopped_by: str | None
) -> TrainResult:
    """Sum up a session."""
    trainer = session.trainer
    on_gpu = trainer.device.type == "cuda"
    mfu = None
    if session.flops_per_s and session.peak_flops:
        mfu = median(session.flops_per_s) / session.peak_flops
    return TrainResult(
        folder=trainer.folder,
        device=torch.cuda.get_device_name(trainer.device) if on_gpu else "CPU",
        steps=trainer.step_number,
        total_steps=trainer.total_steps,
        tokens=trainer.tokens_seen,
        loss=sum(session.losses) / len(session.losses) if session.losses else None,
        eval_loss=session.eval_loss,
        eval_metrics=session.eval_metrics,
        tokens_per_s=median(session.tokens_per_s) if session.tokens_per_s else None,
        mfu=mfu,
        max_memory_allocated_bytes=torch.cuda.max_memory_allocated(trainer.device)
        if on_gpu
        else None,
        data_wait_fraction=session.data_wait_s / session.step_time_s
        if session.step_time_s
        else None,
        skipped_steps=trainer.loss_guard.state.skipped,
        resumed_at_step=resumed_at,
        stop_signal=stopped_by,
    )
