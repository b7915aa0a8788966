"""`GroupCoordinator`: ranks that exchange tensors, and every way in which they do.

All communication of training passes here, so that it is written down, timed, and carried by the
algorithm of choice in one place. A group of one rank does nothing and copies nothing. What
`start_…` returns has to be waited for; the others wait themselves (on a GPU only the stream does).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.parallel.algorithm_selection import SelectedAlgorithms
from meshwright.run.parallel.flight_recorder import (
    CallSite,
    FlightRecord,
    FlightRecorder,
    InFlightWork,
)


class AsyncWork:
    """A result that may still be on its way."""

    def __init__(
        self,
        result: Tensor,
        works: Sequence[dist.Work] = (),
        finish: Callable[[Tensor], Tensor] | None = None,
        kept: Any = None,
        *,
        entry: FlightRecord | None = None,
        journal: FlightRecorder | None = None,
    ) -> None:
        self._result, self._works, self._finish = result, works, finish
        self._kept = kept
        """What the transfer reads, which must not go before it ends."""
        self._entry, self._journal = entry, journal
        """Where its beginning was written down, and its end will be."""

    @property
    def is_completed(self) -> bool:
        """Whether the transfer is known to be over; some backends only tell by waiting."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Tensor:
        """Return the result, once it is there."""
        if self._works:
            self._wait()
        self._works, self._kept = (), None
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result

    def _wait(self) -> None:
        entry, journal = self._entry, self._journal
        if entry is None or journal is None:
            for work in self._works:
                work.wait()
            return
        since_ns = journal.begin_wait(entry)
        try:
            for work in self._works:
                work.wait()
        except BaseException:
            journal.mark_failed(entry)
            raise
        journal.end_wait(entry, since_ns)


class P2PMessage(NamedTuple):
    """A tensor to or from another rank."""

    tensor: Tensor
    peer: int
    """Index of that rank in the group."""
    is_send: bool


