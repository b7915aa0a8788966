"""`CommandChannel`: what the first rank tells the others to do, and how these wait for it.

Orders travel as plain data that no receiver runs. A bell in the job's store says that one has come:
who waits for minutes while others draw must not do so inside a collective, which torch would end.
The wait stands in the journal like any other, so that the alarm names who is waited for; between
two orders the first rank is excused, as its own patience (`stall_timeout_s`) watches what it does
then.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from meshwright.errors import MeshwrightError
from meshwright.policy.resharding.weight_transfer import RankShards
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.posttrain.rollout.generator import RolloutGroup

_DRAWS = "draws and judges rollouts"
_LONGEST_S = 7 * 86_400.0
"""How long that may take before the others give the first rank up."""
_LOOK_S = (0.001, 0.05)
"""Between two looks at the bell: a tenth of what was waited, within these bounds."""


class LeadRankLostError(MeshwrightError):
    """The rank that gives orders is gone, or the store with it."""


class BeginCommand(msgspec.Struct, frozen=True, tag="begin"):
    """Warm up, or take up the last checkpoint."""

    resumes: bool
    """Whether there is one."""


class TrainCommand(msgspec.Struct, frozen=True, tag="learn"):
    """Train on groups, as a step counted from 0."""

    step: int
    groups: list[RolloutGroup]


class SaveCommand(msgspec.Struct, frozen=True, tag="save"):
    """Write a checkpoint."""

    trained_steps: int


class OfferWeightsCommand(msgspec.Struct, frozen=True, tag="offer"):
    """Say what there is of the weights, and where versions will lie."""

    folder: str


class PlanTransferCommand(msgspec.Struct, frozen=True, tag="agree"):
    """Make the plan by what the ranks of an engine want."""

    targets: list[dict[str, RankShards]]


class PublishWeightsCommand(msgspec.Struct, frozen=True, tag="post"):
    """Lay a version of the weights out."""

    version: int


class EndCommand(msgspec.Struct, frozen=True, tag="end"):
    """Leave: the run is over."""


TrainerCommand = (
    BeginCommand
    | TrainCommand
    | SaveCommand
    | OfferWeightsCommand
    | PlanTransferCommand
    | PublishWeightsCommand
    | EndCommand
)
_decoder = msgspec.msgpack.Decoder(TrainerCommand)


class CommandChannel:
    """The way of orders; every rank makes one at the same point."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        shared = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other way
        life = shared.add(f"meshwright/loops/{mesh.rank}", 1)  # a process may run one after another
        own: Any = PrefixStore(f"meshwright/loop/{life}", shared)
        self._store: Store = own.clone()  # torch's types do not know of it
        self._number = 0

    @contextmanager
    def issue(self, order: TrainerCommand) -> Iterator[None]:
        """Tell the others what to do, and do it with them inside."""
        journal = self.mesh.flight_recorder
        journal.expected_delay = ("", 0.0)
        data, before = msgspec.msgpack.encode(order), self._number
        self._number += 1
        journal.record(self.mesh.world.name, "order", torch.empty(0))
        self._store.set(f"{self._number}", str(len(data)))
        self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if before:
            self._store.delete_key(f"{before}")  # all have read it, or were not here
        yield
        journal.expected_delay = (_DRAWS, time.monotonic() + _LONGEST_S)

    def receive(self) -> TrainerCommand:
        """Wait for an order.

        Raises:
            LeadRankLostError: where nobody can give one any more.
        """
        journal = self.mesh.flight_recorder
        self._number += 1
        entry = journal.record(self.mesh.world.name, "order", torch.empty(0))
        since_ns = journal.begin_wait(entry)
        try:
            size = self._heard(f"{self._number}")
        except RuntimeError as error:
            journal.mark_failed(entry)
            raise LeadRankLostError(f"no more orders come: {error}") from error
        journal.end_wait(entry, since_ns)
        found = self._broadcast(torch.empty(size, dtype=torch.uint8))
        order: TrainerCommand = _decoder.decode(found.numpy().tobytes())
        return order

    def _heard(self, bell: str) -> int:
        began_s, (least_s, most_s) = time.monotonic(), _LOOK_S
        while not self._store.check([bell]):
            waited_s = time.monotonic() - began_s
            time.sleep(min(most_s, max(least_s, waited_s / 10)))
        return int(self._store.get(bell))

    def _broadcast(self, data: torch.Tensor) -> torch.Tensor:
        return self.mesh.world.broadcast(data.to(self.mesh.device)).cpu()


def gather_bytes(group: GroupCoordinator, said: bytes, device: torch.device) -> list[bytes]:
    """Return what every rank of a group says, as bytes: nothing of it is run."""
    mine = torch.frombuffer(bytearray(said), dtype=torch.uint8).to(device)
    sizes = group.all_gather(torch.tensor([len(mine)], device=device)).tolist()
    room = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    room[: len(mine)] = mine
    every = group.all_gather(room).view(group.size, -1).cpu()
    return [each[:size].numpy().tobytes() for each, size in zip(every, sizes, strict=True)]
