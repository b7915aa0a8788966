"""What the parts of a training step take on this machine, each timed alone.

A part is the embedding, a run of layers of one kind, or the head. One rank of a pipeline that holds
nothing else is played by torch's fake process group: its collectives cost nothing and are noted, so
that what remains is compute. As many processes do so at once as ranks will run, one thread each:
what they take from each other's memory bandwidth is in the figures.

Passes run as in a step: two microbatches under way, gradients added up, then an update. A step is
their sum, so the mean counts.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from statistics import fmean, median
from time import perf_counter
from typing import NamedTuple

import torch
from msgspec.structs import replace

from meshwright.run.parallel.context_parallel.context_parallel import split_microbatches
from meshwright.run.parallel.flight_recorder import FlightRecord
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.pipeline_parallel.pipeline_stage import StageExecutor
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.parallel.verify.dry_run import use_fake_process_group
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.run.train.step_backend import make_sharded_model
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import RankCoordinate, get_rank
from meshwright.spec.model import Model

EMBEDDING, HEAD = "embedding", "head"
TIMING_OPTIMIZER = OptimizerConfig(lr=1e-4, schedule="constant", warmup_steps=0)
"""As short as updates come: nothing but AdamW and clipping."""
_STAGES = 3
_WARM = 1
"""Rounds that are not timed."""
_ROUND = 8
"""Microbatches of a round; the first has no gradients to add to."""


class TimedCollective(NamedTuple):
    """A collective that a pass makes."""

    group: str
    op: str
    size_bytes: int
    """Of what this rank hands over."""
    ranks: int
    """Of the group."""


class ModelPart(NamedTuple):
    """What one stage of three holds, and nothing else."""

    name: str
    """`EMBEDDING`, `HEAD`, or the block whose layers they are."""
    stage: int
    stage_layers: tuple[int, int, int]

    @property
    def layers(self) -> int:
        """Layers it has."""
        return self.stage_layers[self.stage]


class PassTiming(NamedTuple):
    """One kind of pass over a part."""

    time_s: float
    """Of compute: the mean over all that were timed."""
    collectives: tuple[TimedCollective, ...]
    """What it exchanges meanwhile."""


class PartTiming(NamedTuple):
    """What a part of a model takes for one microbatch."""

    part: ModelPart
    forward: PassTiming
    backward: PassTiming
    backward_input: PassTiming
    """The part of a split backward that others wait for."""
    backward_weight: PassTiming
    """The other part."""
    update_s: float
    """Norm and update of its parameters."""
    parameters: int
    """Numbers that are updated."""


def split_model(model: Model) -> list[ModelPart]:
    """Return embedding, head, and of every kind of block a run of layers, at most half of them."""
    count = model.layers
    found = [ModelPart(EMBEDDING, 0, (0, count, 0)), ModelPart(HEAD, 2, (0, count, 0))]
    longest: dict[str, tuple[int, int]] = {}
    at = 0
    for name, some in groupby(model.layer_names):
        run = len(list(some))
        if run > longest.get(name, (0, 0))[1]:
            longest[name] = (at, run)
        at += run
    for name, (first, run) in longest.items():
        layers = min(run, max(1, count // 2))
        found.append(ModelPart(name, 1, (first, layers, count - first - layers)))
    return found


def make_timing_layout(layout: Layout) -> Layout:
    """Return what of a layout decides how long a pass takes, and nothing that orders passes."""
    return replace(
        layout,
        pp=1,
        virtual_stages=1,
        schedule="1f1b",
        stage_layers=None,
        dp=1,
        zero=0,
        shard=None,
        global_batch=None,
        recompute_layers=None,
        overlap_gradients=True,
        overlap_parameters=True,
        overlap_pp=True,
    )


def time_model_part(
    model: Model,
    layout: Layout,
    part: ModelPart,
    *,
    length: int,
    rounds: int,
    split: bool = True,
    clock: Callable[[], float] = perf_counter,
) -> PartTiming:
    """Time one part under a layout of `make_timing_layout`; no process group may be in use.

    Without `split`, the parts of a split backward are left at nothing.
    """
    whole = replace(layout, pp=_STAGES, stage_layers=part.stage_layers)
    rank = get_rank(whole, RankCoordinate(0, 0, 0, part.stage))
    with use_fake_process_group(rank, whole.gpus):
        return _Player(model, whole, part, length, clock).times(rounds, split=split)


class _Player:
    """Plays one rank alone."""

    def __init__(
        self, model: Model, layout: Layout, part: ModelPart, length: int, clock: Callable[[], float]
    ) -> None:
        self._part, self._layout, self._clock = part, layout, clock
        self._mesh = Mesh(layout)
        self._spread: ShardedModel = make_sharded_model(model, self._mesh)
        self._sync = make_gradient_sync(self._spread)
        self._optimizer = make_optimizer(
            self._sync.named_parameters(), layout, TIMING_OPTIMIZER, total_steps=1_000_000
        )
        rows = torch.randint(0, model.vocab, (layout.microbatch, length + 1))
        whole = Microbatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        self._microbatches = split_microbatches([whole] * _ROUND, self._spread)
        ranks = layout.tp if layout.sequence_parallel else 1
        shape = self._spread.pipeline_stage.get_activation_shape(self._microbatches[0], ranks)
        self._stream = torch.randn(shape, dtype=self._spread.pipeline_stage.dtype)
        self._taken: dict[str, list[float]] = {op: [] for op in "FBIWU"}
        self._calls: dict[str, tuple[TimedCollective, ...]] = {}

    def times(self, rounds: int, *, split: bool) -> PartTiming:
        """Run whole and split backwards in turn; return the mean of each, of updates the middle."""
        for number in range(_WARM + rounds):
            if number == _WARM:
                for taken in self._taken.values():
                    taken.clear()
            self._round(split=False)
            if split:
                self._round(split=True)
        found = {
            op: PassTiming(fmean(self._taken[op] or [0.0]), self._calls.get(op, ()))
            for op in "FBIW"
        }
        held = sum(each.numel() for _, each in self._sync.named_parameters())
        passes = (found["F"], found["B"], found["I"], found["W"])
        return PartTiming(self._part, *passes, median(self._taken["U"]), held)

    def _round(self, *, split: bool) -> None:
        passes = StageExecutor(self._spread.pipeline_stage, self._microbatches, 1e-3)
        self._sync.begin_step()
        for number in range(_ROUND + 1):
            if number < _ROUND:
                self._forward(passes, number)
            if number:
                self._backward(passes, number - 1, split=split)
        self._time("U", self._update)

    def _forward(self, passes: StageExecutor, number: int) -> None:
        given = None if self._part.name == EMBEDDING else self._stream.clone()
        self._time("F", lambda: passes.forward_one_chunk((self._part.stage, number), given))

    def _backward(self, passes: StageExecutor, number: int, *, split: bool) -> None:
        at, slope = (self._part.stage, number), None
        if self._part.name != HEAD:
            slope = self._stream * 1e-3
        whole = not split
        self._time(
            "B" if whole else "I", lambda: passes.backward_one_chunk(at, slope, weights=whole)
        )
        if split:
            self._time("W", lambda: passes.backward_weight_one_chunk(at))

    def _update(self) -> None:
        gradients = self._sync.reduced_gradients()
        norm = self._sync.grad_norm()
        self._optimizer.step(1e-6, norm=norm, gradients=gradients)
        self._sync.zero_grads_and_unshard()

    def _time(self, op: str, work: Callable[[], object]) -> None:
        entries = self._mesh.flight_recorder.records
        entries.clear()
        start = self._clock()
        work()
        self._taken[op].append(self._clock() - start)
        self._calls[op] = list_collective_calls(
            entries, self._mesh.rank, self._mesh.flight_recorder.group_ranks
        )


def list_collective_calls(
    entries: Iterable[FlightRecord], rank: int, members: Mapping[str, tuple[int, ...]]
) -> tuple[TimedCollective, ...]:
    """Return what was exchanged, in order; of messages those that were sent, as all do both."""
    found = []
    for entry in entries:
        group, _, pair = entry.group.partition(" ")
        if pair and not pair.startswith(f"{rank}>"):
            continue
        size = entry.elements * entry.dtype.itemsize
        op = entry.op.partition(" ")[0]
        found.append(TimedCollective(group, op, size, len(members[entry.group])))
    return tuple(found)
