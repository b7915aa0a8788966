"""`Group`: ranks that exchange tensors, and every way in which they do.

All communication of training passes here, so that it is written down, timed, and carried by the
algorithm of choice in one place. A group of one rank does nothing and copies nothing. What
`start_…` returns has to be waited for; the others wait themselves (on a GPU only the stream does).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.parallel.journal import Journal


class Pending:
    """A result that may still be on its way."""

    def __init__(
        self,
        result: Tensor,
        works: Sequence[dist.Work] = (),
        finish: Callable[[Tensor], Tensor] | None = None,
        kept: Any = None,
    ) -> None:
        self._result, self._works, self._finish = result, works, finish
        self._kept = kept
        """What the transfer reads, which must not go before it ends."""

    def wait(self) -> Tensor:
        """Return the result, once it is there."""
        for work in self._works:
            work.wait()
        self._works, self._kept = (), None
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result


class Message(NamedTuple):
    """A tensor to or from another rank."""

    tensor: Tensor
    peer: int
    """Index of that rank in the group."""
    sends: bool


class Group:
    """Some ranks, this one among them, in the order of their index."""

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        handle: dist.ProcessGroup | None,
        journal: Journal,
    ) -> None:
        """`handle` is torch's group of the same ranks; None where there is one rank only."""
        self.name, self.ranks, self.journal = name, ranks, journal
        self.size, self.index = len(ranks), ranks.index(rank)
        self._handle = handle
        if self.size > 1 and handle is None:
            raise ValueError(f"group {name} of {self.size} ranks needs torch's group")

    def __repr__(self) -> str:
        return f"Group({self.name}, {self.index} of {self.size})"

    @property
    def handle(self) -> dist.ProcessGroup:
        """The group of these ranks as torch has it."""
        assert self._handle is not None, "a group of one rank has nobody to talk to"
        return self._handle

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Combine every rank's tensor into the same one, in place, and return it."""
        return self.start_all_reduce(tensor, op).wait()

    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        """Begin to combine; `op` is sum, max, min or product."""
        if self.size == 1:
            return Pending(tensor)
        self.journal.note(self.name, f"all_reduce {op}", tensor)
        work = dist.all_reduce(tensor, _OPS[op], group=self.handle, async_op=True)
        return Pending(tensor, _listed(work))

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return every rank's tensor side by side along an axis."""
        return self.start_all_gather(tensor, dim).wait()

    def start_all_gather(self, tensor: Tensor, dim: int = 0) -> Pending:
        """Begin to gather tensors of equal shape."""
        if self.size == 1:
            return Pending(tensor)
        given = tensor.contiguous()
        self.journal.note(self.name, "all_gather", given)
        out = given.new_empty(self.size, *given.shape)
        flat = (out.view(-1), given.view(-1))
        work = _ALL_GATHER(*flat, group=self.handle, async_op=True)
        return Pending(out, _listed(work), lambda parts: _beside(parts, dim), given)

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's part, along an axis, of the sum over all ranks."""
        return self.start_reduce_scatter(tensor, dim).wait()

    def start_reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Pending:
        """Begin to sum; the axis has to divide by the number of ranks."""
        if self.size == 1:
            return Pending(tensor)
        given = _stacked(tensor, self.size, dim)
        self.journal.note(self.name, "reduce_scatter", given)
        out = torch.empty_like(given[0])
        flat = (out.view(-1), given.view(-1))
        work = _REDUCE_SCATTER(*flat, group=self.handle, async_op=True)
        return Pending(out, _listed(work), None, given)

    def all_to_all(
        self, tensor: Tensor, sent: Sequence[int] | None = None, got: Sequence[int] | None = None
    ) -> Tensor:
        """Send the i-th part of the rows to rank i; return what all sent here, in rank order."""
        return self.start_all_to_all(tensor, sent, got).wait()

    def start_all_to_all(
        self, tensor: Tensor, sent: Sequence[int] | None = None, got: Sequence[int] | None = None
    ) -> Pending:
        """Begin to exchange rows: `sent` and `got` count them by rank, equal parts without."""
        if self.size == 1:
            return Pending(tensor)
        given = tensor.contiguous()
        # Ranks send different numbers of rows: what must agree is that they exchange.
        self.journal.note(self.name, "all_to_all", given[:0])
        rows = given.shape[0] if got is None else sum(got)
        out = given.new_empty(rows, *given.shape[1:])
        splits = (None if got is None else list(got), None if sent is None else list(sent))
        work = dist.all_to_all_single(out, given, *splits, group=self.handle, async_op=True)
        return Pending(out, _listed(work), None, given)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Give every rank the tensor of the one with this index, in place, and return it."""
        if self.size > 1:
            self.journal.note(self.name, "broadcast", tensor)
            dist.broadcast(tensor, group=self.handle, group_src=source)
        return tensor

    def exchange(self, messages: Sequence[Message]) -> list[Pending]:
        """Begin sends and receives between pairs; each is waited for by itself."""
        if not messages:
            return []
        calls = []
        for tensor, peer, sends in messages:
            self.journal.note(f"{self.name} {'to' if sends else 'from'} {peer}", "message", tensor)
            call = dist.isend if sends else dist.irecv
            calls.append(dist.P2POp(call, tensor, group=self.handle, group_peer=peer))
        works = dist.batch_isend_irecv(calls)
        if len(works) == len(messages):
            pairs = zip(messages, works, strict=True)
            return [Pending(each.tensor, (work,), None, each.tensor) for each, work in pairs]
        # NCCL makes one transfer of them all.
        return [Pending(each.tensor, works, None, each.tensor) for each in messages]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1, device=_device_of(self.handle)))


# torch 2.13 gave two of them other names.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def _listed(work: dist.Work | None) -> tuple[dist.Work, ...]:
    return () if work is None else (work,)


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
