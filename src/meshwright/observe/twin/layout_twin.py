"""`run_layout_twins`: predict every layout from measured parts of this machine, then run it."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.errors import Problem
from meshwright.observe.hardware.machine import describe_other_load
from meshwright.observe.twin.measured_costs import build_measured_costs, disable_recompute
from meshwright.observe.twin.measured_step import add_compute_spans, select_median_step
from meshwright.observe.twin.predicted_step import predict_layout_step
from meshwright.observe.twin.step_comparison import StepComparison, compare_steps
from meshwright.policy.pipeline import build_layout_schedule
from meshwright.predict.step.measured_costs import MeasuredCosts
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.timeline import Timeline, write_timeline

PRECISIONS = ("fp32", "bf16")
MAX_RANKS = 8
NUM_TIMING_ROUNDS = 3
"""How often the parts of a step are timed, eight microbatches each time and way."""


class TwinWorkload(NamedTuple):
    """What is run and predicted, the same for all layouts."""

    model: Model
    seq_len: int
    """Tokens of a sequence."""
    num_sequences: int
    """Sequences of a step, over all replicas."""
    num_steps: int
    """Steps of which the middle one is taken."""
    num_rounds: int = NUM_TIMING_ROUNDS


class LayoutTwin(NamedTuple):
    """One layout, predicted and measured."""

    layout: Layout
    predicted: Timeline
    measured: Timeline
    comparison: StepComparison
    measured_costs: MeasuredCosts
    """What the prediction was made from."""
    other_busy_cores: float | None
    """Cores that others kept busy while it ran, on the mean; None where that is not known."""

    def save(self, folder: Path) -> None:
        """Write both timelines and the calibration."""
        write_timeline(self.predicted, folder / "predicted")
        write_timeline(add_compute_spans(self.measured), folder / "measured")
        text = msgspec.json.format(msgspec.json.encode(self.measured_costs), indent=2)
        (folder / "calibration.json").write_bytes(text + b"\n")


def check_layout(asked: TwinWorkload, layout: Layout) -> list[Problem]:
    """Return what keeps a layout from being run here or from being predicted, each with a fix."""
    from meshwright.run.parallel.compatibility import find_verify_problems

    found = list(
        find_verify_problems(
            asked.model, layout, sequence_length=asked.seq_len, global_batch=asked.num_sequences
        )
    )
    if layout.gpus > MAX_RANKS:
        what = f"has {layout.gpus} ranks, more than the {MAX_RANKS} that are run here"
        found.append(Problem("layout", what, "use smaller degrees"))
    if layout.ep > 1 or layout.effective_expert_tp != layout.tp:
        what = "where tokens go depends on their numbers, so its exchange cannot be timed alone"
        found.append(Problem("ep", what, "leave ep and expert_tp out"))
    if layout.precision not in PRECISIONS:
        what = f"{layout.precision} is not for processors"
        found.append(Problem("precision", what, f"use {' or '.join(PRECISIONS)}"))
    if layout.schedule == "dualpipe" and layout.pp > 1:
        what = "dualpipe adds up the gradients of mirrored ranks, which is not predicted"
        found.append(Problem("schedule", what, "use dualpipe-v"))
    return found


def find_timing_hazards(layouts: Sequence[Layout]) -> list[str]:
    """Return what on this machine, now, makes times differ that a prediction takes to be equal."""
    from meshwright.run.train.profiling.cpu_affinity import count_available_cores

    found, here = [], count_available_cores()
    most = max(layout.gpus for layout in layouts)
    if most > here:
        found.append(
            f"{most} ranks take turns on {here} cores: a pass takes longer while others compute, "
            "and a rank that waits leaves its part to them, which is how they are predicted"
        )
    others = describe_other_load(most)
    return [*found, others] if others else found


def run_layout_twins(
    asked: TwinWorkload, layouts: Sequence[Layout], *, on_done: Callable[[], None] = lambda: None
) -> list[LayoutTwin]:
    """Time the parts of the steps of all layouts, then predict and run each of them.

    `on_done` is told of each calibration and each layout.
    """
    known: dict[Layout, MeasuredCosts] = {}
    for ranks in sorted({layout.gpus for layout in layouts}):
        known |= _calibrated(asked, [one for one in layouts if one.gpus == ranks], ranks)
        on_done()
    found = []
    for layout in layouts:
        found.append(_twin(asked, layout, known[layout]))
        on_done()
    return found


def _calibrated(
    asked: TwinWorkload, layouts: Sequence[Layout], ranks: int
) -> dict[Layout, MeasuredCosts]:
    """Time what the passes of some layouts consist of, each kind once."""
    from meshwright.run.train.profiling.cpu_affinity import count_available_cores
    from meshwright.run.train.profiling.layer_timing import make_timing_layout
    from meshwright.run.train.profiling.multi_rank_steps import (
        LayerTimingOptions,
        time_layers_on_ranks,
    )

    pieces = {layout: make_timing_layout(layout) for layout in layouts}
    kinds = dict.fromkeys(disable_recompute(one) for one in pieces.values())
    kinds |= dict.fromkeys(pieces.values())
    every = list(kinds)
    split = any(_splits(layout, asked.num_sequences) for layout in layouts)
    timed = time_layers_on_ranks(
        asked.model, every, ranks, LayerTimingOptions(asked.seq_len, asked.num_rounds, split)
    )
    here = count_available_cores()
    return {
        layout: build_measured_costs(every, timed, piece, cores=here)
        for layout, piece in pieces.items()
    }


def _splits(layout: Layout, sequences: int) -> bool:
    """Whether some backward is made in two parts."""
    lanes = build_layout_schedule(layout, layout.count_microbatches(sequences)).actions
    return any(action.op == "W" for lane in lanes for action in lane)


def _twin(asked: TwinWorkload, layout: Layout, calibration: MeasuredCosts) -> LayoutTwin:
    from meshwright.run.train.profiling.cpu_affinity import count_available_cores
    from meshwright.run.train.profiling.multi_rank_steps import StepShape, record_steps

    predicted = predict_layout_step(
        asked.model,
        layout,
        calibration,
        length=asked.seq_len,
        sequences=asked.num_sequences,
        cores=count_available_cores(),
    )
    with tempfile.TemporaryDirectory() as folder:
        recorded = record_steps(
            asked.model,
            layout,
            StepShape(asked.seq_len, asked.num_sequences),
            steps=asked.num_steps,
            folder=Path(folder),
        )
    measured = select_median_step(recorded.timeline)
    found = compare_steps(predicted, measured)
    return LayoutTwin(layout, predicted, measured, found, calibration, recorded.other_cores_used)
