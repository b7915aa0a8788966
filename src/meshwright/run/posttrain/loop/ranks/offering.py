"""The way of weights from all ranks of a trainer to the engines of the first.

    posting = Posting(state.sync, mesh, folder)     on every rank, when `Offer` is ordered
    posting.agree(targets)                          all make the same plan, by what engines want
    posting.post(7)                                 each lays its slices out; all have when it ends

A version lies in memory of the first rank's machine, a file for each source: ranks that see the
folder write theirs, others send parcel by parcel to the first, which writes them. The model is
nowhere put together on a device. An engine takes a version whole, from sealed parcels, or not.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from meshwright.policy.transfer import Held, Holds, Parcel, Transfer
from meshwright.run.parallel.group import Message
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.sync import Sync
from meshwright.run.posttrain.loop.ranks.orders import Agree, Offer, Orders, Post, told_by_all
from meshwright.run.posttrain.weights.offered import Offered, plan_of
from meshwright.run.posttrain.weights.packing import pack, parcel_bytes
from meshwright.run.posttrain.weights.serving import engine_places, take
from meshwright.run.posttrain.weights.shared_memory import Fetched, Posted, laid_out, lay_out
from meshwright.run.posttrain.weights.taking import PATIENCE_S
from meshwright.run.posttrain.weights.tensors import held, of_sync
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.upkeep import Upkeep


class _Said(msgspec.Struct, frozen=True):
    """What a rank has, and whether it can write where versions lie."""

    holds: dict[str, Held]
    near: bool


class Posting:
    """One rank's part in laying versions out."""

    def __init__(self, sync: Sync, mesh: Mesh, folder: Path) -> None:
        """Say what this rank has, and hear what all have; every rank does so at one point."""
        self._mesh, self._folder = mesh, folder
        # What a rank updates: with ZeRO that is its own part, so that no two write the same.
        self._tensors = of_sync(sync)
        mine = _Said(held(self._tensors), sees(folder))
        told = told_by_all(mesh.world, msgspec.msgpack.encode(mine), mesh.device)
        said = [msgspec.msgpack.decode(each, type=_Said) for each in told]
        self.holds: list[dict[str, Held]] = [each.holds for each in said]
        """Of all ranks, in their order."""
        self.far = [rank for rank, each in enumerate(said) if not each.near]
        """Ranks of other machines."""
        self._plan: Transfer | None = None

    def agree(self, targets: Sequence[Holds]) -> Transfer:
        """Make the plan by what the ranks of an engine want."""
        self._plan = plan_of(self.holds, targets)
        self._posted = Posted(self._plan, self._mesh.rank, self._tensors, self._folder)
        return self._plan

    def post(self, version: int) -> None:
        """Lay this rank's slices out; those of all ranks lie there afterwards."""
        rank = self._mesh.rank
        if rank not in self.far:
            self._posted.post(version)
        for source in self.far:
            if source == rank:
                self._send(version)
            elif rank == 0:
                self._write_for(source, version)
        self._mesh.world.barrier()

    def _parcels(self, source: int) -> list[Parcel]:
        assert self._plan is not None, "ranks agree on a plan first"
        return [each for each in self._plan.parcels() if each.source == source]

    def _send(self, version: int) -> None:
        assert self._plan is not None, "ranks agree on a plan first"
        for parcel in self._parcels(self._mesh.rank):
            room = self._room(parcel)
            pack(parcel, self._tensors, version, self._plan.digest, room)
            self._exchange(Message(room, 0, sends=True))

    def _write_for(self, source: int, version: int) -> None:
        parcels = self._parcels(source)

        def write(file: Tensor) -> None:
            for parcel, start in laid_out(parcels):
                room = self._room(parcel)
                self._exchange(Message(room, source, sends=False))
                file[start : start + len(room)].copy_(room)

        lay_out(self._folder, version, source, sum(map(parcel_bytes, parcels)), write)

    def _room(self, parcel: Parcel) -> Tensor:
        return torch.empty(parcel_bytes(parcel), dtype=torch.uint8, device=self._mesh.device)

    def _exchange(self, message: Message) -> None:
        for pending in self._mesh.world.exchange([message]):
            pending.wait()


def sees(folder: Path) -> bool:
    """Tell whether this rank is on the machine of the first, whose folder has a name of chance."""
    return folder.is_dir()


class OfferedByRanks(Offered):
    """What all ranks of a trainer have for engines; the first rank makes it and gives the orders.

    Orders are given by the thread that trains: `lay` has to be called there. Whoever looks after
    engines may then `post` the version in a thread of its own.
    """

    def __init__(self, sync: Sync, orders: Orders) -> None:
        super().__init__(())
        self._orders, self._laid = orders, 0
        with orders.giving(Offer(str(self.folder))):
            self._posting = Posting(sync, orders.mesh, self.folder)
        self.holds = self._posting.holds

    def agree(self, targets: Sequence[Holds]) -> None:
        """Make the plan by what the ranks of an engine want; all engines have to want the same."""
        if self.plan is not None:
            super().agree(targets)
            return
        # Found wanting, it is refused here, before others are asked to make it.
        self.plan = plan_of(self.holds, targets)
        with self._orders.giving(Agree([dict(each) for each in targets])):
            self._posting.agree(targets)

    def lay(self, version: int) -> None:
        """Let all ranks lay a version out, unless they have."""
        if version not in (self._laid, self.version):
            with self._orders.giving(Post(version)):
                self._posting.post(version)
            self._laid = version

    def post(self, version: int) -> None:
        """Offer a version, from now on also to engines that are started anew."""
        self.lay(version)
        self.version = version


class TakenHere:
    """An engine of the first rank's process, which takes what all ranks offer."""

    def __init__(self, offered: OfferedByRanks, engine: Engine, upkeep: Upkeep) -> None:
        self._offered, self._engine, self._upkeep = offered, engine, upkeep
        places = engine_places(engine)
        offered.agree([held(places)])
        assert offered.plan is not None, "both sides have agreed"
        self._fetched = Fetched(offered.plan, 0, places, offered.folder)

    def update(self, version: int) -> None:
        """Let the engine take a version; it keeps what it has where that does not come whole."""
        self._offered.post(version)
        self._fetched.gather(version, patience_s=PATIENCE_S)
        take(self._fetched.arrivals, self._engine, self._upkeep)
        self._offered.settle(keep=False)
