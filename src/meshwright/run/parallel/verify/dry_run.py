"""`dry_run_layout`: run a layout's step on one processor, rank after rank, without data or devices.

Every chosen rank is played in turn: its groups are formed by torch's fake process group, its part
of the model is built without memory, and one step's passes run on shapes alone. What each rank
would send, to whom and in which order is left in its journal; ranks of one group must agree, and
what one pipeline rank sends another must expect. The schedule is proved free of deadlocks by
itself, also where a send waits for its receiver. So a layout of hundreds of GPUs is tried before
any is rented.

Where tokens go depends on their numbers: experts are taken to get equally many.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.errors import InputError, Problem
from meshwright.policy.pipeline import verify_schedule
from meshwright.run.parallel.flight_recorder import FlightRecord
from meshwright.run.parallel.forward_backward import (
    ForwardBackwardRunner,
    make_step_schedule,
)
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.sharded_model import shard_model
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import ExpertRankCoordinate, RankCoordinate, get_rank
from meshwright.spec.model import Model

_BACKEND = "rehearsal"


class GroupTraffic(NamedTuple):
    """What one rank exchanges with one group, by kind."""

    group: str
    op: str
    calls: int
    size_bytes: int
    """Of all tensors handed over."""
    ranks: int
    """Ranks of the group."""


class RankDryRun(NamedTuple):
    """One rank's step."""

    rank: int
    parameters: int
    """Numbers of the model that it holds."""
    records: tuple[FlightRecord, ...]
    members: Mapping[str, tuple[int, ...]]
    """Ranks of each of its groups."""

    def traffic(self) -> list[GroupTraffic]:
        """Sum up what it exchanged; pairs that exchange messages are summed by their group."""
        counts: Counter[tuple[str, str, int]] = Counter()
        sizes: Counter[tuple[str, str, int]] = Counter()
        for entry in self.records:
            key = (entry.group.partition(" ")[0], entry.op, len(self.members[entry.group]))
            counts[key] += 1
            sizes[key] += entry.elements * entry.dtype.itemsize
        return [
            GroupTraffic(group, op, counts[group, op, ranks], sizes[group, op, ranks], ranks)
            for group, op, ranks in counts
        ]


class DryRun(NamedTuple):
    """What came of it."""

    rank_runs: tuple[RankDryRun, ...]
    problems: tuple[str, ...]
    """Where ranks would wait for each other for ever."""
    schedule: str
    """What was shown of the pipeline's schedule; empty where there is none."""
    wall_s: float

    def traffic(self) -> list[GroupTraffic]:
        """Return what the rank with the most of it exchanges, by group and operation."""
        most: dict[tuple[str, str], GroupTraffic] = {}
        for one in (each for rank in self.rank_runs for each in rank.traffic()):
            known = most.get((one.group, one.op))
            if known is None or one.size_bytes > known.size_bytes:
                most[one.group, one.op] = one
        return sorted(most.values(), key=lambda one: -one.size_bytes)


def dry_run_layout(
    model: Model,
    layout: Layout,
    *,
    sequence_length: int,
    microbatches: int,
    ranks: Sequence[int] | None = None,
) -> DryRun:
    """Play a step of some ranks (None: of every stage, some of each) and compare what they did."""
    if dist.is_initialized():
        fix = "rehearse in a process of its own"
        raise InputError([Problem("rehearsal", "a process group is in use here", fix)])
    start = time.perf_counter()
    chosen = list_representative_ranks(layout) if ranks is None else tuple(ranks)
    shown, problems = "", list[str]()
    if layout.pp > 1:
        schedule = make_step_schedule(layout, microbatches)
        # NCCL may hold a send until its receiver is there: a schedule that ends so ends either way.
        problems += [
            f"schedule: {problem}" for problem in verify_schedule(schedule, sends="rendezvous")
        ]
        actions = sum(map(len, schedule.actions))
        shown = f"{layout.schedule}, {actions:,} actions" + ("" if problems else ", sound")
    played = tuple(_play(model, layout, rank, sequence_length, microbatches) for rank in chosen)
    problems += _disagreements(played)
    return DryRun(played, tuple(problems), shown, time.perf_counter() - start)


def find_min_microbatches(layout: Layout) -> int:
    """Return how many microbatches fill a layout's pipeline, or add up gradients without one."""
    if layout.schedule in {"dualpipe", "dualpipe-v"} and layout.pp > 1:
        return 2 * layout.pp
    return max(2, layout.pp)


