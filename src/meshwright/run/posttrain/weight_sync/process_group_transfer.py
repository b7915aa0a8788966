"""`ProcessGroupTransfer`: weights between the ranks of a process group, by gloo or NCCL.

    plan = agree_on_plan(describe_shards(sources), describe_shards(targets))
    transfer = ProcessGroupTransfer(plan, sources, targets)
    transfer.send(7)

Every rank says what it has, and gets the plan; a rank may train, serve, or do both. Every rank
calls `send`; all take version 7, or none.

A seat of the plan is a rank of the default process group. What stays on its seat is copied there.
"""

from collections.abc import Mapping
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.policy.resharding.weight_transfer import (
    BUCKET_BYTES,
    FanOut,
    RankShards,
    ShardsByTensor,
    WeightBucket,
    WeightTransferPlan,
    plan_weight_transfer,
)
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.weight_sync.bucket_packing import (
    CorruptBucketError,
    compute_bucket_bytes,
    pack_bucket,
)
from meshwright.run.posttrain.weight_sync.weight_buffer import WeightBuffer
from meshwright.run.posttrain.weight_sync.weight_tensors import WeightTarget, get_slice_view


class VersionRejectedError(MeshwrightError):
    """Some rank did not get a version whole; all of them keep what they have."""


class TransferInterruptedError(MeshwrightError):
    """Ranks stopped answering while a version was sent; all of them keep what they have."""


class _Said(msgspec.Struct):
    """What one rank has of either side."""

    source: dict[str, RankShards] | None
    target: dict[str, RankShards] | None
    node: int


def agree_on_plan(
    source: ShardsByTensor | None,
    target: ShardsByTensor | None,
    *,
    fan: FanOut = "direct",
    node: int = 0,
) -> WeightTransferPlan:
    """Return the plan that follows from what all ranks have; every rank calls it.

    `node` is the machine this rank runs on, by any number.
    """
    said = _Said(
        None if source is None else dict(source), None if target is None else dict(target), node
    )
    told = gather_bytes(msgspec.msgpack.encode(said))
    every = [msgspec.msgpack.decode(each, type=_Said) for each in told]
    sources = {seat: each.source for seat, each in enumerate(every) if each.source is not None}
    targets = {seat: each.target for seat, each in enumerate(every) if each.target is not None}
    return plan_weight_transfer(
        list(sources.values()),
        list(targets.values()),
        source_seats=tuple(sources),
        target_seats=tuple(targets),
        nodes=tuple(each.node for each in every),
        fan=fan,
    )


