"""`open_loggers`: every output that the settings ask for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.run.train.logging.jsonl import JsonlLogger
from meshwright.run.train.logging.logger import MetricLogger, MetricLoggers
from meshwright.run.train.logging.logging_config import LoggingConfig
from meshwright.run.train.logging.progress import open_progress
from meshwright.run.train.logging.prometheus import PrometheusLogger
from meshwright.run.train.logging.tensorboard import TensorBoardLogger
from meshwright.run.train.logging.wandb import WandbLogger


def open_loggers(
    settings: LoggingConfig,
    folder: Path,
    *,
    steps: int | None = None,
    resumed_at: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> MetricLoggers:
    """Open the outputs of a run in its folder; only one process of a run does so.

    `steps` is where the run ends, and `resumed_at` the step it goes on after, None for a new run.
    """
    opened: dict[str, MetricLogger] = {}
    try:
        if settings.jsonl:
            opened["jsonl"] = JsonlLogger(folder / "metrics.jsonl", resumed_at)
        if settings.tensorboard:
            opened["tensorboard"] = TensorBoardLogger(folder / "tensorboard", resumed_at)
        if settings.wandb is not None:
            opened["wandb"] = WandbLogger(folder, settings.wandb, config or {})
        if settings.prometheus is not None:
            opened["prometheus"] = PrometheusLogger(settings.prometheus)
        progress = open_progress(settings, steps, resumed_at or 0)
        if progress is not None:
            opened["progress"] = progress
    except BaseException:
        MetricLoggers(opened).close()
        raise
    return MetricLoggers(opened)
