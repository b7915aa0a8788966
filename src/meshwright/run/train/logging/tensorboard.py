"""`TensorBoardLogger`: figures as scalars in TensorBoard's event files."""

from pathlib import Path

from meshwright.errors import MissingDependency
from meshwright.run.train.logging.logger import StepMetricValues


class TensorBoardLogger:
    """Writes scalars under `train/`; a figure with a group of its own (`eval/loss`) keeps it."""

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            hint = "pip install tensorboard"
            raise MissingDependency("the TensorBoard output needs tensorboard", hint) from None
        # Readers then forget what an interrupted run wrote after the step it resumes from.
        purge_step = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge_step)

    def write(self, step: int, figures: StepMetricValues) -> None:
        """Write the figures of a step."""
        for name, value in figures.items():
            tag = name if "/" in name else f"train/{name}"
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Write what is still in memory."""
        self._writer.close()
