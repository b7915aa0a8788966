"""`Run`: a `Work` as the cost functions see it: one training step on one kind of software."""

from functools import cached_property

from meshwright.errors import InputError, Problem
from meshwright.predict.constants import CONSTANTS, StepConstants
from meshwright.predict.cost import Calibration, DeviceCosts, costs_for
from meshwright.predict.cost.device import slowed
from meshwright.predict.software import MEGATRON, Software
from meshwright.spec.work import Work
from meshwright.spec.workload import Training


class Run:
    """One training step of some work, and what the software makes of the hardware."""

    def __init__(
        self,
        work: Work,
        *,
        software: Software = MEGATRON,
        constants: StepConstants = CONSTANTS,
        calibration: Calibration | None = None,
        frozen: bool = False,
    ) -> None:
        if not isinstance(work.workload, Training):
            what, fix = "a training step needs a training workload", "give a Training"
            raise InputError([Problem("workload", what, fix)])
        self.model, self.cluster, self.layout = work.model, work.cluster, work.layout
        self.length = work.workload.sequence_length
        self.batch = work.workload.global_batch
        self.software, self.constants = software, constants
        self.frozen = frozen
        """Whether the model's own weights are frozen (LoRA): no weight gradients."""
        self._calibration = calibration

    @cached_property
    def costs(self) -> DeviceCosts:
        """What operations cost on this device under load."""
        passes = {
            "fused": 1.0,
            "partly": self.constants.partly_elementwise,
            "eager": self.constants.eager_elementwise,
        }[self.software.fusion]
        known = costs_for(self.cluster.gpu, self._calibration)
        return slowed(known, self.constants.sustained, passes)

    @cached_property
    def tokens(self) -> int:
        """Tokens one rank computes in a microbatch: its context-parallel share."""
        return max(1, self.layout.microbatch * self.length // self.layout.cp)

    @cached_property
    def local_tokens(self) -> int:
        """Tokens it holds between blocks: fewer where tensor ranks split the sequence."""
        return (
            max(1, self.tokens // self.layout.tp) if self.layout.sequence_parallel else self.tokens
        )

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of one replica in a step."""
        return max(1, self.layout.microbatches(self.batch))
