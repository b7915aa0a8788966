"""Pictures of plans: the scaling curve, the Pareto front, the finalists; as PNG, SVG or HTML.

Matplotlib is an optional part and is loaded when something is drawn. A picture is drawn without a
display, and the same answer gives the same file.
"""

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.cli.render.html import render_chart_page
from meshwright.cli.render.step_bars import STEP_SEGMENTS
from meshwright.cli.render.step_chart import COLORS
from meshwright.cli.render.step_screen import format_layout
from meshwright.cli.result import View
from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.file_errors import make_parent_folder
from meshwright.predict.plan import Plan
from meshwright.predict.plan.studies.pareto_front import ParetoPoint
from meshwright.spec.units import format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_SUFFIXES = (".png", ".svg", ".html")
_INK, _SOFT, _LINE, _BAND = "#222222", "#888888", COLORS[0], COLORS[1]
_GIB = 2.0**30
_STYLE = {
    "font.size": 10,
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "svg.hashsalt": "meshwright",
}


class PlottedPoint(NamedTuple):
    """One answered value of a sweep."""

    value: float
    plan: Plan


def require_plot(path: str) -> None:
    """Refuse a picture that cannot be drawn, before anything is searched for it."""
    if Path(path).suffix.lower() not in PLOT_SUFFIXES:
        what = f"{path!r} is no picture that can be written"
        raise InputError([Problem("--plot", what, f"end it in {', '.join(PLOT_SUFFIXES)}")])
    make_parent_folder(Path(path))
    try:
        import matplotlib as mpl  # noqa: F401
    except ModuleNotFoundError:
        raise MissingDependency(
            "--plot needs matplotlib, which is not installed",
            "pip install 'meshwright[plots]', or leave --plot out",
        ) from None


def draw_scaling(
    path: str, title: str, thing: str, points: Sequence[PlottedPoint], views: Sequence[View]
) -> None:
    """Draw tokens per second and MFU over what was swept; over GPUs with the ideal line."""
    with _drawing(path, title, views, (7.6, 6.4)) as figure:
        speed, mfu = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.6))
        _draw_speed(speed, points, ideal=thing == "gpus")
        _draw_mfu(mfu, points)
        values = [point.value for point in points]
        named = {"gpus": "GPUs", "batch": "sequences per step", "length": "sequence length"}
        mfu.set_xlabel(named[thing])
        mfu.set_xscale("log", base=2)
        mfu.set_xticks(values, [f"{value:,.0f}" for value in values])
        mfu.minorticks_off()


def _draw_speed(axes: "Axes", points: Sequence[PlottedPoint], *, ideal: bool) -> None:
    values = [point.value for point in points]
    steps = [point.plan.step for point in points]
    rates = [step.tokens_per_s for step in steps]
    low = [step.tokens_per_s * step.step_s / step.high_s for step in steps]
    high = [step.tokens_per_s * step.step_s / step.low_s for step in steps]
    axes.fill_between(values, low, high, color=_BAND, alpha=0.45, lw=0, label="nine of ten")
    if ideal:
        line = [rates[0] * value / values[0] for value in values]
        axes.plot(values, line, color=_SOFT, ls="--", lw=1, label="ideal, from the first point")
    axes.plot(values, rates, color=_LINE, marker="o", ms=5, label="predicted")
    axes.set_ylabel("tokens per second")
    if ideal:
        axes.set_yscale("log")
        _counted(axes, "y", [min(low), max(high)])
    else:
        axes.set_ylim(0, 1.15 * max(high))
        axes.yaxis.set_major_formatter(lambda value, _: format_count(value))
    axes.legend(frameon=False, loc="upper left" if ideal else "lower right")


def _draw_mfu(axes: "Axes", points: Sequence[PlottedPoint]) -> None:
    values = [point.value for point in points]
    steps = [point.plan.step for point in points]
    low = [step.mfu * step.step_s / step.high_s for step in steps]
    high = [step.mfu * step.step_s / step.low_s for step in steps]
    axes.fill_between(values, low, high, color=_BAND, alpha=0.45, lw=0)
    axes.plot(values, [step.mfu for step in steps], color=_LINE, marker="o", ms=5)
    axes.set_ylim(0, 1.15 * max(high))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("MFU")


