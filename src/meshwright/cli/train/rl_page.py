"""`render_report.html` of a run of reinforcement learning, made of nothing but the run's folder."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.cli.flags.rl_run import find_rl_config
from meshwright.cli.render.files import write_text
from meshwright.cli.render.html import render_page, render_view
from meshwright.cli.render.line_chart import COLORS, ChartLine, LineChart, draw_line_charts
from meshwright.cli.result import NoteView, TableView, make_fields, make_table
from meshwright.spec.units import format_count, format_quantity, format_seconds

if TYPE_CHECKING:
    from meshwright.run.posttrain.rl.config.rl_config import RLConfig

Rows = Sequence[Mapping[str, Any]]
_EVALUATED = re.compile(r"step (\d+) held-out reward: (\S+) sampled, (\S+) greedy")
"""How a run notes what it found on held-out prompts: shares, or rewards of any size."""
_PART = re.compile(r"reward_(\w+)_mean")
"""The mean of one of several rewards."""
_REWARDS = {"sampled_completion": "sampled_reward", "answer": "reward"}
"""Rewards in a row of `transcripts.jsonl`, by the completions that they are of."""
_FEW = 3
"""Points that make no line by themselves."""
_SIDES = {"trainer": "trainer", "engines": "engine"}


class _HeldOut(NamedTuple):
    """Rewards on held-out prompts."""

    step: int
    sampled: float
    greedy: float


def write_report(folder: Path) -> Path:
    """Write the page of a run beside its figures."""
    path = folder / "report.html"
    write_text(str(path), render_report(folder))
    return path


def render_report(folder: Path) -> str:
    """Return the whole page."""
    settings = find_rl_config(str(folder))
    rows, notes = _lines(folder, "metrics.jsonl"), _lines(folder, "notes.jsonl")
    transcripts = _lines(folder, "transcripts.jsonl")
    found = [_EVALUATED.search(each["text"]) for each in notes]
    held_out = [
        _HeldOut(int(each[1]), _reward(each[2]), _reward(each[3]))
        for each in found
        if each is not None
    ]
    spent = _spent(folder / "timeline")
    whole = _whole(settings, rows, held_out)
    charts = "\n".join(
        f"<div>{draw_line_charts([chart])}</div>" for chart in _charts(rows, held_out, whole)
    )
    said = [NoteView(f"{each['text']}") for each in notes if not _EVALUATED.search(each["text"])]
    body = [
        render_view(make_fields(_head(settings, rows, held_out, whole))),
        f'<div class="curves">{charts}</div>',
        _time(spent),
        _before_after(transcripts, whole),
        "<h2>what it said</h2>" if said else "",
        *map(render_view, said),
        "<h2>settings</h2>",
        f"<pre>{escape((folder / 'config.toml').read_text(encoding='utf-8'))}</pre>",
    ]
    title = f"{settings.task.name}: {format_quantity(len(rows), 'step')} of reinforcement learning"
    return render_page(title, "\n".join(body))


def _reward(said: str) -> float:
    return float(said[:-1]) / 100 if said.endswith("%") else float(said)


def _whole(settings: "RLConfig", rows: Rows, held_out: Sequence[_HeldOut]) -> bool:
    """Tell whether a reward of 1 is the most that there is, so that means are shares of it."""
    found = [row["reward_mean"] for row in rows if row.get("reward_mean") is not None]
    found += [each for _, *both in held_out for each in both]
    return settings.task.is_fractional_reward and all(0 <= each <= 1 for each in found)


def _head(
    settings: "RLConfig", rows: Rows, held_out: Sequence[_HeldOut], whole: bool
) -> dict[str, object]:
    """Return what somebody with half a minute should know."""
    answers = sum(row.get("answers") or 0 for row in rows)
    seconds = sum(row.get("step_s") or 0 for row in rows)
    gaps = [row["logprob_gap_max"] for row in rows if row.get("logprob_gap_max") is not None]
    stale = [row["staleness_mean"] for row in rows if row.get("staleness_mean") is not None]
    told: dict[str, object] = {}
    if held_out:
        first, last = held_out[0], held_out[-1]
        for name, place in (("sampled", 1), ("likeliest", 2)):
            both = [each[place] for each in (first, last)]
            said = (f"{100 * each:.4g} %" if whole else f"{each:.4g}" for each in both)
            told[f"held out, {name}"] = " → ".join(said)
    told["model"] = settings.model or (
        f"{settings.network.layers} layers of {settings.network.hidden}, from random weights"
    )
    told["steps"] = (
        f"{len(rows):,} of {settings.prompts_per_step} prompts with {settings.group_size} answers, "
        f"{format_count(round(answers))} answers in {format_seconds(seconds)}"
    )
    if gaps:
        told["engine and trainer"] = (
            f"differ by {max(gaps):.1e} in log p at most, where both had the same weights "
            f"({format_quantity(len(gaps), 'step')})"
        )
    staleness = f", {sum(stale) / len(stale):.2g} steps stale on average" if any(stale) else ""
    told["placement"] = f"{settings.placement}{staleness}"
    if settings.shuffle_rewards:
        told["rewards"] = "dealt out by chance: a placebo"
    return told


def _charts(rows: Rows, held_out: Sequence[_HeldOut], whole: bool) -> list[LineChart]:
    """Return the curves, most wanted first; those without a point are left out."""

    def curve(name: str, figure: str, scale: float = 1.0) -> ChartLine:
        points = [(row["step"], scale * row[figure]) for row in rows if row.get(figure) is not None]
        return ChartLine(name, points, show_points=len(points) < _FEW)

    scale = 100.0 if whole else 1.0
    amid = list(curve("", "eval_reward", scale).points)
    ends = [(each.step, scale * each.sampled) for each in held_out]
    sampled = sorted(dict([*amid, *ends]).items())
    greedy = [(each.step, scale * each.greedy) for each in held_out]
    parts = dict.fromkeys(name for row in rows for name in row if _PART.fullmatch(name))
    asynchronous = any(row.get("staleness_max") for row in rows)
    every = [
        LineChart(
            "reward",
            (
                curve("trained on", "reward_mean", scale),
                ChartLine("held out", sampled, show_points=True),
                ChartLine("likeliest", greedy, show_points=True),
            ),
            "% of the most" if whole else "",
            y_min=0.0 if whole else None,
        ),
        LineChart(
            "each reward, trained on",
            tuple(curve(name[len("reward_") : -len("_mean")], name) for name in parts),
        ),
        LineChart(
            "engine and trainer, |Δ log p|",
            (curve("largest", "logprob_gap_max"), curve("mean", "logprob_gap_mean")),
            "nats",
            y_min=0.0,
        ),
        LineChart(
            "length of answers",
            (curve("mean", "length_mean"), curve("95th", "length_p95")),
            "tokens",
            y_min=0.0,
        ),
        LineChart(
            "answers and tokens",
            (
                curve("cut off", "truncated_fraction", 100.0),
                curve("tokens clipped", "clip_fraction", 100.0),
            ),
            "%",
            y_min=0.0,
        ),
        LineChart(
            "groups that teach nothing", (curve("silent", "groups_without_signal"),), y_min=0.0
        ),
        LineChart("entropy", (curve("", "entropy"),), "nats", y_min=0.0),
        LineChart("KL to the first weights", (curve("", "kl"),), "nats", y_min=0.0),
        LineChart(
            "staleness",
            (curve("mean", "staleness_mean"), curve("most", "staleness_max")),
            "steps",
            y_min=0.0,
        ),
        LineChart("gradient norm", (curve("", "grad_norm"),), y_min=0.0),
        LineChart(
            "a step",
            (
                curve("in all", "step_s"),
                curve("draws", "generate_s"),
                curve("trains", "train_s"),
                curve("weights", "sync_s"),
            ),
            "s",
            y_min=0.0,
        ),
    ]
    wanted = [each for each in every if each.title != "staleness" or asynchronous]
    return [each for each in wanted if any(line.points for line in each.lines)]


def _spent(folder: Path) -> dict[str, Counter[str]]:
    """Return the seconds of each side by what it did, or waited for."""
    found: dict[str, Counter[str]] = {}
    if not folder.is_dir():
        return found
    from meshwright.timeline import read_timeline

    spans = read_timeline(folder).spans
    columns = (spans.column(name).to_pylist() for name in ("lane", "kind", "name", "duration_ns"))
    for lane, kind, name, duration_ns in zip(*columns, strict=True):
        if lane in _SIDES:
            what = f"waits: {name}" if kind == "wait" else name
            found.setdefault(lane, Counter())[what] += duration_ns / 1e9
    return found


def _time(spent: Mapping[str, Counter[str]]) -> str:
    """Draw where the time of both sides went, to one scale; waits are pale."""
    if not spent:
        return ""
    longest = max(each.total() for each in spent.values())
    names = list(dict.fromkeys(n for each in spent.values() for n in each))
    colours = dict(zip((n for n in names if not _waits(n)), COLORS * len(names), strict=False))
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in [*colours.items(), ("waits", "var(--idle)")]
    )
    bars, told = [], []
    for side, each in spent.items():
        parts = sorted(each.items(), key=lambda item: (_waits(item[0]), -item[1]))
        pieces = "".join(
            f'<i style="background:{colours.get(name, "var(--idle)")};'
            f'width:{100 * seconds / longest:.2f}%" '
            f'title="{escape(name)}: {format_seconds(seconds)}"></i>'
            for name, seconds in parts
        )
        total = each.total()
        bars.append(
            f'<div class="bar"><span>{_SIDES[side]}</span><div>{pieces}</div>'
            f"<span>{format_seconds(total)}</span></div>"
        )
        told += [
            (_SIDES[side], name, format_seconds(seconds), f"{seconds / total:.1%}")
            for name, seconds in parts
        ]
    shown = render_view(make_table("who, what, time, share", told, right="time, share"))
    drawn = f'<div class="legend">{keys}</div><div class="bars">{"".join(bars)}</div>'
    return f"<h2>where the time goes</h2>{drawn}{shown}"


def _waits(name: str) -> bool:
    return name.startswith("waits: ")


def _before_after(transcripts: Rows, whole: bool) -> str:
    """Set the first and the last answers to the same prompts beside each other."""
    steps = sorted({each["step"] for each in transcripts})
    if not steps:
        return ""
    answers = {
        step: {_text(each["prompt"]): each for each in transcripts if each["step"] == step}
        for step in (steps[0], steps[-1])
    }
    before, after = answers[steps[0]], answers[steps[-1]]
    kinds = [kind for kind in _REWARDS if all(kind in each for each in transcripts)]
    names = {"sampled_completion": "sampled", "answer": "greedy"}
    sides = (before, after)
    rows = [
        (prompt, *(_judged(side[prompt], kind, whole) for kind in kinds for side in sides))
        for prompt in before
        if prompt in after
    ]
    columns = [f"{names[kind]}, {word}" for kind in kinds for word in ("before", "after")]
    title = f"answers to held-out prompts before and after {format_quantity(steps[-1], 'step')}"
    found = TableView(columns=("prompt", *columns), rows=tuple(rows), title=title)
    key = "✓ has the whole reward; others are told" if whole else "rewards stand in brackets"
    return render_view(found) + render_view(NoteView(key))


def _judged(answer: Mapping[str, Any], kind: str, whole: bool) -> str:
    reward = answer[_REWARDS[kind]]
    return f"{_text(answer[kind])}  {'✓' if whole and reward == 1 else f'({reward:.4g})'}"


def _text(said: object) -> str:
    return said if isinstance(said, str) else " ".join(map(str, said))  # type: ignore[call-overload]


def _lines(folder: Path, name: str) -> Rows:
    from meshwright.run.train.logging.jsonl import read_rows

    path = folder / name
    return list(read_rows(path)) if path.exists() else []
