"""`Prices`: what a training step, a sync of weights and a memory phase take.

    training   each update is a step of its own: passes over its share of the tokens, filling and
               draining its pipeline, then optimizer and exchange; before them passes without
               gradients over all tokens, each a third of the passes with them
    sync       the plan by which weights go to engines: packed, sent, checked, written
    phases     the optimizer's and the gradients' bytes of a GPU, over its link to the host

Sequences are packed and shared out evenly: the priced step has as many tokens, in sequences whose
attention costs as much on the average. A shift of memory that moves no bytes is free. What software
adds to these (names looked up, buffers made, processes that wait for each other) is not in them.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import Phase
from meshwright.predict.memory import MemoryPrediction, predict_memory
from meshwright.predict.rl.setup import Drawn, Rounds, Setup, share_of
from meshwright.predict.rl.sync import sync_of
from meshwright.predict.run import Run
from meshwright.predict.serving.fleet import TRANSFER_SHARE
from meshwright.predict.serving.memory import serving_memory
from meshwright.predict.step import StepPrediction, predict_step
from meshwright.predict.transfer_time import TransferTime
from meshwright.spec.layout import Layout
from meshwright.spec.units import format_bytes
from meshwright.spec.work import Work
from meshwright.spec.workload import Training

_TILE = 64
GENERATING, SYNCING, TRAINING = "generating", "syncing", "training"


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of everything the trainer does, and the bytes of each phase."""

    step: StepPrediction
    """One update over `tokens`."""
    tokens: float
    updates: int
    forwards: int
    sync: TransferTime
    phase_s: dict[str, float]
    peak_bytes: dict[str, float]
    """What the fullest GPU holds while generating, syncing and training."""

    def training_s(self, batch: Iterable[Drawn]) -> float:
        """Return the seconds of a step on these groups."""
        # All updates together have as many tokens as the batch.
        share = sum(one.tokens for one in batch) / self.tokens
        step = self.step
        once = step.optimizer_s + step.dp_s
        passes = step.step_s - once
        without = self.forwards * (passes - step.recompute_s) / 3
        return share * (passes + without) + self.updates * once

    def seconds(self, phase: Phase) -> float:
        """Return the seconds of a memory phase."""
        return self.phase_s.get(phase.name, 0.0)


def prices_of(setup: Setup) -> Prices:
    """Return what the trainer's side of a setup takes."""
    rounds = setup.rounds
    training = packed(rounds)
    layout = msgspec.structs.replace(setup.training, microbatch=training.microbatch)
    workload = training.workload(layout.dp)
    step, memory = _priced(setup, layout, workload)
    priced = float(workload.global_batch * workload.sequence_length)
    serving = serving_memory(setup.engines.replica, setup.engines.limits.batch_tokens)
    held = serving.weight_bytes + serving.buffer_bytes + max(0.0, serving.kv_bytes)
    states = memory.worst.gradients_bytes + memory.worst.optimizer_bytes
    host = TRANSFER_SHARE * setup.cluster.host.gpu_bytes_per_s
    moved_s = states / host
    sync = sync_of(setup)
    # What comes is kept aside until all of it is there.
    filled = serving.weight_bytes + sync.aside_bytes
    trained = float(memory.worst.parameters_bytes)
    peaks = {
        GENERATING: held,
        SYNCING: filled + trained if setup.shares_gpus else max(filled, trained),
        TRAINING: float(memory.worst.total_bytes),
    }
    if memory.worst.total_bytes > memory.capacity_bytes:
        needed = format_bytes(memory.worst.total_bytes)
        there = format_bytes(memory.capacity_bytes)
        what = f"the trainer's fullest GPU needs {needed} of {there}"
        fix = "give training more GPUs or larger degrees, or let mw choose its layout"
        raise InputError([Problem("training", what, fix)])
    return Prices(
        step=step,
        tokens=priced,
        updates=rounds.updates,
        forwards=rounds.forwards,
        sync=sync,
        phase_s={"load": moved_s, "offload": moved_s},
        peak_bytes=peaks,
    )


class Packed(NamedTuple):
    """What an update trains on, as sequences of equal length."""

    tokens: int
    length: int
    """Of the mean sequence that a token is in, so that attention costs as much."""
    microbatch: int
    """Of them that one microbatch has room for."""

    def workload(self, replicas: int) -> Training:
        """Return an update of as many tokens, which so many replicas share evenly."""
        divisor = replicas * self.microbatch
        batch = divisor * max(1, ceil(self.tokens / self.length / divisor))
        return Training(tokens=batch * self.length, sequence_length=self.length, global_batch=batch)


def packed(rounds: Rounds) -> Packed:
    """Return what an update of the first step trains on, its share of the step."""
    drawn = [rounds.drawn(group) for group in range(rounds.prompts)]
    tokens, squares = sum(one.tokens for one in drawn), sum(one.squares for one in drawn)
    longest = max(one.prompt + max(one.answers) for one in drawn)
    length = max(1, round(squares / tokens))
    # Whole tiles of 64, which parallel axes divide as well; short ones stay as they are.
    length = length if length < _TILE else -(-length // _TILE) * _TILE
    room = longest if rounds.packed is None else rounds.packed
    each = -(-tokens // rounds.updates)
    return Packed(each, length, max(1, min(room, each) // length))


def _priced(
    setup: Setup, layout: Layout, workload: Training
) -> tuple[StepPrediction, MemoryPrediction]:
    cluster = share_of(setup.cluster, layout.gpus)
    work = Work(model=setup.model, cluster=cluster, layout=layout, workload=workload)
    problems = work.check()
    if problems:
        raise InputError(list(problems))
    run = Run(work, software=setup.software, calibration=setup.engines.replica.calibration)
    return predict_step(run), predict_memory(run)