def list_representative_ranks(layout: Layout) -> tuple[int, ...]:
    """Return ranks that differ in kind: of every stage the first, and the last along each axis."""
    places: list[RankCoordinate | ExpertRankCoordinate] = []
    for pp in range(layout.pp):
        first = RankCoordinate(0, 0, 0, pp)
        ends = {"tp": layout.tp - 1, "cp": layout.cp - 1, "dp": layout.dp - 1}
        places += [first, *(first._replace(**{axis: end}) for axis, end in ends.items())]
        among = ExpertRankCoordinate(0, 0, 0, pp)
        if layout.ep > 1:
            last = {"expert_tp": layout.effective_expert_tp - 1, "ep": layout.ep - 1}
            places += [among._replace(**{axis: end}) for axis, end in last.items()]
    return tuple(sorted({get_rank(layout, place) for place in places}))


@contextmanager
def use_fake_process_group(rank: int, size: int) -> Iterator[None]:
    """Let torch believe in a process group of so many ranks."""
    if size == 1:
        yield
        return
    from torch.testing._internal.distributed import fake_pg

    if not hasattr(dist.Backend, _BACKEND.upper()):
        # The same as torch's own, which does not know of tensors without memory.
        make = fake_pg._create_fake_pg  # noqa: SLF001 - there is no other way to make one
        devices = ["cpu", "meta", "cuda"]
        dist.Backend.register_backend(_BACKEND, make, extended_api=True, devices=devices)
    dist.init_process_group(_BACKEND, store=fake_pg.FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _play(model: Model, layout: Layout, rank: int, length: int, microbatches: int) -> RankDryRun:
    with use_fake_process_group(rank, layout.gpus):
        mesh = Mesh(layout, device="meta")
        mesh.flight_recorder.records = deque()  # all of them, not the last ones
        mine = shard_model(model, mesh, dtype=torch.bfloat16)
        held = sum(each.numel() for each in mine.decoder.parameters())
        runner, sync = ForwardBackwardRunner(mine), make_gradient_sync(mine)
        shape = (layout.microbatch, length)
        tokens = torch.zeros(shape, dtype=torch.int64, device="meta")
        parts = [Microbatch(tokens, tokens)] * microbatches
        sync.begin_step()
        runner(parts, 1.0, sync.mark_last_backward)
        sync.reduced_gradients()
        sync.grad_norm()
        sync.zero_grads_and_unshard()
        return RankDryRun(
            rank, held, tuple(mesh.flight_recorder.records), dict(mesh.flight_recorder.group_ranks)
        )


def _disagreements(played: Iterable[RankDryRun]) -> Iterator[str]:
    """Say where the ranks of a group do not do the same, in the same order."""
    by_group: dict[tuple[str, tuple[int, ...]], list[tuple[int, list[FlightRecord]]]] = {}
    for one in played:
        issued: dict[str, list[FlightRecord]] = {}
        for entry in one.records:
            issued.setdefault(entry.group, []).append(entry)
        for group, entries in issued.items():
            by_group.setdefault((group, one.members[group]), []).append((one.rank, entries))
    for (group, members), lanes in by_group.items():
        first_rank, first = lanes[0]
        for rank, entries in lanes[1:]:
            yield from _parted(group, members, (first_rank, first), (rank, entries))


def _parted(
    group: str,
    members: tuple[int, ...],
    one: tuple[int, list[FlightRecord]],
    other: tuple[int, list[FlightRecord]],
) -> Iterator[str]:
    """Say where two ranks of a group part, if they do."""
    for mine, theirs in zip(one[1], other[1], strict=False):
        if _kind(mine) != _kind(theirs):
            yield (
                f"group {group} of {len(members)} ranks: rank {one[0]} issues {mine}, while "
                f"rank {other[0]} issues {theirs}"
            )
            return
    if len(one[1]) != len(other[1]):
        yield (
            f"group {group} of {len(members)} ranks: rank {one[0]} issues {len(one[1]):,} "
            f"operations, rank {other[0]} {len(other[1]):,}"
        )


def _kind(entry: FlightRecord) -> tuple[object, ...]:
    """What ranks of a group must agree on; how many rows each sends is its own affair."""
    return entry.op, entry.elements if entry.same_size else None, entry.dtype