def draw_pareto(
    path: str, title: str, points: Sequence[ParetoPoint], views: Sequence[View]
) -> None:
    """Draw price, or GPU-hours where there is none, over time; size is GPUs, colour memory."""
    days = [point.time_s / 86400 for point in points]
    priced = all(point.price is not None for point in points)
    cost = [point.price or 0.0 if priced else point.gpus * point.time_s / 3600 for point in points]
    gpus = [point.gpus for point in points]
    sizes = [50 + 30 * math.log2(one / min(gpus)) for one in gpus]
    memory = [point.memory_bytes / _GIB for point in points]
    with _drawing(path, title, views, (7.6, 5.4)) as figure:
        axes = figure.subplots()
        axes.step(*_lowest(days, cost), where="post", color=_SOFT, lw=1, ls="--", zorder=2)
        drawn = axes.scatter(
            days, cost, s=sizes, c=memory, cmap="viridis_r", edgecolors=_INK, linewidths=0.6,
            zorder=3,
        )  # fmt: skip
        bar = figure.colorbar(drawn, ax=axes, label="GiB on the fullest GPU", pad=0.02)
        bar.outline.set_visible(False)
        _label_gpus(axes, days, cost, gpus)
        axes.set_xlabel("days for all tokens")
        axes.set_ylabel("dollars for all tokens" if priced else "GPU-hours for all tokens")
        axes.set_xscale("log")
        _counted(axes, "x", days)
        axes.locator_params(axis="y", steps=[1, 2, 5, 10])
        mark = "$" if priced else ""
        axes.yaxis.set_major_formatter(lambda value, _: f"{mark}{format_count(value)}")
        axes.margins(0.12)


def _lowest(across: Sequence[float], up: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the corners below which nothing lies: what is cheapest in at most so long."""
    xs, ys = list[float](), list[float]()
    for x, y in sorted(zip(across, up, strict=True)):
        if not ys or y < ys[-1]:
            xs.append(x)
            ys.append(y)
    return [*xs, max(across)], [*ys, ys[-1]]


def draw_plans(path: str, title: str, plans: Sequence[Plan], views: Sequence[View]) -> None:
    """Draw the steps of some plans as stacked bars with their intervals."""
    with _drawing(path, title, views, (8.4, 1.9 + 0.52 * len(plans))) as figure:
        axes = figure.subplots()
        places, left = range(len(plans)), [0.0] * len(plans)
        for part, colour in zip(STEP_SEGMENTS, COLORS, strict=True):
            sizes = [getattr(plan.step, part.field) for plan in plans]
            if any(size > 0 for size in sizes):
                name = part.name.removeprefix("exposed ")
                axes.barh(places, sizes, left=left, height=0.62, color=colour, label=name)
                left = [a + b for a, b in zip(left, sizes, strict=True)]
        for place, plan in enumerate(plans):
            step = plan.step
            reach = [[step.step_s - step.low_s], [step.high_s - step.step_s]]
            axes.errorbar(step.step_s, place, xerr=reach, color=_INK, capsize=3, lw=1)
            said = f"  {format_seconds(step.step_s)}"
            axes.text(step.high_s, place, said, va="center", fontsize=9)
        names = [textwrap.fill(format_layout(plan.layout), 40) for plan in plans]
        axes.set_yticks(list(places), names)
        axes.tick_params(axis="y", labelsize=8, length=0)
        axes.set_xlim(0, 1.12 * max(plan.step.high_s for plan in plans))
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
        axes.set_xlabel("seconds of a step; whiskers hold nine of ten")
        figure.legend(frameon=False, ncols=5, fontsize=8, loc="outside lower center")


@contextmanager
def _drawing(
    path: str, title: str, views: Sequence[View], size: tuple[float, float]
) -> Iterator["Figure"]:
    """Give a figure to draw on, and write it in the format that the file's ending names."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ending, drawn = Path(path).suffix.lower(), io.BytesIO()
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        for axes in figure.axes:
            axes.set_axisbelow(True)
        if ending != ".html":  # a page has its own heading
            figure.suptitle(title, fontsize=12, fontweight="bold", x=0.02, ha="left")
        if ending == ".png":
            figure.savefig(drawn, format="png", dpi=150)
        else:
            figure.savefig(drawn, format="svg", metadata={"Date": None})
    body = drawn.getvalue()
    if ending == ".html":
        body = render_chart_page(title, body.decode("utf-8"), views).encode("utf-8")
    try:
        Path(path).write_bytes(body)
    except OSError as error:
        what = f"cannot write {path}: {error.strerror or error}"
        raise InputError([Problem("--plot", what, "name a file that can be written")]) from None


def _label_gpus(
    axes: "Axes", across: Sequence[float], up: Sequence[float], gpus: Sequence[int]
) -> None:
    """Write the number of GPUs beside the first point of each."""
    said = set[int]()
    for x, y, count in zip(across, up, gpus, strict=True):
        if count not in said:
            said.add(count)
            axes.annotate(
                f"{count:,} GPUs", (x, y), xytext=(9, 7), textcoords="offset points", fontsize=9
            )


def _counted(axes: "Axes", which: str, values: Sequence[float]) -> None:
    """Mark a logarithmic axis at 1, 2, 3 and 5 of each decade, in words such as 20k."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    marks = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 3, 5)]
    shown = [m for m in marks if min(values) / 1.3 <= m <= 1.3 * max(values)]
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_ticks(shown, [format_count(mark) for mark in shown])
    axis.set_ticks([], minor=True)
