"""`Outcome`: how a sitting of a run ended."""

from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from meshwright.run.train.sitting import Sitting


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
    """Mean loss of the last steps of this sitting."""
    held_out_loss: float | None
    """On held-out text, where it was last measured in this sitting."""
    held_out_figures: dict[str, float]
    """What a learner saw of it besides, such as how often it was right."""
    tokens_per_s: float | None
    """Median over the steps of this sitting, without the first."""
    mfu: float | None
    """Likewise; of the device's peak in the layout's precision, None where that is not known."""
    memory_bytes: int | None
    """The most that the device had allocated."""
    data_wait_share: float | None
    """Share of the steps' time in which they waited for data, without the first."""
    skipped: int
    """Steps of the whole run whose update was left out."""
    resumed_at: int | None
    stopped_by: str | None
    """The signal that ended this sitting, where one did."""


def outcome_of(sitting: Sitting, resumed_at: int | None, stopped_by: str | None) -> Outcome:
    """Sum up a sitting."""
    trainer = sitting.trainer
    on_gpu = trainer.device.type == "cuda"
    mfu = None
    if sitting.used and sitting.peak_flops:
        mfu = median(sitting.used) / sitting.peak_flops
    return Outcome(
        folder=trainer.folder,
        device=torch.cuda.get_device_name(trainer.device) if on_gpu else "CPU",
        steps=trainer.step_number,
        all_steps=trainer.steps,
        tokens=trainer.tokens_seen,
        loss=sum(sitting.losses) / len(sitting.losses) if sitting.losses else None,
        held_out_loss=sitting.held_out,
        held_out_figures=sitting.held_out_figures,
        tokens_per_s=median(sitting.rates) if sitting.rates else None,
        mfu=mfu,
        memory_bytes=torch.cuda.max_memory_allocated(trainer.device) if on_gpu else None,
        data_wait_share=sitting.waited_s / sitting.stepped_s if sitting.stepped_s else None,
        skipped=trainer.guard.state.skipped,
        resumed_at=resumed_at,
        stopped_by=stopped_by,
    )
