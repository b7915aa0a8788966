"""`TrainerCosts`: what a training step, a sync of weights and a memory phase take.

    training   each update is a step of its own: passes over its share of the tokens, filling and
               draining its pipeline, then optimizer and exchange; before them passes without
               gradients over all tokens, in microbatches and a pipeline of their own
    sync       the plan by which weights go to engines: packed, sent, checked, written; or the whole
               model, gathered by all who train
    phases     what a framework keeps on the host, over a GPU's link to it

Sequences are packed whole, and the priced step has as many microbatches, of sequences whose
attention costs as much on the average. A shift of memory that moves no bytes is free. What software
adds to these (names looked up, buffers made, processes that wait for each other) is not in them.
"""

from collections.abc import Iterable

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import MemoryPhaseAction
from meshwright.policy.rollout.actions import MemoryPhase
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.rl.microbatch_packing import ReplicaShare, pack_update
from meshwright.predict.rl.rl_framework import (
    PhaseTraffic,
    get_host_rates,
    memory_phase_s,
    reference_swap_s,
)
from meshwright.predict.rl.rl_memory import (
    fit_engines,
    predict_peak_bytes,
    reference_bytes,
    trainer_bytes,
)
from meshwright.predict.rl.rl_setup import GroupLengths, RLSetup, take_gpu_share
from meshwright.predict.rl.weight_sync import predict_weight_sync
from meshwright.predict.rl.weight_transfer_time import WeightTransferTime
from meshwright.predict.serving.cost.kv_memory import predict_serving_memory
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool
from meshwright.predict.step.pipeline_bubble import mean_per_microbatch, sum_rank_times
from meshwright.predict.step.stage_time import chunk_times
from meshwright.predict.step.step_prediction import StepPrediction, predict_step
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.units import format_bytes
from meshwright.spec.workload import TrainingWorkload


class TrainerCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of everything the trainer does, and the bytes of each phase."""

    step: StepPrediction
    """One update over `tokens`."""
    tokens: float
    """Of an update."""
    padded_tokens: float
    """The same with what fills microbatches up, which `step` is of."""
    updates: int
    forward_s: float
    """All passes without gradients of a step of `updates` times `tokens`."""
    swap_s: float
    """What comes from the host and goes there for the sake of these passes."""
    sync: WeightTransferTime
    memory_phase_s: dict[MemoryPhase, float]
    rollout_pool: ReplicaPool
    """With as much of their GPUs as the trainer leaves them."""
    peak_bytes: dict[str, float]
    """What the fullest GPU holds while generating, syncing and training."""

    def training_s(self, batch: Iterable[GroupLengths]) -> float:
        """Return the seconds of a step on these groups."""
        # All updates together have as many tokens as the batch.
        updates = sum(one.tokens for one in batch) / self.tokens
        step = self.step
        once = step.optimizer_s + step.dp_s
        passes = updates * (step.step_s - once) + updates / self.updates * self.forward_s
        return passes + self.updates * once + self.swap_s

    def get_phase_s(self, phase: MemoryPhaseAction) -> float:
        """Return the seconds of a memory phase."""
        return self.memory_phase_s.get(phase.phase, 0.0)


def build_trainer_costs(setup: RLSetup, *, must_fit: bool = True) -> TrainerCosts:
    """Return what the trainer's side of a setup takes; `must_fit` refuses one without the memory.

    Raises:
        InputError: where the layout lacks memory, or is none of this model and cluster.
    """
    rounds, framework = setup.rollout_batch, setup.framework
    asked, fills = pack_update(rounds), framework.pads_microbatches and setup.trainer_layout.pp > 1
    share = asked.split_over_replicas(setup.trainer_layout.dp, fills=fills)
    layout = msgspec.structs.replace(
        setup.trainer_layout, microbatch=share.sequences_per_microbatch
    )
    run = _run(setup, layout, share.workload)
    step, memory = predict_step(run), predict_memory(run)
    worst, rates = memory.worst_stage, get_host_rates(setup.cluster)
    trainer = trainer_bytes(setup, memory)
    engines = fit_engines(setup, trainer)
    serving = predict_serving_memory(
        engines.replica, engines.scheduler_config.max_num_batched_tokens
    )
    moves = PhaseTraffic(
        trainer_weight_bytes=float(worst.parameters_bytes),
        optimizer_bytes=float(worst.optimizer_bytes),
        reference_bytes=float(reference_bytes(setup, memory)),
        engine_weight_bytes=float(serving.weight_bytes),
        frozen_bytes=float(serving.weight_bytes)
        if rounds.adapter and not setup.shares_trainer_weights
        else 0.0,
    )
    sync = predict_weight_sync(setup)
    if must_fit and not memory.fits:
        needed = format_bytes(worst.total_bytes)
        there = format_bytes(memory.capacity_bytes)
        what = f"the trainer's fullest GPU needs {needed} of {there}"
        fix = "let more GPUs train, or make microbatches smaller with `packed`"
        raise InputError([Problem("trainer_layout", what, fix)])
    passed = pack_update(
        rounds, room=rounds.logprob_microbatch_tokens, updates=1
    ).split_over_replicas(layout.dp, fills=fills)
    return TrainerCosts(
        step=step,
        tokens=float(asked.trained_tokens),
        padded_tokens=float(share.tokens),
        updates=rounds.updates_per_step,
        forward_s=rounds.logprob_passes * _forward_s(setup, passed)
        if rounds.logprob_passes
        else 0.0,
        swap_s=reference_swap_s(
            framework, moves, rates, forwards=rounds.logprob_passes, shared=setup.shares_gpus
        ),
        sync=sync,
        memory_phase_s=memory_phase_s(framework, moves, rates),
        rollout_pool=engines,
        peak_bytes=predict_peak_bytes(setup, trainer, serving, sync.staging_bytes),
    )


def _forward_s(setup: RLSetup, share: ReplicaShare) -> float:
    """Return the seconds of one pass without gradients: the slowest stage's, and the others' once.

    They fill the pipeline and drain it.
    """
    layout = msgspec.structs.replace(
        setup.trainer_layout, microbatch=share.sequences_per_microbatch
    )
    run = _run(setup, layout, share.workload)
    stages = [
        mean_per_microbatch(run, one).forward_s for one in sum_rank_times(run, chunk_times(run))
    ]
    return sum(stages) + (share.microbatches - 1) * max(stages)


def _run(setup: RLSetup, layout: Layout, workload: TrainingWorkload) -> TrainingRun:
    cluster = take_gpu_share(setup.cluster, layout.gpus)
    work = JobSpec(model=setup.model, cluster=cluster, layout=layout, workload=workload)
    problems = work.check()
    if problems:
        raise InputError(list(problems))
    return TrainingRun(
        work, framework=setup.trainer_framework, calibration=setup.rollout_pool.replica.calibration
    )
