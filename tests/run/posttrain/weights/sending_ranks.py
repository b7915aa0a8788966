"""What real ranks do: some train, some serve, one may do both."""

import os
from pathlib import Path

import torch.distributed as dist

from meshwright.policy.transfer import Fan, Parcel, Transfer
from meshwright.run.nn.placed import Placed
from meshwright.run.posttrain.weights import packing
from meshwright.run.posttrain.weights.messages import BrokenOff, Messages, VersionRefused, agree
from meshwright.run.posttrain.weights.shared_memory import Fetched, Posted
from meshwright.run.posttrain.weights.tensors import Place, held
from meshwright.spec.layout import Layout
from tests.run.posttrain.weights.virtual_ranks import DENSE, differing, rank_served, rank_sources


def planned(
    mine: dict[str, Placed] | None, places: dict[str, Place] | None, fan: Fan = "direct"
) -> Transfer:
    """Agree with all ranks on a plan."""
    source = None if mine is None else held(mine)
    return agree(source, None if places is None else held(places), fan=fan)


def sent(trainer: Layout, engine: Layout, together: bool, fan: Fan, fp8: bool) -> list[str]:
    """Send two versions; return what differs from what an engine of the same seed would have."""
    seat = dist.get_rank()
    behind = 0 if together else trainer.gpus
    mine = rank_sources(DENSE, trainer, seat) if seat < trainer.gpus else None
    places: dict[str, Place] | None = None
    if behind <= seat < behind + engine.gpus:
        places = rank_served(DENSE, engine, seat - behind, seed=2, fp8=fp8)
    plan = agree(
        None if mine is None else held(mine), None if places is None else held(places), fan=fan
    )
    messages = Messages(plan, mine, places, most_bytes=2048)
    messages.send(1)
    messages.send(2)
    if places is None:
        return []
    assert messages.arrivals is not None
    assert messages.arrivals.version == 2
    return differing([places], [rank_served(DENSE, engine, seat - behind, seed=1, fp8=fp8)])


def damaged(trainer: Layout, engine: Layout) -> tuple[str, list[str]]:
    """Damage a parcel on one way; return what is said, and what of the old weights has changed."""
    seat = dist.get_rank()
    mine = rank_sources(DENSE, trainer, seat) if seat < trainer.gpus else None
    number = seat - trainer.gpus
    places = None if number < 0 else rank_served(DENSE, engine, number, seed=2, fp8=False)
    plan = planned(mine, places)
    messages = Messages(plan, mine, places, most_bytes=2048)
    if number == engine.gpus - 1:
        assert messages.arrivals is not None
        accept, victim = messages.arrivals.accept, messages.arrivals.mine[-1]
        arrivals = messages.arrivals

        def accept_damaged(parcel: Parcel) -> None:
            if parcel is victim:
                arrivals.room(parcel)[3] ^= 4
            accept(parcel)

        arrivals.accept = accept_damaged  # type: ignore[method-assign]
    said = ""
    try:
        messages.send(1)
    except VersionRefused as error:
        said = str(error)
    if places is None:
        return said, []
    return said, differing([places], [rank_served(DENSE, engine, number, seed=2, fp8=False)])


def deserted(trainer: Layout, engine: Layout) -> tuple[str, list[str]]:
    """Let the first source die before it sends; return what is said, and what has changed."""
    seat, number = dist.get_rank(), dist.get_rank() - trainer.gpus
    mine = rank_sources(DENSE, trainer, seat) if number < 0 else None
    places = None if number < 0 else rank_served(DENSE, engine, number, seed=2, fp8=False)
    messages = Messages(planned(mine, places), mine, places, patience_s=20)
    if seat == 0:
        os._exit(7)
    said = ""
    try:
        messages.send(1)
    except BrokenOff as error:
        said = str(error)
    if places is None:
        return said, []
    assert messages.arrivals is not None
    assert messages.arrivals.version == 0
    return said, differing([places], [rank_served(DENSE, engine, number, seed=2, fp8=False)])


def shared(folder: Path, trainer: Layout, engine: Layout) -> list[str]:
    """Post on some processes, fetch on others; return what differs."""
    seat = dist.get_rank()
    mine = rank_sources(DENSE, trainer, seat) if seat < trainer.gpus else None
    number = seat - trainer.gpus
    places = None if number < 0 else rank_served(DENSE, engine, number, seed=2, fp8=False)
    plan = agree(
        None if mine is None else held(mine),
        None if places is None else held(places),
        fan="broadcast",
    )
    if mine is not None:
        posted = Posted(plan, seat, mine, folder, most_bytes=2048)
        assert posted.post(1) >= packing.SEAL_BYTES
        dist.barrier()
        posted.withdraw(1)
        return []
    assert places is not None
    fetched = Fetched(plan, number, places, folder, most_bytes=2048)
    fetched.fetch(1, patience_s=60)
    dist.barrier()
    return differing([places], [rank_served(DENSE, engine, number, seed=1, fp8=False)])
