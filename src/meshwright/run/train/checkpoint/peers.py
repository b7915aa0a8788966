"""`Peers`: the processes that save and load together, and how they agree.

A failure of one is a failure of all: nobody waits for a rank that gave up. The group is one of
its own, because a save talks in the background while training uses the others. What ranks send
each other is pickled, as in all of torch's object collectives: it comes from processes of the
same job and never from a disk.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from meshwright.errors import MeshwrightError

T = TypeVar("T")
R = TypeVar("R")


class PeerFailed(MeshwrightError):
    """Something went wrong on some ranks of a save or load."""


class _Fault(NamedTuple):
    rank: int
    text: str


class Peers:
    """One process alone, or all processes of the default group."""

    def __init__(self) -> None:
        """Join the others; where there are several processes, all of them call this together."""
        self._group: dist.ProcessGroup | None = None
        self.rank, self.ranks = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    @property
    def first(self) -> bool:
        """Whether this is the rank that decides and commits."""
        return self.rank == 0

    def combine(self, work: Callable[[], T], on_first: Callable[[list[T]], R]) -> R:
        """Do the work on every rank, then the rest on the first; all get what it returns."""
        if self._group is None:
            return on_first([work()])

        def same(values: list[T]) -> list[R]:
            return [on_first(values)] * self.ranks

        return self.deal(work, same)

    def pool(self, work: Callable[[], list[T]]) -> list[T]:
        """Do the work on every rank; all get the items of all, each once."""
        return self.combine(work, lambda ranks: list(dict.fromkeys(chain.from_iterable(ranks))))

    def deal(self, work: Callable[[], T], on_first: Callable[[list[T]], list[R]]) -> R:
        """Do the work on every rank, then the rest on the first; each gets its item of that."""
        if self._group is None:
            return on_first([work()])[0]
        gathered: list[Any] | None = [None] * self.ranks if self.first else None
        dist.gather_object(self._attempt(work), gathered, dst=0, group=self._group)
        dealt: list[Any] | None = None
        if gathered is not None:
            faults = [item for item in gathered if isinstance(item, _Fault)]
            answer: Any = faults or self._attempt(lambda: on_first(cast(list[T], gathered)))
            if isinstance(answer, _Fault):
                answer = faults = [answer]
            dealt = [faults] * self.ranks if faults else answer
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, dealt, src=0, group=self._group)
        if isinstance(mine[0], list) and mine[0] and isinstance(mine[0][0], _Fault):
            raise PeerFailed("\n".join(f"rank {rank}: {text}" for rank, text in mine[0]))
        return cast(R, mine[0])

    def _attempt(self, work: Callable[[], T]) -> T | _Fault:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever it was, every rank is told
            return _Fault(self.rank, f"{type(error).__name__}: {error}")

    def leave(self) -> None:
        """Give the group back."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
