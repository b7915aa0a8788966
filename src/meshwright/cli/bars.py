"""The parts of a step and the memory of a rank, as bars drawn with marks and as data.

Marks, not colours, tell parts apart, so a bar reads the same in a pipe.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from meshwright.predict.memory import StageMemory
    from meshwright.predict.step import StepPrediction


class Part(NamedTuple):
    """One thing that a step's time is spent on."""

    mark: str
    name: str
    field: str


STEP_PARTS = (
    Part("█", "compute", "compute_s"),
    Part("▓", "recompute", "recompute_s"),
    Part("▒", "exposed tensor parallel", "tp_s"),
    Part("░", "exposed context parallel", "cp_s"),
    Part("◆", "exposed experts", "ep_s"),
    Part("▸", "exposed pipeline sends", "pp_s"),
    Part("═", "exposed data parallel", "dp_s"),
    Part("▼", "exposed host memory", "offload_s"),
    Part("·", "pipeline bubble", "bubble_s"),
    Part("○", "optimizer", "optimizer_s"),
)
"""Where a step's time goes, in the order it is drawn."""


def stacked(parts: Iterable[tuple[str, float]], whole: float, width: int) -> str:
    """Draw parts one after another on a line where `whole` is `width` marks long."""
    drawn, done = "", 0.0
    for mark, size in parts:
        done += size
        drawn += mark * (round(width * done / whole) - len(drawn))
    return drawn


def step_bar(step: "StepPrediction", whole_s: float, width: int) -> str:
    """Draw a step by its parts."""
    return stacked(((p.mark, getattr(step, p.field)) for p in STEP_PARTS), whole_s, width)


class Held(NamedTuple):
    """What a rank's memory holds, in three heaps."""

    states: int
    activations: int
    rest: int


def held(stage: "StageMemory") -> Held:
    """Return the memory of a stage by heap."""
    states = stage.parameters_bytes + stage.gradients_bytes + stage.optimizer_bytes
    return Held(
        states, stage.activations_bytes, stage.total_bytes - states - stage.activations_bytes
    )


def stage_data(stage: "StageMemory") -> dict[str, int]:
    """Return the memory of a stage for the JSON form."""
    fields = {name: getattr(stage, name) for name in stage.__struct_fields__}
    return {**fields, "total_bytes": stage.total_bytes}


def memory_bar(stage: "StageMemory", capacity_bytes: int, width: int) -> str:
    """Draw a stage's memory against what a GPU has, and how far it goes beyond."""
    drawn = stacked(zip("█▒·", held(stage), strict=True), capacity_bytes, width)
    if stage.total_bytes <= capacity_bytes:
        return f"{drawn:<{width}}|"
    return f"{drawn[:width]}|{stage.total_bytes / capacity_bytes:.1f}×"
