"""Training steps of a layout on this machine's processor, recorded as a timeline."""

import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.timeline_recorder import TimelineRecorder
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.run.train.data.batch import SequenceInfo, TrainBatch
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.profiling.collective_timing import CollectiveTimings, time_collectives
from meshwright.run.train.profiling.cpu_affinity import make_timing_clock, pin_rank_to_cores
from meshwright.run.train.profiling.host_load import HostLoadMeter
from meshwright.run.train.profiling.layer_timing import (
    TIMING_OPTIMIZER,
    PartTiming,
    split_model,
    time_model_part,
)
from meshwright.run.train.signals import disable_gc
from meshwright.run.train.step_backend import MeshStepBackend, make_sharded_model
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.timeline import Timeline, read_timeline

TIMEOUT_S = 1200.0
WARMUP_STEPS = 2
"""Steps before those that are recorded: memory is asked for, gradients find their order."""


class StepShape(NamedTuple):
    """What every step trains on."""

    sequence_length: int
    """Tokens of a sequence."""
    sequences: int
    """Sequences of a step, over all replicas."""


class RankTimings(NamedTuple):
    """What one rank took for the parts of steps."""

    part_timings: list[list[PartTiming]]
    """By layout, all parts of the model."""
    collective_timings: CollectiveTimings
    cpu_s: float = 0.0
    """What it took of its core in all."""


class RecordedSteps(NamedTuple):
    """Steps that were run."""

    timeline: Timeline
    other_cores_used: float | None
    """Cores that others kept busy meanwhile, on the mean; None where that is not known."""


class LayerTimingOptions(NamedTuple):
    """How parts are timed."""

    length: int
    """Tokens of a sequence."""
    rounds: int
    """How often, eight microbatches each time and way."""
    split: bool = True
    """Whether the two parts of a split backward are timed as well."""


def time_layers_on_ranks(
    model: Model, layouts: list[Layout], ranks: int, how: LayerTimingOptions
) -> list[RankTimings]:
    """Time the parts of a model under layouts of `make_timing_layout`, on several processes."""
    found: list[RankTimings] = spawn_ranks(
        ranks, _pieces, model, layouts, ranks, how, timeout_s=TIMEOUT_S
    )
    return found


def _pieces(
    model: Model, layouts: list[Layout], ranks: int, how: LayerTimingOptions
) -> RankTimings:
    clock = make_timing_clock(ranks)  # before a rank keeps to one of the cores
    pin_rank_to_cores(dist.get_rank(), ranks)
    with disable_gc():
        exchanges = time_collectives(ranks, clock)
        dist.barrier()
        dist.destroy_process_group()
        # What a fake group hands over is whatever lay in memory: tiny numbers must not slow it.
        torch.set_flush_denormal(True)
        parts = [
            [time_model_part(model, layout, part, clock=clock, **how._asdict())
             for part in split_model(model)]
            for layout in layouts
        ]  # fmt: skip
    return RankTimings(parts, exchanges, time.process_time())


def record_steps(
    model: Model, layout: Layout, shape: StepShape, *, steps: int, folder: Path
) -> RecordedSteps:
    """Train some steps on as many processes as a layout has ranks; return what they did."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = HostLoadMeter()
    taken = spawn_ranks(
        layout.gpus, _steps, model, layout, shape, steps, folder, timeout_s=TIMEOUT_S
    )
    return RecordedSteps(read_timeline(folder), beside.measure_other_cores(sum(taken)))


def _steps(model: Model, layout: Layout, shape: StepShape, steps: int, folder: Path) -> float:
    """Run the steps of this rank; return what it took of its core."""
    mesh = Mesh(layout)
    pin_rank_to_cores(mesh.rank, layout.gpus)
    spread = make_sharded_model(model, mesh)
    sync = make_gradient_sync(spread)
    optimizer = make_optimizer(
        sync.named_parameters(), layout, TIMING_OPTIMIZER, total_steps=WARMUP_STEPS + steps + 1
    )
    step = MeshStepBackend(spread, sync, optimizer, microbatch=layout.microbatch)
    batch = _batch(model, layout, shape, mesh.coordinate.dp)
    with disable_gc(), TimelineRecorder(folder, mesh.rank) as recorder:
        for number in range(WARMUP_STEPS + steps + 1):
            if number == WARMUP_STEPS:
                mesh.world.barrier()
                mesh.recorder = recorder
            step(batch, number)
        mesh.recorder = None
    return time.process_time()


def _batch(model: Model, layout: Layout, shape: StepShape, replica: int) -> TrainBatch:
    """Return a replica's share of a step: tokens at random, which cost what others do."""
    each = shape.sequences // layout.dp
    made = torch.Generator().manual_seed(replica)
    rows = torch.randint(0, model.vocab, (each, shape.sequence_length + 1), generator=made)
    whole = SequenceInfo(
        documents=1,
        max_document_length=shape.sequence_length,
        num_targets=shape.sequence_length,
        num_tokens=shape.sequence_length,
    )
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return TrainBatch(0, tokens, labels, None, None, (whole,) * each)
