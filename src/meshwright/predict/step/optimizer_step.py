"""Optimizer step time per rank: gradient norm, parameter update and offload transfers."""

from operator import add, itemgetter
from typing import NamedTuple

from meshwright.predict.cost import memory_s, optimizer_s
from meshwright.predict.step.offload_time import host_update_s, update_waits
from meshwright.predict.step.stage_time import StageTime
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import (
    RankParameters,
)
from meshwright.spec.layout.model_states import BYTES_PER_ELEMENT, OPTIMIZER_MOMENTS


def _gradient_bytes(run: TrainingRun) -> float:
    return float(BYTES_PER_ELEMENT[run.layout.gradient_precision])


def _dense(held: RankParameters) -> int:
    return held.matrices + held.others


class UpdatePhases(NamedTuple):
    """What every rank does between its last backward and its next step."""

    updates_s: tuple[float, ...]
    """Seconds of gradient norm and update."""
    transfers_s: tuple[float, ...] = ()
    """Exposed seconds of transfers to and from host memory; empty where there are none."""

    @property
    def totals_s(self) -> tuple[float, ...]:
        """Both."""
        if not self.transfers_s:
            return self.updates_s
        return tuple(map(add, self.updates_s, self.transfers_s))

    @property
    def transfer_share(self) -> float:
        """The transfers' share on the rank that takes longest."""
        if not self.transfers_s:
            return 0.0
        moving, whole = max(zip(self.transfers_s, self.totals_s, strict=True), key=itemgetter(1))
        return moving / whole if whole else 0.0


def update_phases(
    run: TrainingRun, stages: tuple[StageTime, ...], parameters: tuple[RankParameters, ...]
) -> UpdatePhases:
    """Return the update of every rank; `parameters` is what each trains."""
    each = {held: optimizer_step_s(run, held) for held in set(parameters)}
    updates = tuple(each[held] for held in parameters)
    if not run.layout.offload:
        return UpdatePhases(updates)
    updated = tuple(count_updated_parameters(run, held) for held in parameters)
    return UpdatePhases(updates, update_waits(run, stages, updated, updates))


def count_updated_parameters(run: TrainingRun, held: RankParameters) -> float:
    """Return how many parameters one rank updates."""
    layout = run.layout
    shard = layout.shard_degree if layout.zero else 1
    replicas = layout.dp * layout.cp // layout.shard_degree
    experts = max(1, layout.expert_dp // replicas) if layout.zero else 1
    return _dense(held) / shard + held.experts / experts


def optimizer_step_s(run: TrainingRun, held: RankParameters) -> float:
    """Return the update: states read and written once, and the norm of the gradients."""
    number = count_updated_parameters(run, held)
    if run.measured is not None:
        return run.measured.fixed_step_s + run.measured.update_s_per_parameter * number
    update_s, norm_s = update_kernel_times_s(run, number)
    return update_s + norm_s


def update_kernel_times_s(run: TrainingRun, number: float) -> tuple[float, float]:
    """Return the seconds of updating so many parameters, and of their gradients' norm."""
    layout = run.layout
    moments = 2 * OPTIMIZER_MOMENTS[layout.optimizer] * BYTES_PER_ELEMENT[layout.moment_precision]
    # Weights are read and written in the format of the masters, and copied to 16 bits beside them.
    master = BYTES_PER_ELEMENT[layout.master_precision]
    weights = 2 * master + 2 if master else 4
    gradient = _gradient_bytes(run)
    moved = (moments + weights + gradient) * number
    away = "optimizer" in layout.offload
    update_s = host_update_s(run, moved) if away else optimizer_s(run.device_costs, moved)
    return update_s, memory_s(run.device_costs, "gradient_norm", gradient * number)
