"""`report.html` of a training run: its curves, how it ended, and what it was told."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.answer import Text
from meshwright.cli.curve_svg import Chart, Curve, draw
from meshwright.cli.files import write_text
from meshwright.cli.plan_page import page
from meshwright.spec.files import dump

if TYPE_CHECKING:
    from meshwright.run.train.job import Job
    from meshwright.run.train.sitting import Outcome


def write_report(folder: Path, job: "Job", outcome: "Outcome") -> Path:
    """Write the page of a run beside its figures."""
    from meshwright.cli.train import summary

    path = folder / "report.html"
    picture = curves(read_rows(folder / "metrics.jsonl"))
    title = f"{job.model.name}: {outcome.steps:,} of {outcome.all_steps:,} steps"
    write_text(str(path), page(title, picture, (summary(outcome), Text(dump(job)))))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the figures of a run; half a line at the end is no row."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def curves(rows: list[dict[str, Any]]) -> str:
    """Draw the losses, the speed and the gradient's norm over the steps."""

    def points(name: str) -> list[tuple[float, float]]:
        found = ((row["step"], row.get(name)) for row in rows)
        return [(step, value) for step, value in found if value is not None]

    held_out = Curve("held out", points("held_out_loss"), dots=True)
    rate = [(step, value) for step, value in points("tokens_per_s") if math.isfinite(value)]
    return draw(
        (
            Chart("loss", (Curve("trained", points("loss")), held_out), "nats per token"),
            Chart("speed", (Curve("", rate),), "tokens/s"),
            Chart("gradient norm", (Curve("", points("gradient_norm")),)),
        )
    )