class GroupCoordinator:
    """Some ranks, this one among them, in the order of their index."""

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        process_group: dist.ProcessGroup | None,
        flight_recorder: FlightRecorder,
        *,
        chosen: SelectedAlgorithms | None = None,
    ) -> None:
        """`process_group` is torch's group of the same ranks; None where there is one rank only.

        `chosen` carries out the operations that it takes; all others are the backend's own.
        """
        self.name, self.ranks, self.flight_recorder = name, ranks, flight_recorder
        self.size, self.index = len(ranks), ranks.index(rank)
        self._handle, self._chosen = process_group, chosen
        self._pairs: dict[tuple[int, bool], str] = {}
        # A device's queue outlives the call: only there is "waited for" not yet "done".
        self._queued = process_group is not None and dist.get_backend(process_group) == "nccl"
        if self.size > 1:
            flight_recorder.register_group(name, ranks)
        if self.size > 1 and process_group is None:
            raise ValueError(f"group {name} of {self.size} ranks needs torch's group")

    def __repr__(self) -> str:
        return f"Group({self.name}, {self.index} of {self.size})"

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group of these ranks as torch has it."""
        assert self._handle is not None, "a group of one rank has nobody to talk to"
        return self._handle

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, where: CallSite | None = None
    ) -> Tensor:
        """Combine every rank's tensor into the same one, in place, and return it.

        `where` is the line to be written down, for all operations; the caller's without.
        """
        return self.start_all_reduce(tensor, op, where=where).wait()

    def start_all_reduce(
        self, tensor: Tensor, op: str = "sum", *, where: CallSite | None = None
    ) -> AsyncWork:
        """Begin to combine; `op` is sum, max, min or product."""
        if self.size == 1:
            return AsyncWork(tensor)
        entry = self.flight_recorder.record(self.name, _ALL_REDUCE[op], tensor, where)
        if self._chosen is not None and self._chosen.supports("all_reduce", op):
            chosen = self._chosen
            return self._carried(entry, tensor, lambda: chosen.all_reduce(tensor, op))
        work = dist.all_reduce(tensor, _OPS[op], group=self.process_group, async_op=True)
        return self._pending(entry, tensor, work)

    def all_gather(self, tensor: Tensor, dim: int = 0, *, where: CallSite | None = None) -> Tensor:
        """Return every rank's tensor side by side along an axis."""
        return self.start_all_gather(tensor, dim, where=where).wait()

    def start_all_gather(
        self,
        tensor: Tensor,
        dim: int = 0,
        *,
        into: Tensor | None = None,
        where: CallSite | None = None,
    ) -> AsyncWork:
        """Begin to gather tensors of equal shape; along the first axis perhaps `into` memory."""
        if self.size == 1:
            return AsyncWork(tensor)
        given = tensor.contiguous()
        entry = self.flight_recorder.record(self.name, "all_gather", given, where)
        shape = (self.size, *given.shape)
        out = given.new_empty(shape) if into is None else into.view(shape)
        if self._chosen is not None and self._chosen.supports("all_gather"):
            chosen = self._chosen
            carried = self._carried(entry, out, lambda: chosen.run("all_gather", given, out))
            return AsyncWork(_beside(carried.wait(), dim))
        flat = (out.view(-1), given.view(-1))
        work = _ALL_GATHER(*flat, group=self.process_group, async_op=True)
        return self._pending(entry, out, work, lambda parts: _beside(parts, dim), given)

    def reduce_scatter(
        self, tensor: Tensor, dim: int = 0, *, where: CallSite | None = None
    ) -> Tensor:
        """Return this rank's part, along an axis, of the sum over all ranks."""
        return self.start_reduce_scatter(tensor, dim, where=where).wait()

    def start_reduce_scatter(
        self, tensor: Tensor, dim: int = 0, *, where: CallSite | None = None
    ) -> AsyncWork:
        """Begin to sum; the axis has to divide by the number of ranks."""
        if self.size == 1:
            return AsyncWork(tensor)
        given = _stacked(tensor, self.size, dim)
        entry = self.flight_recorder.record(self.name, "reduce_scatter", given, where)
        out = torch.empty_like(given[0])
        if self._chosen is not None and self._chosen.supports("reduce_scatter"):
            chosen = self._chosen
            return self._carried(entry, out, lambda: chosen.run("reduce_scatter", given, out))
        flat = (out.view(-1), given.view(-1))
        work = _REDUCE_SCATTER(*flat, group=self.process_group, async_op=True)
        return self._pending(entry, out, work, None, given)

    def all_to_all(
        self,
        tensor: Tensor,
        sent: Sequence[int] | None = None,
        got: Sequence[int] | None = None,
        *,
        where: CallSite | None = None,
    ) -> Tensor:
        """Send the i-th part of the rows to rank i; return what all sent here, in rank order."""
        return self.start_all_to_all(tensor, sent, got, where=where).wait()

    def start_all_to_all(
        self,
        tensor: Tensor,
        sent: Sequence[int] | None = None,
        got: Sequence[int] | None = None,
        *,
        where: CallSite | None = None,
    ) -> AsyncWork:
        """Begin to exchange rows: `sent` and `got` count them by rank, equal parts without."""
        if self.size == 1:
            return AsyncWork(tensor)
        given = tensor.contiguous()
        # Ranks send different numbers of rows: what must agree is that they exchange.
        entry = self.flight_recorder.record(self.name, "all_to_all", given, where, same_size=False)
        rows = given.shape[0] if got is None else sum(got)
        out = given.new_empty(rows, *given.shape[1:])
        even = sent is None and got is None
        if self._chosen is not None and even and self._chosen.supports("all_to_all"):
            chosen = self._chosen
            return self._carried(entry, out, lambda: chosen.run("all_to_all", given, out))
        splits = (None if got is None else list(got), None if sent is None else list(sent))
        work = dist.all_to_all_single(out, given, *splits, group=self.process_group, async_op=True)
        return self._pending(entry, out, work, None, given)

    def broadcast(
        self, tensor: Tensor, source: int = 0, *, where: CallSite | None = None
    ) -> Tensor:
        """Give every rank the tensor of the one with this index, in place, and return it."""
        if self.size == 1:
            return tensor
        entry = self.flight_recorder.record(self.name, "broadcast", tensor, where)
        work = dist.broadcast(tensor, group=self.process_group, group_src=source, async_op=True)
        return self._pending(entry, tensor, work).wait()

    def batch_send_recv(
        self, messages: Sequence[P2PMessage], *, where: CallSite | None = None
    ) -> list[AsyncWork]:
        """Begin sends and receives between pairs; each is waited for by itself."""
        if not messages:
            return []
        calls, entries = [], []
        for tensor, peer, sends in messages:
            entries.append(
                self.flight_recorder.record(self._pair(peer, sends), "message", tensor, where)
            )
            call = dist.isend if sends else dist.irecv
            calls.append(dist.P2POp(call, tensor, group=self.process_group, group_peer=peer))
        works = dist.batch_isend_irecv(calls)
        # NCCL makes one transfer of them all.
        own = len(works) == len(messages)
        pending = []
        for number, (entry, message) in enumerate(zip(entries, messages, strict=True)):
            mine = works[number : number + 1] if own else works
            tensor = message.tensor
            pending.append(
                AsyncWork(tensor, mine, None, tensor, entry=entry, journal=self.flight_recorder)
            )
        if self._queued:
            self.flight_recorder.in_flight = InFlightWork(entries[-1], works)
        return pending

    def _pair(self, peer: int, sends: bool) -> str:
        """Return the name of one way between this rank and another, the same on both."""
        name = self._pairs.get((peer, sends))
        if name is None:
            me, other = self.ranks[self.index], self.ranks[peer]
            ends = (me, other) if sends else (other, me)
            name = self._pairs[peer, sends] = f"{self.name} {ends[0]}>{ends[1]}"
            self.flight_recorder.register_group(name, ends)
        return name

    def _pending(
        self,
        entry: FlightRecord,
        result: Tensor,
        work: dist.Work | None,
        finish: Callable[[Tensor], Tensor] | None = None,
        kept: Any = None,
    ) -> AsyncWork:
        works = () if work is None else (work,)
        if self._queued:
            self.flight_recorder.in_flight = InFlightWork(entry, works)
        return AsyncWork(result, works, finish, kept, entry=entry, journal=self.flight_recorder)

    def _carried(self, entry: FlightRecord, result: Tensor, run: Callable[[], None]) -> AsyncWork:
        """Carry out a collective by the algorithm of choice, at once."""
        if result.numel() == 0:
            return AsyncWork(result)
        since_ns = self.flight_recorder.begin_wait(entry)
        try:
            run()
        except BaseException:
            self.flight_recorder.mark_failed(entry)
            raise
        self.flight_recorder.end_wait(entry, since_ns)
        return AsyncWork(result)

    def warm_up(self, device: torch.device) -> None:
        """Let a backend that connects at first use do so: all members, and each with the next.

        All members call it; others of the backends have nothing to do.
        """
        if self._queued:
            self.connect(device)

    def connect(self, device: torch.device) -> None:
        """Add up a number of all members, and send one both ways round."""
        self.all_reduce(torch.zeros(1, device=device))
        after, before = (self.index + 1) % self.size, (self.index - 1) % self.size
        messages = [
            P2PMessage(torch.zeros(1, device=device), peer, sends)
            for there, back in ((after, before), (before, after))
            for peer, sends in ((there, True), (back, False))
        ]
        for pending in self.batch_send_recv(messages):
            pending.wait()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1, device=_device_of(self.process_group)))


# torch 2.13 gave two of them other names.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_ALL_REDUCE = {op: f"all_reduce {op}" for op in ("sum", "max", "min", "product")}
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def _beside(parts: Tensor, dim: int) -> Tensor:
    """Lay stacked tensors side by side along an axis."""
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)


def _stacked(tensor: Tensor, ranks: int, dim: int) -> Tensor:
    """Cut an axis into equal parts and stack them."""
    if tensor.shape[dim] % ranks:
        raise ValueError(f"axis {dim} of {tuple(tensor.shape)} does not divide by {ranks} ranks")
    if dim == 0:
        return tensor.contiguous().view(ranks, -1, *tensor.shape[1:])
    return torch.stack(tensor.chunk(ranks, dim))


def _device_of(handle: dist.ProcessGroup) -> torch.device:
    if dist.get_backend(handle) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
