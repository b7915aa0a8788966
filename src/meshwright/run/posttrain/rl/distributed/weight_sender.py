"""The way of weights from all ranks of a trainer to the engines of the first.

    sender = RankWeightSender(sync, mesh, folder)   on every rank, at `OfferWeightsCommand`
    sender.plan_transfer(targets)                   all make the same plan, by what engines want
    sender.publish(7)                               each lays its slices out; all have when it ends

A version lies in memory of the first rank's machine, a file for each source: ranks that see the
folder write theirs, others send parcel by parcel to the first, which writes them. The model is
nowhere put together on a device. An engine takes a version whole, from sealed parcels, or not.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from meshwright.policy.resharding.weight_transfer import (
    RankShards,
    ShardsByTensor,
    WeightBucket,
    WeightTransferPlan,
)
from meshwright.run.parallel.group_coordinator import P2PMessage
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.zero.gradient_sync import Sync
from meshwright.run.posttrain.rl.distributed.commands import (
    CommandChannel,
    OfferWeightsCommand,
    PlanTransferCommand,
    PublishWeightsCommand,
    gather_bytes,
)
from meshwright.run.posttrain.weight_sync.bucket_packing import compute_bucket_bytes, pack_bucket
from meshwright.run.posttrain.weight_sync.engine_weights import (
    collect_engine_targets,
    commit_to_engine,
)
from meshwright.run.posttrain.weight_sync.shared_memory_transfer import (
    SharedMemoryReader,
    SharedMemoryWriter,
    compute_bucket_offsets,
    write_version_file,
)
from meshwright.run.posttrain.weight_sync.weight_receiver import VERSION_TIMEOUT_S
from meshwright.run.posttrain.weight_sync.weight_sender import WeightSender, plan_sender_transfer
from meshwright.run.posttrain.weight_sync.weight_tensors import (
    collect_sharded_weights,
    describe_shards,
)
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.lifecycle import EngineLifecycle


class _Said(msgspec.Struct, frozen=True):
    """What a rank has, and whether it can write where versions lie."""

    holds: dict[str, RankShards]
    near: bool


class RankWeightSender:
    """One rank's part in laying versions out."""

    def __init__(self, sync: Sync, mesh: Mesh, folder: Path) -> None:
        """Say what this rank has, and hear what all have; every rank does so at one point."""
        self._mesh, self._folder = mesh, folder
        # What a rank updates: with ZeRO that is its own part, so that no two write the same.
        self._tensors = collect_sharded_weights(sync)
        mine = _Said(describe_shards(self._tensors), shares_folder(folder))
        told = gather_bytes(mesh.world, msgspec.msgpack.encode(mine), mesh.device)
        said = [msgspec.msgpack.decode(each, type=_Said) for each in told]
        self.shards: list[dict[str, RankShards]] = [each.holds for each in said]
        """Of all ranks, in their order."""
        self.remote_ranks = [rank for rank, each in enumerate(said) if not each.near]
        """Ranks of other machines."""
        self._plan: WeightTransferPlan | None = None

    def plan_transfer(self, targets: Sequence[ShardsByTensor]) -> WeightTransferPlan:
        """Make the plan by what the ranks of an engine want."""
        self._plan = plan_sender_transfer(self.shards, targets)
        self._posted = SharedMemoryWriter(self._plan, self._mesh.rank, self._tensors, self._folder)
        return self._plan

    def publish(self, version: int) -> None:
        """Lay this rank's slices out; those of all ranks lie there afterwards."""
        rank = self._mesh.rank
        if rank not in self.remote_ranks:
            self._posted.write(version)
        for source in self.remote_ranks:
            if source == rank:
                self._send(version)
            elif rank == 0:
                self._write_for(source, version)
        self._mesh.world.barrier()

    def _parcels(self, source: int) -> list[WeightBucket]:
        assert self._plan is not None, "ranks agree on a plan first"
        return [each for each in self._plan.make_buckets() if each.source == source]

    def _send(self, version: int) -> None:
        assert self._plan is not None, "ranks agree on a plan first"
        for parcel in self._parcels(self._mesh.rank):
            room = self._room(parcel)
            pack_bucket(parcel, self._tensors, version, self._plan.digest, room)
            self._exchange(P2PMessage(room, 0, is_send=True))

    def _write_for(self, source: int, version: int) -> None:
        parcels = self._parcels(source)

        def write(file: Tensor) -> None:
            for parcel, start in compute_bucket_offsets(parcels):
                room = self._room(parcel)
                self._exchange(P2PMessage(room, source, is_send=False))
                file[start : start + len(room)].copy_(room)

        write_version_file(
            self._folder, version, source, sum(map(compute_bucket_bytes, parcels)), write
        )

    def _room(self, bucket: WeightBucket) -> Tensor:
        return torch.empty(
            compute_bucket_bytes(bucket), dtype=torch.uint8, device=self._mesh.device
        )

    def _exchange(self, message: P2PMessage) -> None:
        for pending in self._mesh.world.batch_send_recv([message]):
            pending.wait()


def shares_folder(folder: Path) -> bool:
    """Tell whether this rank is on the machine of the first, whose folder has a name of chance."""
    return folder.is_dir()


class DistributedWeightSender(WeightSender):
    """What all ranks of a trainer have for engines; the first rank makes it and gives the orders.

    Orders are given by the thread that trains: `publish_if_new` has to be called there. Whoever
    looks after engines may then `publish` the version in a thread of its own.
    """

    def __init__(self, sync: Sync, orders: CommandChannel) -> None:
        super().__init__(())
        self._orders, self._laid = orders, 0
        with orders.issue(OfferWeightsCommand(str(self.folder))):
            self._posting = RankWeightSender(sync, orders.mesh, self.folder)
        self.shards = self._posting.shards

    def plan_transfer(self, targets: Sequence[ShardsByTensor]) -> None:
        """Make the plan by what the ranks of an engine want; all engines have to want the same."""
        if self.plan is not None:
            super().plan_transfer(targets)
            return
        # Found wanting, it is refused here, before others are asked to make it.
        self.plan = plan_sender_transfer(self.shards, targets)
        with self._orders.issue(PlanTransferCommand([dict(each) for each in targets])):
            self._posting.plan_transfer(targets)

    def publish_if_new(self, version: int) -> None:
        """Let all ranks lay a version out, unless they have."""
        if version not in (self._laid, self.version):
            with self._orders.issue(PublishWeightsCommand(version)):
                self._posting.publish(version)
            self._laid = version

    def publish(self, version: int) -> None:
        """Offer a version, from now on also to engines that are started anew."""
        self.publish_if_new(version)
        self.version = version


class LocalWeightReceiver:
    """An engine of the first rank's process, which takes what all ranks offer."""

    def __init__(
        self, sender: DistributedWeightSender, engine: Engine, lifecycle: EngineLifecycle
    ) -> None:
        self._offered, self._engine, self._upkeep = sender, engine, lifecycle
        places = collect_engine_targets(engine)
        sender.plan_transfer([describe_shards(places)])
        assert sender.plan is not None, "both sides have agreed"
        self._fetched = SharedMemoryReader(sender.plan, 0, places, sender.folder)

    def update(self, version: int) -> None:
        """Let the engine take a version; it keeps what it has where that does not come whole."""
        self._offered.publish(version)
        self._fetched.verify(version, patience_s=VERSION_TIMEOUT_S)
        commit_to_engine(self._fetched.buffer, self._engine, self._upkeep)
        self._offered.release_old_versions(keep=False)
