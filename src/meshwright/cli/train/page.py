"""`report.html` of a training run: its curves, how it ended, and what it was told."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.render.files import write_text
from meshwright.cli.render.html import render_chart_page
from meshwright.cli.render.line_chart import ChartLine, LineChart, draw_line_charts
from meshwright.cli.result import FieldsView, TextView
from meshwright.spec.file_formats import dump

if TYPE_CHECKING:
    from meshwright.run.train.job.train_job import TrainJob


_OF_RECIPES = ("accuracy", "margin", "agreed")
"""Figures that recipes of post-training have beside their loss."""


def write_report(folder: Path, job: "TrainJob", ended: str, about: FieldsView) -> Path:
    """Write the page of a run beside its figures."""
    from meshwright.run.train.logging.jsonl import read_rows

    path, rows = folder / "report.html", folder / "metrics.jsonl"
    picture = draw_curves(list(read_rows(rows)) if rows.exists() else [])
    write_text(
        str(path),
        render_chart_page(f"{job.model.name}: {ended}", picture, (about, TextView(dump(job)))),
    )
    return path


def draw_curves(rows: Iterable[Mapping[str, Any]]) -> str:
    """Draw the losses, the speed and the gradient's norm over the steps."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and value is not None:
                found.setdefault(name, []).append((row["step"], value))

    def curve(name: str, figure: str) -> ChartLine:
        return ChartLine(name, found.get(figure, ()))

    # Preferences have no tokens to divide by.
    unit = "per pair or answer" if "margin" in found else "nats per token"
    losses = (
        curve("trained", "loss"),
        curve("held out", "eval_loss")._replace(show_points=True),
        curve("averaged", "eval_loss_ema")._replace(show_points=True),
    )
    return draw_line_charts(
        (
            LineChart("loss", losses, unit),
            *(
                LineChart(
                    name,
                    (
                        curve("trained", name),
                        curve("held out", f"eval_{name}")._replace(show_points=True),
                    ),
                )
                for name in _OF_RECIPES
                if name in found
            ),
            LineChart("speed", (curve("", "tokens_per_s"),), "tokens/s", y_min=0.0),
            LineChart("gradient norm", (curve("", "grad_norm"),), y_min=0.0),
            LineChart("learning rate", (curve("", "learning_rate"),), y_min=0.0),
        )
    )
