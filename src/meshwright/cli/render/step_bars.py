"""The parts of a step and the memory of a rank, as bars drawn with marks and as data.

Marks, not colours, tell parts apart, so a bar reads the same in a pipe.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from meshwright.predict.memory.memory_prediction import StageMemory
    from meshwright.predict.step.step_prediction import StepPrediction


class StepBarSegment(NamedTuple):
    """One thing that a step's time is spent on."""

    mark: str
    name: str
    field: str


STEP_SEGMENTS = (
    StepBarSegment("█", "compute", "compute_s"),
    StepBarSegment("▓", "recompute", "recompute_s"),
    StepBarSegment("▒", "exposed tensor parallel", "tp_s"),
    StepBarSegment("░", "exposed context parallel", "cp_s"),
    StepBarSegment("◆", "exposed experts", "ep_s"),
    StepBarSegment("▸", "exposed pipeline sends", "pp_s"),
    StepBarSegment("═", "exposed data parallel", "dp_s"),
    StepBarSegment("▼", "exposed host memory", "offload_s"),
    StepBarSegment("·", "pipeline bubble", "bubble_s"),
    StepBarSegment("○", "optimizer", "optimizer_s"),
)
"""Where a step's time goes, in the order it is drawn."""


def draw_stacked_bar(parts: Iterable[tuple[str, float]], whole: float, width: int) -> str:
    """Draw parts one after another on a line where `whole` is `width` marks long."""
    drawn, done = "", 0.0
    for mark, size in parts:
        done += size
        drawn += mark * (round(width * done / whole) - len(drawn))
    return drawn


def draw_step_bar(step: "StepPrediction", whole_s: float, width: int) -> str:
    """Draw a step by its parts."""
    return draw_stacked_bar(
        ((p.mark, getattr(step, p.field)) for p in STEP_SEGMENTS), whole_s, width
    )


class MemoryBreakdown(NamedTuple):
    """What a rank's memory holds, in three heaps."""

    model_state_bytes: int
    activation_bytes: int
    other_bytes: int


def sum_stage_memory(stage: "StageMemory") -> MemoryBreakdown:
    """Return the memory of a stage by heap."""
    states = stage.parameters_bytes + stage.gradients_bytes + stage.optimizer_bytes
    return MemoryBreakdown(
        states, stage.activations_bytes, stage.total_bytes - states - stage.activations_bytes
    )


def stage_to_data(stage: "StageMemory") -> dict[str, int]:
    """Return the memory of a stage for the JSON form."""
    fields = {name: getattr(stage, name) for name in stage.__struct_fields__}
    return {**fields, "total_bytes": stage.total_bytes}


def draw_memory_bar(stage: "StageMemory", capacity_bytes: int, width: int) -> str:
    """Draw a stage's memory against what a GPU has, and how far it goes beyond."""
    drawn = draw_stacked_bar(
        zip("█▒·", sum_stage_memory(stage), strict=True), capacity_bytes, width
    )
    if stage.total_bytes <= capacity_bytes:
        return f"{drawn:<{width}}|"
    return f"{drawn[:width]}|{stage.total_bytes / capacity_bytes:.1f}×"
