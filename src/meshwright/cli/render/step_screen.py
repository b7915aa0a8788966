"""The screen of one predicted step: what it takes, where it goes, what it holds, what would help.

It fits 80 columns and about 40 lines whatever the layout. It draws; predictions come from outside.
"""

from itertools import pairwise
from typing import NamedTuple

from meshwright.cli.flags.problems import format_flag
from meshwright.cli.render.step_bars import (
    STEP_SEGMENTS,
    draw_memory_bar,
    draw_step_bar,
    sum_stage_memory,
)
from meshwright.cli.result import BarView, FieldsView, TableView, View, make_fields, make_table
from meshwright.predict.memory.memory_prediction import MemoryPrediction, StageMemory
from meshwright.predict.step.step_prediction import StepPrediction
from meshwright.predict.whatif.layout_suggestions import LayoutSuggestion, LayoutSuggestions
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.units import format_bytes, format_count, format_seconds
from meshwright.spec.workload import TrainingWorkload

WIDTH = 78
MAX_STAGES = 6
"""Lines for the memory of the stages; a longer pipeline is folded into so many."""
MAX_NUMBERS = 20
"""Numbers of a list that a flag shows."""
_GIB = 2.0**30


class StepReport(NamedTuple):
    """Everything that the screen shows of one work."""

    work: JobSpec
    workload: TrainingWorkload
    step: StepPrediction
    executed: str
    """What executing the schedule event by event gave, in words."""
    memory: MemoryPrediction
    dollars: float | None
    """For a trillion tokens."""
    long_run: str
    """What all tokens take, in words; empty where nobody said how many."""
    advice: LayoutSuggestions
    cost_source: str
    """Where the constants of the device come from."""


def render_step(predicted: StepReport) -> tuple[View, ...]:
    """Return the views of the screen, top to bottom."""
    step = predicted.step
    return (
        _summary(predicted),
        BarView(draw_step_bar(step, step.step_s, WIDTH), title="where the step goes"),
        _parts(step),
        _stages(predicted.memory),
        _changes(predicted.advice, predicted.memory),
    )


def _summary(predicted: StepReport) -> FieldsView:
    work, workload, step = predicted.work, predicted.workload, predicted.step
    memory, gpus = predicted.memory, work.layout.gpus
    worst, free = memory.worst_stage, memory.capacity_bytes - memory.worst_stage.total_bytes
    left = f"{format_bytes(abs(free))} {'free' if memory.fits else 'too much'}"
    batch = f"{workload.global_batch:,} × {workload.sequence_length:,} tokens"
    hourly = work.cluster.price_per_gpu_hour
    return make_fields(
        {
            "work": f"{work.model.name} on {gpus:,} × {work.cluster.gpu.title}",
            "layout": format_layout(work.layout),
            "step": f"{format_seconds(step.step_s)} for {batch}",
            "interval": f"{format_seconds(step.low_s)} to {format_seconds(step.high_s)}; "
            "nine of ten published steps lie in theirs",
            "executed": predicted.executed,
            "throughput": f"{format_count(step.tokens_per_s)} tokens/s, "
            f"{format_count(step.tokens_per_s / gpus)} per GPU",
            "MFU": f"{step.mfu:.1%} of the {work.layout.precision} peak",
            "memory": f"{format_bytes(worst.total_bytes)} of "
            f"{format_bytes(memory.capacity_bytes)} on stage {worst.stage}, {left}",
            "price": None
            if predicted.dollars is None
            else f"${format_count(predicted.dollars)} per trillion tokens "
            f"at ${hourly:.2f} per GPU and hour",
            "whole run": predicted.long_run,
            "costs": predicted.cost_source,
        }
    )


def format_layout(layout: Layout) -> str:
    """Say a layout in a line: the degrees above one and what else shapes a step."""
    words = []
    for axis in ("tp", "cp", "pp", "dp", "ep"):
        degree = getattr(layout, axis)
        if axis == "tp" and layout.sequence_parallel:
            words.append(f"tp {degree} + sp")
        elif axis == "pp" and degree > 1:
            chunks = f" × {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
            words.append(f"pp {degree} ({layout.schedule}{chunks})")
        elif degree > 1:
            words.append(f"{axis} {degree}")
    words += [f"ZeRO {layout.zero}"] if layout.zero else []
    words += [f"{layout.recompute} recompute"] if layout.recompute != "none" else []
    words += [f"{' + '.join(layout.offload)} in host memory"] if layout.offload else []
    return ", ".join([*words, layout.precision, f"microbatch {layout.microbatch}"])


