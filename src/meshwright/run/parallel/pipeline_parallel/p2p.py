"""`P2PCommunicator`: what passes from chunk to chunk of a pipeline, within a rank or between two.

Streams go forward and their gradients backward, each addressed to the chunk that reads it. A
receive is posted where the rank's lane has it and waited for where it is used; what is sent is kept
until it has left.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.policy.pipeline.schedule import PipelineAction, PipelineSchedule
from meshwright.run.parallel.group_coordinator import AsyncWork, GroupCoordinator, P2PMessage

PassDirection = Literal["forward", "backward"]


class _Address(NamedTuple):
    """Who reads something."""

    way: PassDirection
    chunk: int
    microbatch: int


class P2PCommunicator:
    """The tensors of one step that are between two chunks."""

    def __init__(
        self,
        group: GroupCoordinator,
        pipeline_schedule: PipelineSchedule,
        shapes: Sequence[torch.Size],
        *,
        dtype: torch.dtype,
        device: torch.device,
        overlap: bool = True,
    ) -> None:
        """`shapes` gives the stream's by microbatch; `overlap` lets transfers run on behind."""
        self.group, self.pipeline_schedule, self.shapes = group, pipeline_schedule, shapes
        self.dtype, self.device, self.overlap = dtype, device, overlap
        self._here: dict[_Address, Tensor | AsyncWork] = {}
        self._leaving: list[AsyncWork] = []

    def put(self, way: PassDirection, chunk: int, microbatch: int, tensor: Tensor) -> None:
        """Leave a result for the chunk that reads it, or for the send that takes it there."""
        self._here[_Address(way, chunk, microbatch)] = tensor

    def pop(self, way: PassDirection, chunk: int, microbatch: int) -> Tensor:
        """Return what a chunk reads, once it is there."""
        found = self._here.pop(_Address(way, chunk, microbatch))
        return found.wait() if isinstance(found, AsyncWork) else found

    def start_transfers(self, batch: Sequence[PipelineAction]) -> None:
        """Begin the transfers of a batch."""
        addresses = [_address(action) for action in batch]
        messages = []
        for action, address in zip(batch, addresses, strict=True):
            sends = action.op.startswith("send")
            if sends:
                tensor = self.pop(*address).contiguous()
            else:
                shape = self.shapes[action.microbatch]
                tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
            messages.append(P2PMessage(tensor, self.pipeline_schedule.peer_rank(action), sends))
        started = self.group.batch_send_recv(messages)
        self._let_go()
        for message, address, pending in zip(messages, addresses, started, strict=True):
            if not self.overlap:
                pending.wait()
            if message.is_send:
                self._leaving.append(pending)
            else:
                self._here[address] = pending

    def _let_go(self) -> None:
        """Drop what has left: the wait does not last, and raises what went wrong on the way."""
        leaving = []
        for pending in self._leaving:
            if pending.is_completed:
                pending.wait()
            else:
                leaving.append(pending)
        self._leaving = leaving

    def wait_all(self) -> None:
        """Wait until all that was sent has left."""
        for pending in self._leaving:
            pending.wait()
        self._leaving = []
        assert not self._here, f"nobody read {list(self._here)}"


def _address(action: PipelineAction) -> _Address:
    """Return who reads what a transfer carries; it names the chunk of the rank that acts."""
    op, chunk, microbatch, _ = action
    way: PassDirection = "forward" if op.endswith("forward") else "backward"
    if op.startswith("send"):
        chunk += 1 if way == "forward" else -1
    return _Address(way, chunk, microbatch)
