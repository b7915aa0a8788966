"""The twin of one device: steps of our own trainer as predicted and as measured, term by term."""

import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.device_time.kernel_classes import StepTimeKind
from meshwright.observe.twin.step_breakdown import (
    SHOWN_KINDS,
    measure_step_breakdown,
    predict_step_breakdown,
)
from meshwright.predict.cost import Calibration
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.step.step_breakdown import break_down_step
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.training_run.training_framework import MESHWRIGHT
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.cluster import Cluster
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout_names import describe_layout
from meshwright.spec.model import Model
from meshwright.spec.workload import TrainingWorkload
from meshwright.timeline import Timeline, write_timeline

if TYPE_CHECKING:
    from meshwright.run.train.profiling.single_device_steps import TimingBudget

MAX_STEP_ERROR = 0.10
"""How far a step may lie from its prediction, as a share of the measured one."""
MAX_MEMORY_ERROR = 0.05


PURE_BF16: dict[str, Any] = {
    "master_precision": "none",
    "moment_precision": "bf16",
    "gradient_precision": "bf16",
}
"""Weights and moments in bf16: what lets 8B parameters train on one device."""


class TwinConfig(NamedTuple):
    """What is run and predicted."""

    model: Model
    layout: Layout
    seq_len: int
    """Tokens of a sequence."""
    num_sequences: int
    """Sequences of a step."""

    def __str__(self) -> str:
        layout = self.layout
        size = f"{layout.microbatch} × {self.seq_len}"
        if self.num_sequences > layout.microbatch:
            size = f"{self.num_sequences // layout.microbatch} × {size}"
        words = [self.model.name, size, layout.precision]
        rest = replace(layout, microbatch=1, global_batch=None, precision=Layout().precision)
        if all(getattr(layout, name) == value for name, value in PURE_BF16.items()):
            words.append("bf16 states")
            rest = replace(rest, **{name: getattr(Layout(), name) for name in PURE_BF16})
        if layout.recompute == "full":
            words.append("all recomputed")
        elif layout.recompute_ops:
            words.append(f"{' and '.join(layout.recompute_ops)} recomputed")
        if layout.recompute != "selective" or layout.recompute_ops:
            rest = replace(rest, recompute="none", recompute_ops=())
        return ", ".join([*words, *([] if rest == Layout() else [describe_layout(rest)])])


class TwinStep(NamedTuple):
    """A step, predicted or measured."""

    step_s: float
    peak_memory_bytes: int
    """Most that tensors hold at once; 0 where nobody counts."""
    step_breakdown: dict[StepTimeKind, float]
    """Seconds by kind of work."""


class DeviceTwin(NamedTuple):
    """One configuration."""

    config: TwinConfig
    predicted: TwinStep
    measured: TwinStep
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
        measured = self.measured.peak_memory_bytes
        return self.predicted.peak_memory_bytes / measured - 1 if measured else None

    @property
    def is_within_tolerance(self) -> bool:
        """Whether both are as near as is promised."""
        return (
            abs(self.step_error) <= MAX_STEP_ERROR
            and abs(self.memory_error or 0) <= MAX_MEMORY_ERROR
        )

    @property
    def largest_error(self) -> tuple[StepTimeKind, float]:
        """The kind of work whose prediction is furthest off, and by how many seconds."""
        off = {
            part: self.predicted.step_breakdown[part] - self.measured.step_breakdown[part]
            for part in SHOWN_KINDS
        }
        worst = max(off, key=lambda part: abs(off[part]))
        return worst, off[worst]

    def save(self, folder: Path) -> None:
        """Write the measured timeline."""
        write_timeline(self.timeline, folder / "measured")


def predict_device_step(
    config: TwinConfig, cluster: Cluster, calibration: Calibration | None = None
) -> TwinStep:
    """Return the step of a configuration on one device of a cluster."""
    if config.layout.gpus != 1:
        what = f"has {config.layout.gpus} ranks, and one device is compared"
        raise InputError([Problem("layout", what, "leave out every degree")])
    tokens = config.seq_len * config.num_sequences
    step = TrainingWorkload(
        sequence_length=config.seq_len, global_batch=config.num_sequences, tokens=tokens
    )
    work = JobSpec(model=config.model, cluster=cluster, layout=config.layout, workload=step)
    run = TrainingRun(work, framework=MESHWRIGHT, calibration=calibration)
    terms = break_down_step(run)
    return TwinStep(
        predict_step(run).step_s,
        predict_memory(run).worst_stage.allocated_bytes,
        predict_step_breakdown(terms.kernels_s, terms.launch_gaps_s),
    )


def run_device_twin(
    config: TwinConfig,
    cluster: Cluster,
    calibration: Calibration | None = None,
    times: "TimingBudget | None" = None,
) -> DeviceTwin:
    """Predict a configuration, then run it here."""
    from meshwright.run.train.profiling.single_device_steps import TimingBudget, time_single_device

    predicted = predict_device_step(config, cluster, calibration)
    with tempfile.TemporaryDirectory() as folder:
        found = time_single_device(
            config.model,
            config.layout,
            length=config.seq_len,
            sequences=config.num_sequences,
            folder=Path(folder) / "timeline",
            times=times or TimingBudget(),
        )
    parts = measure_step_breakdown(found.timeline, found.profiled_steps)
    measured = TwinStep(median(found.step_times_s), found.peak_bytes, parts)
    return DeviceTwin(config, predicted, measured, found.step_times_s, found.timeline)
