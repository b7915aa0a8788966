"""`PlanQuestion`: what a plan is asked for, and which layouts may answer it.

A `LayoutSpace` says for every field of a `Layout` which values may be chosen. Fields that change
results and not just speed (precision, optimizer, formats of states) stay as the user's own layout
has them unless more is allowed, and so does what is kept in host memory.
"""

from functools import cached_property

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.cost import Calibration, DeviceCosts
from meshwright.predict.plan.question.layout_space import LayoutSpace
from meshwright.predict.training_run.training_framework import MEGATRON, TrainingFramework
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.cluster import Cluster
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import Offload
from meshwright.spec.model import Model
from meshwright.spec.workload import TrainingWorkload

OFFLOADS: tuple[tuple[Offload, ...], ...] = (
    (),
    ("activations",),
    ("optimizer",),
    ("activations", "optimizer"),
    ("gradients", "optimizer"),
    ("activations", "gradients", "optimizer"),
    ("gradients", "optimizer", "parameters"),
    ("activations", "gradients", "optimizer", "parameters"),
)
"""What trainers keep in host memory together: what is updated there goes there first."""


class PlanQuestion(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A model to train on some GPUs, and the layouts that may do it."""

    model: Model
    cluster: Cluster
    """As large as the run: all its GPUs are used."""
    workload: TrainingWorkload
    space: LayoutSpace = LayoutSpace()
    framework: TrainingFramework = MEGATRON
    calibration: Calibration | None = None
    """What was measured on the GPUs, in place of their default constants."""

    def __post_init__(self) -> None:
        share = self.space.max_memory
        if not 0 < share <= 1:
            what = f"{share} is not a share of a GPU's memory"
            raise InputError([Problem("max_memory", what, "use a number from 0 to 1, like 0.92")])

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        return self.cluster.gpus

    @cached_property
    def usable_cluster(self) -> Cluster:
        """The cluster with as much memory in each GPU as may be used."""
        if self.space.max_memory == 1:
            return self.cluster
        room = round(self.cluster.gpu.memory_bytes * self.space.max_memory)
        gpu = msgspec.structs.replace(self.cluster.gpu, memory_bytes=room)
        return msgspec.structs.replace(self.cluster, gpu=gpu)

    def build_job(self, layout: Layout) -> JobSpec:
        """Return the work that a layout of this question does."""
        return JobSpec(
            model=self.model, cluster=self.usable_cluster, layout=layout, workload=self.workload
        )

    def build_run(self, layout: Layout) -> TrainingRun:
        """Return one step of a layout as the cost functions see it."""
        run = TrainingRun(
            self.build_job(layout), framework=self.framework, calibration=self.calibration
        )
        run.__dict__["costs"] = self._costs  # the same for every layout of a question
        return run

    @cached_property
    def _costs(self) -> DeviceCosts:
        return TrainingRun(
            self.build_job(Layout()), framework=self.framework, calibration=self.calibration
        ).device_costs
