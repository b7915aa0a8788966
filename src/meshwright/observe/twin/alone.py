"""The twin of one device: steps of our own trainer as predicted and as measured, term by term."""

import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.observe.twin.kernel_terms import SHOWN, Part, measured_parts, predicted_parts
from meshwright.predict.cost import Calibration
from meshwright.predict.memory import predict_memory
from meshwright.predict.run import Run
from meshwright.predict.software import MESHWRIGHT
from meshwright.predict.step import predict_step
from meshwright.predict.step_terms import step_terms
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.layout.words import words_of
from meshwright.spec.model import Model
from meshwright.spec.work import Work
from meshwright.spec.workload import Training
from meshwright.timeline import Timeline, write

if TYPE_CHECKING:
    from meshwright.run.train.twin.alone import Times

STEP_SHARE = 0.10
"""How far a step may lie from its prediction, as a share of the measured one."""
MEMORY_SHARE = 0.05


PURE: dict[str, Any] = {
    "master_precision": "none",
    "moment_precision": "bf16",
    "gradient_precision": "bf16",
}
"""Weights and moments in bf16: what lets 8B parameters train on one device."""


class Config(NamedTuple):
    """What is run and predicted."""

    model: Model
    layout: Layout
    length: int
    """Tokens of a sequence."""
    sequences: int
    """Sequences of a step."""

    def __str__(self) -> str:
        layout = self.layout
        size = f"{layout.microbatch} × {self.length}"
        if self.sequences > layout.microbatch:
            size = f"{self.sequences // layout.microbatch} × {size}"
        words = [self.model.name, size, layout.precision]
        rest = replace(layout, microbatch=1, global_batch=None, precision=Layout().precision)
        if all(getattr(layout, name) == value for name, value in PURE.items()):
            words.append("bf16 states")
            rest = replace(rest, **{name: getattr(Layout(), name) for name in PURE})
        if layout.recompute == "full":
            words.append("all recomputed")
        elif layout.recompute_ops:
            words.append(f"{' and '.join(layout.recompute_ops)} recomputed")
        if layout.recompute != "selective" or layout.recompute_ops:
            rest = replace(rest, recompute="none", recompute_ops=())
        return ", ".join([*words, *([] if rest == Layout() else [words_of(rest)])])


class Side(NamedTuple):
    """A step, predicted or measured."""

    step_s: float
    memory_bytes: int
    """Most that tensors hold at once; 0 where nobody counts."""
    parts: dict[Part, float]
    """Seconds by kind of work."""


class AloneTwin(NamedTuple):
    """One configuration."""

    config: Config
    predicted: Side
    measured: Side
    steps_s: tuple[float, ...]
    """Of which the measured one is the median."""
    timeline: Timeline

    @property
    def step_error(self) -> float:
        """How much longer the predicted step is, as a share of the measured one."""
        return self.predicted.step_s / self.measured.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """The same of memory; None where it was not measured."""
        measured = self.measured.memory_bytes
        return self.predicted.memory_bytes / measured - 1 if measured else None

    @property
    def agrees(self) -> bool:
        """Whether both are as near as is promised."""
        return abs(self.step_error) <= STEP_SHARE and abs(self.memory_error or 0) <= MEMORY_SHARE

    @property
    def moved(self) -> tuple[Part, float]:
        """The kind of work whose prediction is furthest off, and by how many seconds."""
        off = {part: self.predicted.parts[part] - self.measured.parts[part] for part in SHOWN}
        worst = max(off, key=lambda part: abs(off[part]))
        return worst, off[worst]

    def save(self, folder: Path) -> None:
        """Write the measured timeline."""
        write(self.timeline, folder / "measured")


def predict_alone(config: Config, cluster: Cluster, calibration: Calibration | None = None) -> Side:
    """Return the step of a configuration on one device of a cluster."""
    if config.layout.gpus != 1:
        what = f"has {config.layout.gpus} ranks, and one device is compared"
        raise InputError([Problem("layout", what, "leave out every degree")])
    tokens = config.length * config.sequences
    step = Training(sequence_length=config.length, global_batch=config.sequences, tokens=tokens)
    work = Work(model=config.model, cluster=cluster, layout=config.layout, workload=step)
    run = Run(work, software=MESHWRIGHT, calibration=calibration)
    terms = step_terms(run)
    return Side(
        predict_step(run).step_s,
        predict_memory(run).worst.allocated_bytes,
        predicted_parts(terms.work, terms.gaps_s),
    )


def twin_alone(
    config: Config,
    cluster: Cluster,
    calibration: Calibration | None = None,
    times: "Times | None" = None,
) -> AloneTwin:
    """Predict a configuration, then run it here."""
    from meshwright.run.train.twin.alone import Times, run_alone

    predicted = predict_alone(config, cluster, calibration)
    with tempfile.TemporaryDirectory() as folder:
        found = run_alone(
            config.model,
            config.layout,
            length=config.length,
            sequences=config.sequences,
            folder=Path(folder) / "timeline",
            times=times or Times(),
        )
    parts = measured_parts(found.timeline, found.recorded)
    measured = Side(median(found.steps_s), found.peak_bytes, parts)
    return AloneTwin(config, predicted, measured, found.steps_s, found.timeline)
