"""`open_outputs`: every output that the settings ask for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.run.train.outputs.jsonl import JsonLines
from meshwright.run.train.outputs.output import Output, Outputs
from meshwright.run.train.outputs.progress import open_progress
from meshwright.run.train.outputs.prometheus import PrometheusPage
from meshwright.run.train.outputs.settings import OutputSettings
from meshwright.run.train.outputs.tensorboard import TensorBoard
from meshwright.run.train.outputs.wandb import WandbOffline


def open_outputs(
    settings: OutputSettings,
    folder: Path,
    *,
    steps: int | None = None,
    resumed_at: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Outputs:
    """Open the outputs of a run in its folder; only one process of a run does so.

    `steps` is where the run ends, and `resumed_at` the step it goes on after, None for a new run.
    """
    opened: dict[str, Output] = {}
    try:
        if settings.jsonl:
            opened["jsonl"] = JsonLines(folder / "metrics.jsonl", resumed_at)
        if settings.tensorboard:
            opened["tensorboard"] = TensorBoard(folder / "tensorboard", resumed_at)
        if settings.wandb is not None:
            opened["wandb"] = WandbOffline(folder, settings.wandb, config or {})
        if settings.prometheus is not None:
            opened["prometheus"] = PrometheusPage(settings.prometheus)
        progress = open_progress(settings, steps, resumed_at or 0)
        if progress is not None:
            opened["progress"] = progress
    except BaseException:
        Outputs(opened).close()
        raise
    return Outputs(opened)
