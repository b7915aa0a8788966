"""`TrainingRun`: a `JobSpec` as the cost functions see it: one training step of one framework."""

from functools import cached_property
from typing import TYPE_CHECKING

from meshwright.errors import InputError, Problem
from meshwright.predict.cost import Calibration, DeviceCosts, build_device_costs
from meshwright.predict.cost.device_costs import find_closest_device, scale_costs
from meshwright.predict.cost.gemm_rate import INPUT_BYTES
from meshwright.predict.training_run.step_constants import STEP_CONSTANTS, StepConstants
from meshwright.predict.training_run.training_framework import MEGATRON, TrainingFramework
from meshwright.spec import catalog
from meshwright.spec.cluster import Gpu
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.model import Model, MoESpec
from meshwright.spec.workload import LoRASpec, TrainingWorkload

if TYPE_CHECKING:
    from meshwright.predict.step.measured_costs import MeasuredCosts


class TrainingRun:
    """One training step of some work, and what the software makes of the hardware."""

    def __init__(
        self,
        work: JobSpec,
        *,
        framework: TrainingFramework = MEGATRON,
        constants: StepConstants = STEP_CONSTANTS,
        calibration: Calibration | None = None,
        measured: "MeasuredCosts | None" = None,
    ) -> None:
        """`measured` has the parts of a step as a machine was seen to take them, for prices."""
        if not isinstance(work.workload, TrainingWorkload):
            what, fix = "a training step needs a training workload", "give a Training"
            raise InputError([Problem("workload", what, fix)])
        self.model, self.cluster, self.layout = work.model, work.cluster, work.layout
        self.sequence_length = work.workload.sequence_length
        self.global_batch = work.workload.global_batch
        self.framework, self.constants, self.measured = framework, constants, measured
        self.adapter = work.workload.adapter
        """What is trained beside frozen weights, where they are."""
        self._imbalance = work.workload.expert_imbalance
        self.calibration = calibration
        """What was measured on the device, in place of its default constants."""
        if self.adapter is not None:
            _require_targets(self.adapter, self.model)

    @property
    def frozen(self) -> bool:
        """Whether the model's own weights are frozen (LoRA): only adapters have gradients."""
        return self.adapter is not None

    def expert_load(self, experts: MoESpec) -> float:
        """Return the tokens that the busiest rank's experts get, over the mean of all ranks.

        A token visits an expert once, so a rank gets at most one copy of it for each of its
        experts: the busiest of few ranks, or of ranks with few experts, cannot get more.
        """
        ep = self.layout.ep
        if self._imbalance == 1 or ep == 1:
            return 1.0
        local = max(1, experts.count // ep)
        return max(1.0, min(self._imbalance, ep * min(experts.top_k, local) / experts.top_k))

    @cached_property
    def device_costs(self) -> DeviceCosts:
        """What operations cost on this device under load, in this software.

        Allowances for what nobody measured (gaps between kernels, heat, passes over memory that a
        framework adds) are left out for work that was measured with this software's own kernels.
        """
        gpu, constants = self.cluster.gpu, self.constants
        known = build_device_costs(gpu, self.calibration)
        heat = _power(gpu, constants.power_exponent)
        elementwise = {
            "fused": constants.fused_elementwise,
            "native": constants.native_elementwise,
            "partial": constants.partial_elementwise,
            "eager": constants.eager_elementwise,
        }[self.framework.fusion]
        attention = constants.attention_slowdown
        if self.framework.attention == "flash1":
            attention *= constants.flash1_slowdown
        allowances = {
            "products": heat * constants.gemm_slowdown * known.sustained_slowdown,
            "low": heat * constants.gemm_slowdown,
            "attention": heat * attention,
            "elementwise": elementwise,
        }
        return scale_costs(known, **{**allowances, **dict.fromkeys(self._measured, 1.0)})

    @property
    def is_calibrated_framework(self) -> bool:
        """Whether the device was calibrated with this software's own kernels."""
        found = self.calibration
        return bool(found and found.software and found.software == self.framework.kernel_library)

    @property
    def _measured(self) -> list[str]:
        """Return kinds of work that were measured under load as this software calls its kernels."""
        found = self.calibration
        if found is None or not self.is_calibrated_framework:
            return []
        low = [INPUT_BYTES[curve.precision] < 2 for curve in found.products]
        kinds = {
            "products": not all(low),
            "low": any(low),
            "attention": {curve.part for curve in found.attention} == {"forward", "backward"},
            "elementwise": bool(found.memory),
        }
        return [kind for kind, measured in kinds.items() if measured]

    @property
    def element_bytes(self) -> float:
        """Bytes of one number between stages, and of one weight that is gathered."""
        return 2.0 if self.measured is None else float(self.measured.element_bytes)

    @cached_property
    def microbatch_tokens(self) -> int:
        """Tokens one rank computes in a microbatch: its context-parallel share."""
        return max(1, self.layout.microbatch * self.sequence_length // self.layout.cp)

    @cached_property
    def local_tokens(self) -> int:
        """Tokens it holds between blocks: fewer where tensor ranks split the sequence."""
        return (
            max(1, self.microbatch_tokens // self.layout.tp)
            if self.layout.sequence_parallel
            else self.microbatch_tokens
        )

    @cached_property
    def num_microbatches(self) -> int:
        """Microbatches of one replica in a step."""
        return max(1, self.layout.count_microbatches(self.global_batch))


def _require_targets(adapter: LoRASpec, model: Model) -> None:
    weights = (weight for block in model.blocks for weight in block.list_weights(model.hidden))
    if not any(map(adapter.is_target, weights)):
        what = f"{model.name} has no matrix called {' or '.join(adapter.targets)}"
        raise InputError([Problem("workload.adapter.targets", what, "name qkv, or leave it out")])


def _power(gpu: Gpu, exponent: float) -> float:
    """Return how much slower a chip runs than its measured kind for want of power."""
    kind = catalog.get_gpu(find_closest_device(gpu))
    watts, usual = gpu.tdp_w, kind.tdp_w
    if gpu.arch != kind.arch or not (watts and usual and gpu.bf16_flops and kind.bf16_flops):
        return 1.0
    lack = usual / kind.bf16_flops * gpu.bf16_flops / watts
    return float(max(1.0, lack) ** exponent)