def _parts(step: StepPrediction) -> FieldsView:
    spent = {part: getattr(step, part.field) for part in STEP_SEGMENTS}
    return make_fields(
        {
            f"{part.mark} {part.name}": f"{format_seconds(seconds):>8}"
            f"  {seconds / step.step_s:>6.1%}"
            for part, seconds in spent.items()
            if seconds > 0
        }
    )


def _stages(memory: MemoryPrediction) -> TableView:
    rows = []
    for group in _folded(memory.stages):
        fullest = max(group, key=lambda stage: stage.total_bytes)
        heaps = sum_stage_memory(fullest)
        free = memory.capacity_bytes - fullest.total_bytes
        rows.append(
            (
                _range(group) + ("*" if memory.worst_stage in group else ""),
                fullest.layers,
                *(f"{heap / _GIB:.1f}" for heap in heaps),
                f"{fullest.total_bytes / _GIB:.1f}",
                f"{free / _GIB:.1f}",
                draw_memory_bar(fullest, memory.capacity_bytes, 16),
            )
        )
    title = f"GiB of {memory.capacity_bytes / _GIB:.1f} on one rank (* the worst"
    title += "; of several stages, the fullest)" if len(rows) < len(memory.stages) else ")"
    numbers = "layers, █ states, ▒ acts, · other, total, free"
    return make_table(
        f"stage, {numbers}, of GPU", rows, title, right=f"stage, {numbers}", bars="of GPU"
    )


def _folded(stages: tuple[StageMemory, ...]) -> list[list[StageMemory]]:
    """Group neighbouring stages: those alike, and where still too many, in even runs."""
    groups: list[list[StageMemory]] = []
    for stage in stages:
        if groups and _alike(groups[-1][0], stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    if len(groups) <= MAX_STAGES:
        return groups
    cuts = [len(groups) * index // MAX_STAGES for index in range(MAX_STAGES + 1)]
    return [
        [stage for group in groups[first:last] for stage in group] for first, last in pairwise(cuts)
    ]


def _alike(one: StageMemory, other: StageMemory) -> bool:
    return (one.layers, one.total_bytes) == (other.layers, other.total_bytes)


def _range(group: list[StageMemory]) -> str:
    first, last = group[0].stage, group[-1].stage
    return str(first) if first == last else f"{first}–{last}"


def _changes(advice: LayoutSuggestions, memory: MemoryPrediction) -> View:
    if not advice.best:
        return make_fields(
            {"changes": "none near this layout is predicted to be faster and to fit"}
        )
    rows = [(number, *_change_row(change)) for number, change in enumerate(advice.best, start=1)]
    if advice.combined_gain is not None:
        numbers = " + ".join(
            str(1 + advice.best.index(change)) for change in advice.combined_changes
        )
        together = _change_row(advice.combined_gain)
        rows.append(("", *together[:3], numbers + _remark(advice.combined_gain), ""))
    title = "changes that would help most"
    if not memory.fits:
        title = "changes that would make it fit, and then faster (! still too much)"
    columns = " , saves, step, GiB, change, flags"
    return make_table(columns, rows, title, right="saves, step, GiB", wide="change, flags")


def _change_row(change: LayoutSuggestion) -> tuple[str, ...]:
    return (
        f"{change.gain:.1%}",
        format_seconds(change.step.step_s),
        f"{change.memory.worst_stage.total_bytes / _GIB:.1f}{'' if change.memory.fits else '!'}",
        change.description + _remark(change),
        " ".join(_flag(*field) for field in change.fields.items()),
    )


def _flag(name: str, value: object) -> str:
    """Write a flag; a list too long for the screen is cut here and whole in the JSON form."""
    if isinstance(value, tuple) and len(value) > MAX_NUMBERS:
        value = (*value[:2], "…", *value[-2:])
    return format_flag(name, value)


def _remark(change: LayoutSuggestion) -> str:
    return " (other rounding)" if change.changes_numerics else ""
