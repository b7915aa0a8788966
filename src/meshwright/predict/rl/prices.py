"""`Prices`: what a training step, a sync of weights and a memory phase take.

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
from meshwright.policy.rollout import Phase
from meshwright.policy.rollout.actions import PhaseName
from meshwright.predict.bubble import per_microbatch, rank_times
from meshwright.predict.memory import predict_memory
from meshwright.predict.rl.framework import Moves, host_rates, phase_s, swapped_s
from meshwright.predict.rl.packing import Share, packed
from meshwright.predict.rl.peaks import engines_of, peaks_of, reference_bytes, trainer_bytes
from meshwright.predict.rl.setup import Drawn, Setup, share_of
from meshwright.predict.rl.sync import sync_of
from meshwright.predict.run import Run
from meshwright.predict.serving.fleet import Copies
from meshwright.predict.serving.memory import serving_memory
from meshwright.predict.stage_time import chunk_times
from meshwright.predict.step import StepPrediction, predict_step
from meshwright.predict.transfer_time import TransferTime
from meshwright.spec.layout import Layout
from meshwright.spec.units import format_bytes
from meshwright.spec.work import Work
from meshwright.spec.workload import Training


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of everything the trainer does, and the bytes of each phase."""

    step: StepPrediction
    """One update over `tokens`."""
    tokens: float
    """Of an update."""
    priced_tokens: float
    """The same with what fills microbatches up, which `step` is of."""
    updates: int
    forward_s: float
    """All passes without gradients of a step of `updates` times `tokens`."""
    swapped_s: float
    """What comes from the host and goes there for the sake of these passes."""
    sync: TransferTime
    phase_s: dict[PhaseName, float]
    engines: Copies
    """With as much of their GPUs as the trainer leaves them."""
    peak_bytes: dict[str, float]
    """What the fullest GPU holds while generating, syncing and training."""

    def training_s(self, batch: Iterable[Drawn]) -> float:
        """Return the seconds of a step on these groups."""
        # All updates together have as many tokens as the batch.
        updates = sum(one.tokens for one in batch) / self.tokens
        step = self.step
        once = step.optimizer_s + step.dp_s
        passes = updates * (step.step_s - once) + updates / self.updates * self.forward_s
        return passes + self.updates * once + self.swapped_s

    def seconds(self, phase: Phase) -> float:
        """Return the seconds of a memory phase."""
        return self.phase_s.get(phase.name, 0.0)


def prices_of(setup: Setup, *, must_fit: bool = True) -> Prices:
    """Return what the trainer's side of a setup takes; `must_fit` refuses one without the memory.

    Raises:
        InputError: where the layout lacks memory, or is none of this model and cluster.
    """
    rounds, framework = setup.rounds, setup.framework
    asked, fills = packed(rounds), framework.fills and setup.training.pp > 1
    share = asked.share(setup.training.dp, fills=fills)
    layout = msgspec.structs.replace(setup.training, microbatch=share.sequences)
    run = _run(setup, layout, share.workload)
    step, memory = predict_step(run), predict_memory(run)
    worst, rates = memory.worst, host_rates(setup.cluster)
    trainer = trainer_bytes(setup, memory)
    engines = engines_of(setup, trainer)
    serving = serving_memory(engines.replica, engines.limits.batch_tokens)
    moves = Moves(
        weights=float(worst.parameters_bytes),
        states=float(worst.optimizer_bytes),
        reference=float(reference_bytes(setup, memory)),
        served=float(serving.weight_bytes),
        frozen=float(serving.weight_bytes) if rounds.adapter and not setup.lent else 0.0,
    )
    sync = sync_of(setup)
    if must_fit and not memory.fits:
        needed = format_bytes(worst.total_bytes)
        there = format_bytes(memory.capacity_bytes)
        what = f"the trainer's fullest GPU needs {needed} of {there}"
        fix = "let more GPUs train, or make microbatches smaller with `packed`"
        raise InputError([Problem("training", what, fix)])
    passed = packed(rounds, room=rounds.forward_packed, updates=1).share(layout.dp, fills=fills)
    return Prices(
        step=step,
        tokens=float(asked.tokens),
        priced_tokens=float(share.tokens),
        updates=rounds.updates,
        forward_s=rounds.forwards * _forward_s(setup, passed) if rounds.forwards else 0.0,
        swapped_s=swapped_s(
            framework, moves, rates, forwards=rounds.forwards, shared=setup.shares_gpus
        ),
        sync=sync,
        phase_s=phase_s(framework, moves, rates),
        engines=engines,
        peak_bytes=peaks_of(setup, trainer, serving, sync.aside_bytes),
    )


def _forward_s(setup: Setup, share: Share) -> float:
    """Return the seconds of one pass without gradients: the slowest stage's, and the others' once.

    They fill the pipeline and drain it.
    """
    layout = msgspec.structs.replace(setup.training, microbatch=share.sequences)
    run = _run(setup, layout, share.workload)
    stages = [per_microbatch(run, one).forward for one in rank_times(run, chunk_times(run))]
    return sum(stages) + (share.microbatches - 1) * max(stages)


def _run(setup: Setup, layout: Layout, workload: Training) -> Run:
    cluster = share_of(setup.cluster, layout.gpus)
    work = Work(model=setup.model, cluster=cluster, layout=layout, workload=workload)
    problems = work.check()
    if problems:
        raise InputError(list(problems))
    return Run(work, software=setup.software, calibration=setup.engines.replica.calibration)
