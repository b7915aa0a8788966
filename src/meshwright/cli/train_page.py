"""`report.html` of a training run: its curves, how it ended, and what it was told."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.answer import Facts, Text
from meshwright.cli.curve_svg import Chart, Curve, draw
from meshwright.cli.files import write_text
from meshwright.cli.plan_page import page
from meshwright.spec.files import dump

if TYPE_CHECKING:
    from meshwright.run.train.job import Job


_OF_RECIPES = ("accuracy", "margin", "agreed")
"""Figures that recipes of post-training have beside their loss."""


def write_report(folder: Path, job: "Job", ended: str, about: Facts) -> Path:
    """Write the page of a run beside its figures."""
    from meshwright.run.train.outputs.jsonl import read

    path, rows = folder / "report.html", folder / "metrics.jsonl"
    picture = curves(list(read(rows)) if rows.exists() else [])
    write_text(str(path), page(f"{job.model.name}: {ended}", picture, (about, Text(dump(job)))))
    return path


def curves(rows: Iterable[Mapping[str, Any]]) -> str:
    """Draw the losses, the speed and the gradient's norm over the steps."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and value is not None:
                found.setdefault(name, []).append((row["step"], value))

    def curve(name: str, figure: str) -> Curve:
        return Curve(name, found.get(figure, ()))

    # Preferences have no tokens to divide by.
    unit = "per pair or answer" if "margin" in found else "nats per token"
    losses = (
        curve("trained", "loss"),
        curve("held out", "held_out_loss")._replace(dots=True),
        curve("averaged", "held_out_loss_average")._replace(dots=True),
    )
    return draw(
        (
            Chart("loss", losses, unit),
            *(
                Chart(
                    name,
                    (
                        curve("trained", name),
                        curve("held out", f"held_out_{name}")._replace(dots=True),
                    ),
                )
                for name in _OF_RECIPES
                if name in found
            ),
            Chart("speed", (curve("", "tokens_per_s"),), "tokens/s", floor=0.0),
            Chart("gradient norm", (curve("", "gradient_norm"),), floor=0.0),
            Chart("learning rate", (curve("", "learning_rate"),), floor=0.0),
        )
    )
