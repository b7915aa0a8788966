"""`RankCoordinator`: the processes that save and load together, and how they agree.

A failure of one is a failure of all: nobody waits for a rank that gave up. The group is one of
its own, because a save talks in the background while training uses the others; it is written down
in the mesh's journal for such, where the alarm sees who keeps whom waiting. Whoever reads or writes
much announces that, so that others are patient. What ranks send each other is pickled: it comes
from processes of the same job and never from a disk.
"""

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.run.parallel.flight_recorder import FlightRecorder
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.parallel.mesh import Mesh

T = TypeVar("T")
R = TypeVar("R")

GROUP = "checkpoint"
"""What the group is called in journals."""
MIN_BYTES_PER_S = 20e6
"""A disk below this rate counts as stuck: a tenth of what one hard disk writes."""
_OPENING_S = 120.0
"""What a file system may take besides, to open, sync, rename and delete."""
_WATCHED = timedelta(days=1)
"""Where an alarm watches, torch's own time limit shall not end a long save before it."""


class PeerRankError(MeshwrightError):
    """Something went wrong on some ranks of a save or load."""


class _Fault(NamedTuple):
    rank: int
    text: str


class RankCoordinator:
    """One process alone, or all processes of the default group."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        """Join the others; where there are several processes, all of them call this together.

        The journals of a `mesh` are those that its alarm reads.
        """
        self._group: GroupCoordinator | None = None
        self.rank, self.ranks = 0, 1
        self._training, self._aside = (
            (FlightRecorder(), FlightRecorder())
            if mesh is None
            else (mesh.flight_recorder, mesh.background_recorder)
        )
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
            self._group = self._joined(None if mesh is None else _WATCHED)

    def _joined(self, timeout: timedelta | None) -> GroupCoordinator:
        everyone = tuple(range(self.ranks))
        self._aside.register_group(GROUP, everyone)
        entry = self._aside.record(GROUP, "meeting", torch.empty(0))
        since_ns = self._aside.begin_wait(entry)
        handle = dist.new_group(backend="gloo", timeout=timeout)
        self._aside.end_wait(entry, since_ns)
        return GroupCoordinator(GROUP, everyone, self.rank, handle, self._aside)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the rank that decides and commits."""
        return self.rank == 0

    def expect_write_delay(self, data_bytes: int) -> AbstractContextManager[None]:
        """Announce that this rank writes so much, beside training."""
        return self._aside.expect_delay("writes a checkpoint", _most_s(data_bytes))

    def expect_read_delay(self, data_bytes: int) -> AbstractContextManager[None]:
        """Announce that this rank reads so much, before it trains on."""
        return self._training.expect_delay("reads a checkpoint", _most_s(data_bytes))

    def all_reduce(self, work: Callable[[], T], on_first: Callable[[list[T]], R]) -> R:
        """Do the work on every rank, then the rest on the first; all get what it returns."""
        if self._group is None:
            return on_first([work()])

        def same(values: list[T]) -> list[R]:
            return [on_first(values)] * self.ranks

        return self.reduce_scatter(work, same)

    def all_gather(self, work: Callable[[], list[T]]) -> list[T]:
        """Do the work on every rank; all get the items of all, each once."""
        return self.all_reduce(work, lambda ranks: list(dict.fromkeys(chain.from_iterable(ranks))))

    def reduce_scatter(self, work: Callable[[], T], on_first: Callable[[list[T]], list[R]]) -> R:
        """Do the work on every rank, then the rest on the first; each gets its item of that."""
        if self._group is None:
            return on_first([work()])[0]
        gathered = self._gathered(self._attempt(work))
        dealt: list[Any] | None = None
        if gathered is not None:
            faults = [item for item in gathered if isinstance(item, _Fault)]
            answer: Any = faults or self._attempt(lambda: on_first(cast(list[T], gathered)))
            if isinstance(answer, _Fault):
                answer = faults = [answer]
            dealt = [faults] * self.ranks if faults else answer
        mine = self._dealt(dealt)
        if isinstance(mine, list) and mine and isinstance(mine[0], _Fault):
            raise PeerRankError("\n".join(f"rank {rank}: {text}" for rank, text in mine))
        return cast(R, mine)

    def _gathered(self, item: Any) -> list[Any] | None:
        """Bring an item of every rank to the first."""
        assert self._group is not None
        sent, nobody = _packed(item), [0] * self.ranks
        sizes = self._together(self._group.all_gather, torch.tensor([len(sent)])).tolist()
        given = (sent, [len(sent), *nobody[1:]], sizes if self.is_coordinator else nobody)
        came = self._together(self._group.all_to_all, *given)
        return (
            [_unpacked(each) for each in torch.split(came, sizes)] if self.is_coordinator else None
        )

    def _dealt(self, items: Sequence[Any] | None) -> Any:
        """Bring each rank its item from the first."""
        assert self._group is not None
        packed, nobody = [_packed(item) for item in items or ()], [0] * self.ranks
        said = torch.tensor([len(each) for each in packed] or nobody)
        sizes = self._together(self._group.broadcast, said).tolist()
        sent = torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8)
        given = (sent, sizes if self.is_coordinator else nobody, [sizes[self.rank], *nobody[1:]])
        return _unpacked(self._together(self._group.all_to_all, *given))

    def _together(self, collective: Callable[..., Tensor], *given: Any) -> Tensor:
        try:
            return collective(*given)
        except RuntimeError as error:
            raise PeerRankError(f"another rank is gone: {error}") from error

    def _attempt(self, work: Callable[[], T]) -> T | _Fault:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever it was, every rank is told
            return _Fault(self.rank, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None:
            dist.destroy_process_group(self._group.process_group)
            self._group = None


def _most_s(data_bytes: int) -> float:
    return _OPENING_S + data_bytes / MIN_BYTES_PER_S


def _packed(item: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    return pickle.loads(packed.numpy().tobytes())  # noqa: S301 - from a rank of this job
