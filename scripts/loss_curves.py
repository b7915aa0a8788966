r"""Draws the losses of runs in one SVG, and how far each is from the first.

    python -m scripts.loss_curves OUT.svg NAME=metrics.jsonl NAME=metrics.jsonl ...

Differences are relative, of means over 25 steps (a single step's loss says more about its batch
than about the run) and of losses on held-out text. They are printed too, those of steps also
without the first 100, in which the learning rate of examples/train-135m.toml rises.

The picture of docs/guide/train.md, from the losses kept beside it:

    python -m scripts.loss_curves docs/figures/train-135m.svg \
        bf16=docs/figures/train-135m-bf16.jsonl fp8=docs/figures/train-135m-fp8.jsonl
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from meshwright.cli.render.files import write_text
from meshwright.cli.render.line_chart import ChartLine, LineChart, draw_line_charts
from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.train.logging.jsonl import read_rows

WIDTH = 25
"""Steps of one mean."""
WARM_UP = 100
"""Steps that the second of the printed figures leaves out."""

_UNIT = "nats per token"

Points = list[tuple[float, float]]


class Run(NamedTuple):
    """The losses of one run, each by its step."""

    name: str
    trained: Points
    held_out: Points


def run_of(name: str, rows: Iterable[Mapping[str, Any]]) -> Run:
    """Pick the losses out of a run's rows; null, a loss that was no number, is left out."""
    found: dict[str, Points] = {"loss": [], "eval_loss": []}
    for row in rows:
        for figure, points in found.items():
            if row.get(figure) is not None:
                points.append((row["step"], row[figure]))
    return Run(name, found["loss"], found["eval_loss"])


def means(points: Points) -> Points:
    """Return the means over stretches of `WIDTH` steps at their last step; a rest is left out."""
    values: dict[int, list[float]] = {}
    for step, value in points:
        values.setdefault((int(step) - 1) // WIDTH, []).append(value)
    return [
        (WIDTH * (index + 1), mean(each)) for index, each in values.items() if len(each) == WIDTH
    ]


def differences_percent(points: Points, first: Points) -> Points:
    """Return how far values are above the first run's, at the steps that both have."""
    known = dict(first)
    return [
        (step, 100 * (value / known[step] - 1)) for step, value in points if known.get(step, 0) > 0
    ]


def picture(runs: Sequence[Run]) -> str:
    """Draw the losses, those on held-out text, and how far runs are from the first, which is 0."""
    first = runs[0]
    steps = means(first.trained)
    apart = [ChartLine(first.name, [(step, 0.0) for step, _ in steps])]
    for run in runs[1:]:
        held_out = differences_percent(run.held_out, first.held_out)
        apart.append(
            ChartLine(run.name, differences_percent(means(run.trained), steps), show_points=True)
        )
        apart.append(ChartLine(f"{run.name}, held out", held_out, show_points=True))
    charts = [
        LineChart("loss of steps", [ChartLine(run.name, run.trained) for run in runs], _UNIT),
        LineChart(
            "loss on held-out text",
            [ChartLine(run.name, run.held_out, show_points=True) for run in runs],
            _UNIT,
        ),
        LineChart(
            f"difference from {first.name}: means of {WIDTH} steps, and held out", apart, "%"
        ),
    ]
    return draw_line_charts(charts if len(runs) > 1 else charts[:2])


def summary(run: Run, first: Run) -> list[str]:
    """Say in words how far a run is from the first."""
    apart = differences_percent(means(run.trained), means(first.trained))
    late = [(step, percent) for step, percent in apart if step > WARM_UP]
    lines = []
    for which, points in ((f"means of {WIDTH} steps", apart), (f"after step {WARM_UP}", late)):
        if points:
            step, most = max(points, key=lambda point: abs(point[1]))
            average = mean(percent for _, percent in points)
            lines.append(f"{which}: {average:+.2f} % on average, at most {most:+.2f} % (to {step})")
    held_out = differences_percent(run.held_out, first.held_out)
    if held_out:
        lines.append(f"held out: {held_out[-1][1]:+.2f} % at step {held_out[-1][0]}")
    return [f"{run.name} against {first.name}, {line}" for line in lines]


def _read(argument: str) -> Run:
    name, equals, path = argument.partition("=")
    if not (name and equals and Path(path).is_file()):
        fix = "give NAME=FILE, such as bf16=runs/a/metrics.jsonl"
        raise InputError([Problem(argument, "this names no file of a run's figures", fix)])
    run = run_of(name, read_rows(Path(path)))
    if not run.trained:
        raise InputError([Problem(path, "it has no losses", "name a run's metrics.jsonl")])
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture and print the differences."""
    parser = argparse.ArgumentParser(prog="python -m scripts.loss_curves")
    parser.add_argument("out", metavar="OUT.svg")
    parser.add_argument("runs", metavar="NAME=metrics.jsonl", nargs="+")
    asked = parser.parse_args(arguments)
    try:
        runs = [_read(each) for each in asked.runs]
        write_text(asked.out, picture(runs))
    except MeshwrightError as error:
        parser.exit(2, f"{error}\n")
    for run in runs[1:]:
        print("\n".join(summary(run, runs[0])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
