"""The screen of one predicted step: what it takes, where it goes, what it holds, what would help.

It fits 80 columns and about 40 lines whatever the layout. It draws; predictions come from outside.
"""

from itertools import pairwise
from typing import NamedTuple

from meshwright.cli.answer import Bar, Facts, Table, View, facts, table
from meshwright.cli.bars import STEP_PARTS, held, memory_bar, step_bar
from meshwright.cli.faults import flag_of
from meshwright.predict.changes import Advice, Change
from meshwright.predict.memory import MemoryPrediction, StageMemory
from meshwright.predict.step import StepPrediction
from meshwright.spec.layout import Layout
from meshwright.spec.units import format_bytes, format_count, format_seconds
from meshwright.spec.work import Work
from meshwright.spec.workload import Training

WIDTH = 78
MOST_STAGES = 6
"""Lines for the memory of the stages; a longer pipeline is folded into so many."""
MOST_NUMBERS = 20
"""Numbers of a list that a flag shows."""
_GIB = 2.0**30


class Predicted(NamedTuple):
    """Everything that the screen shows of one work."""

    work: Work
    workload: Training
    step: StepPrediction
    executed: str
    """What executing the schedule event by event gave, in words."""
    memory: MemoryPrediction
    dollars: float | None
    """For a trillion tokens."""
    weeks: str
    """What all tokens take, in words; empty where nobody said how many."""
    advice: Advice
    costs: str
    """Where the constants of the device come from."""


def screen(predicted: Predicted) -> tuple[View, ...]:
    """Return the views of the screen, top to bottom."""
    step = predicted.step
    return (
        _summary(predicted),
        Bar(step_bar(step, step.step_s, WIDTH), title="where the step goes"),
        _parts(step),
        _stages(predicted.memory),
        _changes(predicted.advice, predicted.memory),
    )


def _summary(predicted: Predicted) -> Facts:
    work, workload, step = predicted.work, predicted.workload, predicted.step
    memory, gpus = predicted.memory, work.layout.gpus
    worst, free = memory.worst, memory.capacity_bytes - memory.worst.total_bytes
    left = f"{format_bytes(abs(free))} {'free' if memory.fits else 'too much'}"
    batch = f"{workload.global_batch:,} × {workload.sequence_length:,} tokens"
    hourly = work.cluster.price_per_gpu_hour
    return facts(
        {
            "work": f"{work.model.name} on {gpus:,} × {work.cluster.gpu.title}",
            "layout": layout_words(work.layout),
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
            "whole run": predicted.weeks,
            "costs": predicted.costs,
        }
    )


def layout_words(layout: Layout) -> str:
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


def _parts(step: StepPrediction) -> Facts:
    spent = {part: getattr(step, part.field) for part in STEP_PARTS}
    return facts(
        {
            f"{part.mark} {part.name}": f"{format_seconds(seconds):>8}"
            f"  {seconds / step.step_s:>6.1%}"
            for part, seconds in spent.items()
            if seconds > 0
        }
    )


def _stages(memory: MemoryPrediction) -> Table:
    rows = []
    for group in _folded(memory.stages):
        fullest = max(group, key=lambda stage: stage.total_bytes)
        heaps = held(fullest)
        free = memory.capacity_bytes - fullest.total_bytes
        rows.append(
            (
                _range(group) + ("*" if memory.worst in group else ""),
                fullest.layers,
                *(f"{heap / _GIB:.1f}" for heap in heaps),
                f"{fullest.total_bytes / _GIB:.1f}",
                f"{free / _GIB:.1f}",
                memory_bar(fullest, memory.capacity_bytes, 16),
            )
        )
    title = f"GiB of {memory.capacity_bytes / _GIB:.1f} on one rank (* the worst"
    title += "; of several stages, the fullest)" if len(rows) < len(memory.stages) else ")"
    numbers = "layers, █ states, ▒ acts, · other, total, free"
    return table(f"stage, {numbers}, of GPU", rows, title, right=f"stage, {numbers}", bars="of GPU")


def _folded(stages: tuple[StageMemory, ...]) -> list[list[StageMemory]]:
    """Group neighbouring stages: those alike, and where still too many, in even runs."""
    groups: list[list[StageMemory]] = []
    for stage in stages:
        if groups and _alike(groups[-1][0], stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    if len(groups) <= MOST_STAGES:
        return groups
    cuts = [len(groups) * index // MOST_STAGES for index in range(MOST_STAGES + 1)]
    return [
        [stage for group in groups[first:last] for stage in group] for first, last in pairwise(cuts)
    ]


def _alike(one: StageMemory, other: StageMemory) -> bool:
    return (one.layers, one.total_bytes) == (other.layers, other.total_bytes)


def _range(group: list[StageMemory]) -> str:
    first, last = group[0].stage, group[-1].stage
    return str(first) if first == last else f"{first}–{last}"


def _changes(advice: Advice, memory: MemoryPrediction) -> View:
    if not advice.best:
        return facts({"changes": "none near this layout is predicted to be faster and to fit"})
    rows = [(number, *_change_row(change)) for number, change in enumerate(advice.best, start=1)]
    if advice.together is not None:
        numbers = " + ".join(str(1 + advice.best.index(change)) for change in advice.joined)
        together = _change_row(advice.together)
        rows.append(("", *together[:3], numbers + _remark(advice.together), ""))
    title = "changes that would help most"
    if not memory.fits:
        title = "changes that would make it fit, and then faster (! still too much)"
    columns = " , saves, step, GiB, change, flags"
    return table(columns, rows, title, right="saves, step, GiB", wide="change, flags")


def _change_row(change: Change) -> tuple[str, ...]:
    return (
        f"{change.gain:.1%}",
        format_seconds(change.step.step_s),
        f"{change.memory.worst.total_bytes / _GIB:.1f}{'' if change.memory.fits else '!'}",
        change.what + _remark(change),
        " ".join(_flag(*field) for field in change.fields.items()),
    )


def _flag(name: str, value: object) -> str:
    """Write a flag; a list too long for the screen is cut here and whole in the JSON form."""
    if isinstance(value, tuple) and len(value) > MOST_NUMBERS:
        value = (*value[:2], "…", *value[-2:])
    return flag_of(name, value)


def _remark(change: Change) -> str:
    return " (other rounding)" if change.changes_numerics else ""
