"""Training steps of a layout on this machine's processor, recorded as a timeline."""

import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.recorder import Recorder
from meshwright.run.parallel.sync import make_sync
from meshwright.run.train.data.batch import Batch, Sequence
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.spread_step import SpreadStep, make_spread
from meshwright.run.train.stopping import quiet_collector
from meshwright.run.train.twin.beside import Beside
from meshwright.run.train.twin.exchanges import ExchangesTimed, time_exchanges
from meshwright.run.train.twin.own_cores import clock_of, keep_to_own_cores
from meshwright.run.train.twin.pieces import SETTINGS, PartTimed, parts_of, time_part
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.timeline import Timeline, read

PATIENCE_S = 1200.0
WARM_STEPS = 2
"""Steps before those that are recorded: memory is asked for, gradients find their order."""


class Shape(NamedTuple):
    """What every step trains on."""

    length: int
    """Tokens of a sequence."""
    sequences: int
    """Sequences of a step, over all replicas."""


class Timed(NamedTuple):
    """What one rank took for the parts of steps."""

    parts: list[list[PartTimed]]
    """By layout, all parts of the model."""
    exchanges: ExchangesTimed
    cpu_s: float = 0.0
    """What it took of its core in all."""


class Recorded(NamedTuple):
    """Steps that were run."""

    timeline: Timeline
    beside: float | None
    """Cores that others kept busy meanwhile, on the mean; None where that is not known."""


class Pieces(NamedTuple):
    """How parts are timed."""

    length: int
    """Tokens of a sequence."""
    rounds: int
    """How often, eight microbatches each time and way."""
    split: bool = True
    """Whether the two parts of a split backward are timed as well."""


def time_pieces(model: Model, layouts: list[Layout], ranks: int, how: Pieces) -> list[Timed]:
    """Time the parts of a model under layouts of `piece_layout`, on so many processes at once."""
    found: list[Timed] = launch(ranks, _pieces, model, layouts, ranks, how, timeout_s=PATIENCE_S)
    return found


def _pieces(model: Model, layouts: list[Layout], ranks: int, how: Pieces) -> Timed:
    clock = clock_of(ranks)  # before a rank keeps to one of the cores
    keep_to_own_cores(dist.get_rank(), ranks)
    with quiet_collector():
        exchanges = time_exchanges(ranks, clock)
        dist.barrier()
        dist.destroy_process_group()
        # What a fake group hands over is whatever lay in memory: tiny numbers must not slow it.
        torch.set_flush_denormal(True)
        parts = [
            [time_part(model, layout, part, clock=clock, **how._asdict())
             for part in parts_of(model)]
            for layout in layouts
        ]  # fmt: skip
    return Timed(parts, exchanges, time.process_time())


def record_steps(
    model: Model, layout: Layout, shape: Shape, *, steps: int, folder: Path
) -> Recorded:
    """Train some steps on as many processes as a layout has ranks; return what they did."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = Beside()
    taken = launch(layout.gpus, _steps, model, layout, shape, steps, folder, timeout_s=PATIENCE_S)
    return Recorded(read(folder), beside.cores(sum(taken)))


def _steps(model: Model, layout: Layout, shape: Shape, steps: int, folder: Path) -> float:
    """Run the steps of this rank; return what it took of its core."""
    mesh = Mesh(layout)
    keep_to_own_cores(mesh.rank, layout.gpus)
    spread = make_spread(model, mesh)
    sync = make_sync(spread)
    optimizer = make_optimizer(
        sync.named_parameters(), layout, SETTINGS, total_steps=WARM_STEPS + steps + 1
    )
    step = SpreadStep(spread, sync, optimizer, microbatch=layout.microbatch)
    batch = _batch(model, layout, shape, mesh.place.dp)
    with quiet_collector(), Recorder(folder, mesh.rank) as recorder:
        for number in range(WARM_STEPS + steps + 1):
            if number == WARM_STEPS:
                mesh.world.barrier()
                mesh.recorder = recorder
            step(batch, number)
        mesh.recorder = None
    return time.process_time()


def _batch(model: Model, layout: Layout, shape: Shape, replica: int) -> Batch:
    """Return a replica's share of a step: tokens at random, which cost what others do."""
    each = shape.sequences // layout.dp
    made = torch.Generator().manual_seed(replica)
    rows = torch.randint(0, model.vocab, (each, shape.length + 1), generator=made)
    whole = Sequence(documents=1, longest=shape.length, targets=shape.length, filled=shape.length)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return Batch(0, tokens, labels, None, None, (whole,) * each)