class ProcessGroupTransfer:
    """One rank's part in sending versions."""

    def __init__(
        self,
        plan: WeightTransferPlan,
        sources: Mapping[str, ShardedTensor] | None,
        places: Mapping[str, WeightTarget] | None,
        *,
        most_bytes: int = BUCKET_BYTES,
        patience_s: float = 300.0,
    ) -> None:
        """Get ready; every rank does so at the same point, as groups for broadcasts are made."""
        self._plan, self._seat, self._device = plan, dist.get_rank(), _device()
        self._patience = timedelta(seconds=patience_s)
        self._turns = plan.schedule_buckets(most_bytes)
        self._tensors = dict(sources or {})
        every = [parcel for turn in self._turns for parcel in turn]
        for parcel in every:
            if plan.source_devices[parcel.source] == self._seat:
                for slice_ in parcel.slices:  # what is missing shows here, not while others wait
                    get_slice_view(self._tensors[slice_.tensor_name], slice_)
        self.buffer: WeightBuffer | None = None
        """What this rank gathers, where it serves."""
        if places is not None:
            rank = plan.target_devices.index(self._seat)
            self.buffer = WeightBuffer(plan, rank, places, buckets=every, on=self._device)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for parcel in every:
            seats = self._seats(parcel)
            if len(parcel.targets) > 1 and seats not in self._groups:
                made = dist.new_group(list(seats), timeout=self._patience)
                self._groups[seats] = made if isinstance(made, dist.ProcessGroup) else None

    def send(self, version: int) -> None:
        """Send a version and take it, on all ranks or on none.

        Raises:
            VersionRejectedError: where it did not come whole to some rank.
            TransferInterruptedError: where a rank stopped answering; the process group is of no
                more use then.
        """
        if self.buffer is not None:
            self.buffer.begin_version(version)
        for turn in self._turns:
            self._turn(turn, version)
        why = self._refusal()
        try:
            told = gather_flags(bool(why), self._device)
        except RuntimeError as error:
            what = f"version {version} has come, but not all ranks say so"
            raise self._broken_off(what, error) from error
        refused = [seat for seat, wrong in enumerate(told) if wrong]
        if refused:
            if self.buffer is not None:
                self.buffer.discard()
            whose = why or f"ranks {refused} did not get it whole"
            raise VersionRejectedError(f"version {version} was received by nobody: {whose}")
        if self.buffer is not None:
            self.buffer.commit()

    def _turn(self, turn: list[WeightBucket], version: int) -> None:
        """Send or get this rank's parcels of a turn, messages first, then broadcasts in order."""
        operations: list[dist.P2POp] = []
        kept: list[Tensor] = []
        shared: list[tuple[WeightBucket, Tensor]] = []
        for parcel in turn:
            own = self._plan.source_devices[parcel.source] == self._seat
            mine = self._seat in self._seats(parcel)[0 if own else 1 :]
            if not mine:
                continue
            if self._plan.is_local(parcel):
                assert self.buffer is not None
                self._pack(parcel, version, self.buffer.get_buffer(parcel))
                continue
            bytes_ = self._bytes(parcel, version, own=own)
            kept.append(bytes_)
            if len(parcel.targets) > 1:
                shared.append((parcel, bytes_))
                continue
            other = self._seats(parcel)[1 if own else 0]
            operations.append(dist.P2POp(dist.isend if own else dist.irecv, bytes_, other))
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
            for parcel, bytes_ in shared:
                seats = self._seats(parcel)
                works.append(
                    dist.broadcast(bytes_, seats[0], group=self._groups[seats], async_op=True)
                )
            for work in works:
                work.wait(self._patience)
        except RuntimeError as error:
            among = sorted({seat for parcel in turn for seat in self._seats(parcel)})
            what = f"version {version} broke off between ranks {among}"
            raise self._broken_off(what, error) from error

    def _broken_off(self, what: str, error: RuntimeError) -> TransferInterruptedError:
        """Drop what has come; return what to raise."""
        if self.buffer is not None:
            self.buffer.discard()
        return TransferInterruptedError(f"{what}; look at the last words of each: {error}")

    def _bytes(self, bucket: WeightBucket, version: int, *, own: bool) -> Tensor:
        if not own:
            assert self.buffer is not None
            return self.buffer.get_buffer(bucket)
        made = torch.empty(compute_bucket_bytes(bucket), dtype=torch.uint8, device=self._device)
        self._pack(bucket, version, made)
        return made

    def _pack(self, bucket: WeightBucket, version: int, into: Tensor) -> None:
        pack_bucket(bucket, self._tensors, version, self._plan.digest, into)

    def _seats(self, bucket: WeightBucket) -> tuple[int, ...]:
        """The rank that sends a parcel, and those that get it."""
        plan = self._plan
        return (
            plan.source_devices[bucket.source],
            *(plan.target_devices[to] for to in bucket.targets),
        )

    def _refusal(self) -> str:
        """Say why this rank cannot take what has come; empty where it can."""
        if self.buffer is None:
            return ""
        try:
            for parcel in self.buffer.buckets:
                self.buffer.accept_bucket(parcel)
        except CorruptBucketError as error:
            return str(error)
        return ""


def _device() -> torch.device:
    """Return where the backend takes bytes from."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gather_flags(mine: bool, device: torch.device | None = None) -> list[bool]:
    """Return what every rank says to a question."""
    device = device or _device()
    said = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
    said[dist.get_rank()] = int(mine)
    dist.all_reduce(said)
    return [bool(each) for each in said.tolist()]


def gather_bytes(said: bytes) -> list[bytes]:
    """Return what every rank says, as bytes: nothing of it is run."""
    device = _device()
    code = torch.frombuffer(bytearray(said), dtype=torch.uint8).to(device)
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    sizes[dist.get_rank()] = len(code)
    dist.all_reduce(sizes)
    lengths: list[int] = sizes.tolist()
    mine = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    mine[: len(code)] = code
    every = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(every, mine)
    return [
        each[:length].cpu().numpy().tobytes() for each, length in zip(every, lengths, strict=True)
    ]
