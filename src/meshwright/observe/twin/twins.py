"""`twins`: every layout predicted from the measured parts of this machine, then run on it."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.errors import Problem
from meshwright.observe.bench.host import others_here
from meshwright.observe.twin.calibration import measured_of, without_recompute
from meshwright.observe.twin.compare import Comparison, compare
from meshwright.observe.twin.computing import with_compute
from meshwright.observe.twin.middle import middle_step
from meshwright.observe.twin.prediction import predict
from meshwright.policy.pipeline import for_layout
from meshwright.predict.measured import Measured
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.timeline import Timeline, write

PRECISIONS = ("fp32", "bf16")
MOST_RANKS = 8
ROUNDS = 3
"""How often the parts of a step are timed, eight microbatches each time and way."""


class Asked(NamedTuple):
    """What is run and predicted, the same for all layouts."""

    model: Model
    length: int
    """Tokens of a sequence."""
    sequences: int
    """Sequences of a step, over all replicas."""
    steps: int
    """Steps of which the middle one is taken."""
    rounds: int = ROUNDS


class Twin(NamedTuple):
    """One layout, predicted and measured."""

    layout: Layout
    predicted: Timeline
    measured: Timeline
    comparison: Comparison
    calibration: Measured
    """What the prediction was made from."""
    beside: float | None
    """Cores that others kept busy while it ran, on the mean; None where that is not known."""

    def save(self, folder: Path) -> None:
        """Write both timelines and the calibration."""
        write(self.predicted, folder / "predicted")
        write(with_compute(self.measured), folder / "measured")
        text = msgspec.json.format(msgspec.json.encode(self.calibration), indent=2)
        (folder / "calibration.json").write_bytes(text + b"\n")


def problems_of(asked: Asked, layout: Layout) -> list[Problem]:
    """Return what keeps a layout from being run here or from being predicted, each with a fix."""
    from meshwright.run.parallel.verify.fit import problems_of as unfit

    found = list(unfit(asked.model, layout, sequence=asked.length, sequences=asked.sequences))
    if layout.gpus > MOST_RANKS:
        what = f"has {layout.gpus} ranks, more than the {MOST_RANKS} that are run here"
        found.append(Problem("layout", what, "use smaller degrees"))
    if layout.ep > 1 or layout.experts_tp != layout.tp:
        what = "where tokens go depends on their numbers, so its exchange cannot be timed alone"
        found.append(Problem("ep", what, "leave ep and expert_tp out"))
    if layout.precision not in PRECISIONS:
        what = f"{layout.precision} is not for processors"
        found.append(Problem("precision", what, f"use {' or '.join(PRECISIONS)}"))
    if layout.schedule == "dualpipe" and layout.pp > 1:
        what = "dualpipe adds up the gradients of mirrored ranks, which is not predicted"
        found.append(Problem("schedule", what, "use dualpipe-v"))
    return found


def doubts(layouts: Sequence[Layout]) -> list[str]:
    """Return what on this machine, now, makes times differ that a prediction takes to be equal."""
    from meshwright.run.train.twin.own_cores import cores

    found, here = [], cores()
    most = max(layout.gpus for layout in layouts)
    if most > here:
        found.append(
            f"{most} ranks take turns on {here} cores: a pass takes longer while others compute, "
            "and a rank that waits leaves its part to them, which is how they are predicted"
        )
    others = others_here(most)
    return [*found, others] if others else found


def twins(
    asked: Asked, layouts: Sequence[Layout], *, on_done: Callable[[], None] = lambda: None
) -> list[Twin]:
    """Time the parts of the steps of all layouts, then predict and run each of them.

    `on_done` is told of each calibration and each layout.
    """
    known: dict[Layout, Measured] = {}
    for ranks in sorted({layout.gpus for layout in layouts}):
        known |= _calibrated(asked, [one for one in layouts if one.gpus == ranks], ranks)
        on_done()
    found = []
    for layout in layouts:
        found.append(_twin(asked, layout, known[layout]))
        on_done()
    return found


def _calibrated(asked: Asked, layouts: Sequence[Layout], ranks: int) -> dict[Layout, Measured]:
    """Time what the passes of some layouts consist of, each kind once."""
    from meshwright.run.train.twin.own_cores import cores
    from meshwright.run.train.twin.pieces import piece_layout
    from meshwright.run.train.twin.steps import Pieces, time_pieces

    pieces = {layout: piece_layout(layout) for layout in layouts}
    kinds = dict.fromkeys(without_recompute(one) for one in pieces.values())
    kinds |= dict.fromkeys(pieces.values())
    every = list(kinds)
    split = any(_splits(layout, asked.sequences) for layout in layouts)
    timed = time_pieces(asked.model, every, ranks, Pieces(asked.length, asked.rounds, split))
    here = cores()
    return {
        layout: measured_of(every, timed, piece, cores=here) for layout, piece in pieces.items()
    }


def _splits(layout: Layout, sequences: int) -> bool:
    """Whether some backward is made in two parts."""
    lanes = for_layout(layout, layout.microbatches(sequences)).actions
    return any(action.op == "W" for lane in lanes for action in lane)


def _twin(asked: Asked, layout: Layout, calibration: Measured) -> Twin:
    from meshwright.run.train.twin.own_cores import cores
    from meshwright.run.train.twin.steps import Shape, record_steps

    predicted = predict(
        asked.model,
        layout,
        calibration,
        length=asked.length,
        sequences=asked.sequences,
        cores=cores(),
    )
    with tempfile.TemporaryDirectory() as folder:
        recorded = record_steps(
            asked.model,
            layout,
            Shape(asked.length, asked.sequences),
            steps=asked.steps,
            folder=Path(folder),
        )
    measured = middle_step(recorded.timeline)
    found = compare(predicted, measured)
    return Twin(layout, predicted, measured, found, calibration, recorded.beside)
