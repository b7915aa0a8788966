"""One page of several commands and their answers, with a predicted and a measured step drawn."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from meshwright import __version__
from meshwright.cli.render.html import render_fields, render_page, render_view
from meshwright.cli.render.step_bars import STEP_SEGMENTS
from meshwright.cli.render.step_chart import COLORS
from meshwright.cli.result import CommandResult, NoteView
from meshwright.cli.twin.page import draw_comparison
from meshwright.observe.twin.step_comparison import compare_steps
from meshwright.spec.units import format_seconds
from meshwright.timeline import read_timeline


class SessionEntry(NamedTuple):
    """A command and its answer."""

    chapter: str
    about: str
    command: str
    answer: CommandResult
    seconds: float


def render_session(told: Sequence[SessionEntry], twin: Path | None) -> str:
    """Return the whole file; `twin` is a layout's folder of `mw twin --save`."""
    chapters = [(title, list(some)) for title, some in groupby(told, lambda one: one.chapter)]
    links = "".join(
        f'<li><a href="#part-{number}">{escape(title)}</a></li>'
        for number, (title, _) in enumerate(chapters, 1)
    )
    body = "\n".join(_chapter(*each, twin) for each in enumerate(chapters, 1))
    about = f'<p class="note">make demo, meshwright {__version__}</p>\n'
    return render_page("The loop on this machine", f"{about}{_head(told)}<ol>{links}</ol>\n{body}")


def _head(told: Sequence[SessionEntry]) -> str:
    """What somebody with half a minute should know."""
    rows = list[tuple[str, str]]()
    for each in told:
        data = each.answer.data
        if each.answer.schema == "plan/2" and data["plans"]:
            best = data["plans"][0]
            step = format_seconds(best["step_s"])
            rows.append(("planned", f"a step of {step}, {best['mfu']:.1%} MFU"))
        if each.answer.schema == "bench/2":
            machine = data["machine"]
            rows.append(("this host", f"{machine['device']}, {machine['cores']} cores"))
        if each.answer.schema == "twin/2":
            rows += [("predicted, measured", _sides(one)) for one in data["layouts"]]
    rows.append(("took", format_seconds(sum(each.seconds for each in told))))
    return render_fields(rows)


def _sides(layout: Mapping[str, Any]) -> str:
    steps = [format_seconds(layout[side]["step_s"]) for side in ("predicted", "measured")]
    return f"steps of {' and '.join(steps)}: {layout['step_error']:+.1%}"


def _chapter(number: int, chapter: tuple[str, list[SessionEntry]], twin: Path | None) -> str:
    title, told = chapter
    parts = "\n".join(_command(each, twin) for each in told)
    return (
        f'<section id="part-{number}"><h2 class="chapter">{number}. {escape(title)}</h2>\n'
        f'<p class="note">{escape(told[0].about)}</p>\n{parts}</section>'
    )


def _command(told: SessionEntry, twin: Path | None) -> str:
    views = told.answer.views
    notes = [view for view in views if isinstance(view, NoteView)]
    shown = [view for view in views if not isinstance(view, NoteView)]
    drawn = _drawn(told.answer, twin)
    return (
        f"<pre>$ {escape(told.command)}</pre>\n"
        f'<p class="note">{format_seconds(told.seconds)}</p>\n{drawn}\n'
        + "\n".join(map(render_view, (*shown, *notes)))
    )


def _drawn(answer: CommandResult, twin: Path | None) -> str:
    if answer.schema == "plan/2":
        return _plans(answer)
    if answer.schema == "twin/2" and twin is not None:
        predicted, measured = read_timeline(twin / "predicted"), read_timeline(twin / "measured")
        return draw_comparison(predicted, measured, compare_steps(predicted, measured))
    return ""


def _plans(answer: CommandResult) -> str:
    """Draw the steps of the plans by their parts, to one scale."""
    plans = answer.data["plans"]
    longest = max(plan["step_s"] for plan in plans)
    parts = [
        (part, colour)
        for part, colour in zip(STEP_SEGMENTS, COLORS, strict=True)
        if any(plan[part.field] > 0 for plan in plans)
    ]
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{part.name}</span>' for part, colour in parts
    )
    rows = list[str]()
    for number, plan in enumerate(plans, 1):
        pieces = "".join(
            f'<i style="background:{colour};width:{100 * plan[part.field] / longest:.2f}%" '
            f'title="{part.name}: {format_seconds(plan[part.field])}"></i>'
            for part, colour in parts
        )
        step = f"<span>{format_seconds(plan['step_s'])}</span>"
        rows.append(f'<div class="bar"><span>plan {number}</span><div>{pieces}</div>{step}</div>')
    return f'<div class="legend">{keys}</div>\n<div class="bars">{"".join(rows)}</div>'
