"""`Run`: everything the cost functions need to know of one training step."""

from functools import cached_property

from meshwright.predict.constants import CONSTANTS, StepConstants
from meshwright.predict.cost import Calibration, DeviceCosts, costs_for
from meshwright.predict.cost.device import slowed
from meshwright.predict.software import MEGATRON, Software
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model


class Run:
    """One training step: model, cluster, layout, sequence length and batch, and the software."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        layout: Layout,
        *,
        length: int,
        batch: int,
        software: Software = MEGATRON,
        constants: StepConstants = CONSTANTS,
        calibration: Calibration | None = None,
        frozen: bool = False,
    ) -> None:
        self.model, self.cluster, self.layout = model, cluster, layout
        self.length, self.batch = length, batch
        self.software, self.constants = software, constants
        self.frozen = frozen
        """Whether the model's own weights are frozen (LoRA): no weight gradients."""
        passes = {
            "fused": 1.0,
            "partly": constants.partly_elementwise,
            "eager": constants.eager_elementwise,
        }[software.fusion]
        self.costs: DeviceCosts = slowed(
            costs_for(cluster.gpu, calibration), constants.sustained, passes
        )

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
