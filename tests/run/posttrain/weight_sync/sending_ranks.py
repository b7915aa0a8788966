"""What real ranks do: some train, some serve, one may do both."""

import os
from pathlib import Path

import torch.distributed as dist

from meshwright.policy.resharding.weight_transfer import FanOut, WeightBucket, WeightTransferPlan
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.weight_sync import bucket_packing
from meshwright.run.posttrain.weight_sync.process_group_transfer import (
    ProcessGroupTransfer,
    TransferInterruptedError,
    VersionRejectedError,
    agree_on_plan,
)
from meshwright.run.posttrain.weight_sync.shared_memory_transfer import (
    SharedMemoryReader,
    SharedMemoryWriter,
)
from meshwright.run.posttrain.weight_sync.weight_tensors import WeightTarget, describe_shards
from meshwright.spec.layout import Layout
from tests.run.posttrain.weight_sync.virtual_ranks import (
    DENSE,
    differing,
    rank_served,
    rank_sources,
)


def planned(
    mine: dict[str, ShardedTensor] | None,
    places: dict[str, WeightTarget] | None,
    fan: FanOut = "direct",
) -> WeightTransferPlan:
    """Agree with all ranks on a plan."""
    source = None if mine is None else describe_shards(mine)
    return agree_on_plan(source, None if places is None else describe_shards(places), fan=fan)


def sent(trainer: Layout, engine: Layout, together: bool, fan: FanOut, fp8: bool) -> list[str]:
    """Send two versions; return what differs from what an engine of the same seed would have."""
    seat = dist.get_rank()
    behind = 0 if together else trainer.gpus
    mine = rank_sources(DENSE, trainer, seat) if seat < trainer.gpus else None
    places: dict[str, WeightTarget] | None = None
    if behind <= seat < behind + engine.gpus:
        places = rank_served(DENSE, engine, seat - behind, seed=2, fp8=fp8)
    plan = agree_on_plan(
        None if mine is None else describe_shards(mine),
        None if places is None else describe_shards(places),
        fan=fan,
    )
    messages = ProcessGroupTransfer(plan, mine, places, most_bytes=2048)
    messages.send(1)
    messages.send(2)
    if places is None:
        return []
    assert messages.buffer is not None
    assert messages.buffer.version == 2
    return differing([places], [rank_served(DENSE, engine, seat - behind, seed=1, fp8=fp8)])


def damaged(trainer: Layout, engine: Layout) -> tuple[str, list[str]]:
    """Damage a parcel on one way; return what is said, and what of the old weights has changed."""
    seat = dist.get_rank()
    mine = rank_sources(DENSE, trainer, seat) if seat < trainer.gpus else None
    number = seat - trainer.gpus
    places = None if number < 0 else rank_served(DENSE, engine, number, seed=2, fp8=False)
    plan = planned(mine, places)
    messages = ProcessGroupTransfer(plan, mine, places, most_bytes=2048)
    if number == engine.gpus - 1:
        assert messages.buffer is not None
        accept, victim = messages.buffer.accept_bucket, messages.buffer.buckets[-1]
        arrivals = messages.buffer

        def accept_damaged(bucket: WeightBucket) -> None:
            if bucket is victim:
                arrivals.get_buffer(bucket)[3] ^= 4
            accept(bucket)

        arrivals.accept_bucket = accept_damaged  # type: ignore[method-assign]
    said = ""
    try:
        messages.send(1)
    except VersionRejectedError as error:
        said = str(error)
    if places is None:
        return said, []
    return said, differing([places], [rank_served(DENSE, engine, number, seed=2, fp8=False)])


def deserted(trainer: Layout, engine: Layout) -> tuple[str, list[str]]:
    """Let the first source die before it sends; return what is said, and what has changed."""
    seat, number = dist.get_rank(), dist.get_rank() - trainer.gpus
    mine = rank_sources(DENSE, trainer, seat) if number < 0 else None
    places = None if number < 0 else rank_served(DENSE, engine, number, seed=2, fp8=False)
    messages = ProcessGroupTransfer(planned(mine, places), mine, places, patience_s=20)
    if seat == 0:
        os._exit(7)
    said = ""
    try:
        messages.send(1)
    except TransferInterruptedError as error:
        said = str(error)
    if places is None:
        return said, []
    assert messages.buffer is not None
    assert messages.buffer.version == 0
    return said, differing([places], [rank_served(DENSE, engine, number, seed=2, fp8=False)])


def shared(folder: Path, trainer: Layout, engine: Layout) -> list[str]:
    """Post on some processes, fetch on others; return what differs."""
    seat = dist.get_rank()
    mine = rank_sources(DENSE, trainer, seat) if seat < trainer.gpus else None
    number = seat - trainer.gpus
    places = None if number < 0 else rank_served(DENSE, engine, number, seed=2, fp8=False)
    plan = agree_on_plan(
        None if mine is None else describe_shards(mine),
        None if places is None else describe_shards(places),
        fan="broadcast",
    )
    if mine is not None:
        posted = SharedMemoryWriter(plan, seat, mine, folder, most_bytes=2048)
        assert posted.write(1) >= bucket_packing.TRAILER_BYTES
        dist.barrier()
        posted.remove(1)
        return []
    assert places is not None
    fetched = SharedMemoryReader(plan, number, places, folder, most_bytes=2048)
    fetched.load(1, patience_s=60)
    dist.barrier()
    return differing([places], [rank_served(DENSE, engine, number, seed=1, fp8=False)])
