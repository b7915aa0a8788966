"""An MSCCL++ plan over one switch: owners add up their chunks in the switch and send them to all.

The executor can load a sum from the switch and store it to all members at once (`glres`), and store
a chunk to all members (`gstore`). It cannot load a sum for one member only, so reduce-scatter and
reductions between nodes are left to sends.
"""

from typing import Any

from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.contract import list_input_slots
from meshwright.policy.collective.formats.mscclpp_puts import NOP, Json, MscclppPlan

_MOST_CHANNELS = 16
"""Channels of a thread block (MAX_CHANNEL)."""
_CHANNELS_AT_ONCE = 8
"""Channels of an operation (MAX_CHANNEL_PER_OPERATION)."""
_MOST_STORES = 32
"""Stores of a thread block; waits and signals need the rest of its operations."""


def find_switch_owners(collective: Collective) -> list[int] | None:
    """Return who handles each chunk, where all of a collective goes through one switch."""
    ranks, chunks = collective.ranks, collective.chunks
    if len(collective.switches) != 1 or not 2 <= ranks <= _MOST_CHANNELS + 1:
        return None
    if collective.op not in ("all_reduce", "all_gather", "broadcast"):
        return None
    givers: list[set[int]] = [set() for _ in range(chunks)]
    owners = [chunk * ranks // chunks for chunk in range(chunks)]
    for _, moves in collective.iterate_steps():
        single = moves.split_by_slot()
        for src, dst, src_slot, adds in zip(
            single.src.tolist(),
            single.dst.tolist(),
            single.src_slot.tolist(),
            single.adds.tolist(),
            strict=True,
        ):
            if ranks not in (src, dst) or src_slot >= chunks:
                return None
            if dst == ranks and adds:
                givers[src_slot].add(src)
            elif dst == ranks:
                owners[src_slot] = src
    if collective.op == "all_reduce":
        return owners if all(len(given) == ranks for given in givers) else None
    return (
        owners if all(c in list_input_slots(collective, owners[c]) for c in range(chunks)) else None
    )


def build_switch_plan(collective: Collective, owners: list[int], *, shared: bool) -> MscclppPlan:
    """Return the plan in which owners work on the switch between two meetings of all ranks."""
    stores = [_stores(collective, owners, rank, shared=shared) for rank in range(collective.ranks)]
    blocks = max(-(-len(own) // _MOST_STORES) for own in stores)
    gpus = [_gpu(collective, rank, own, blocks, shared) for rank, own in enumerate(stores)]
    longest = max(len(block["ops"]) for gpu in gpus for block in gpu["threadblocks"])
    return MscclppPlan(gpus, longest, collective.chunks)


def _stores(collective: Collective, owners: list[int], rank: int, *, shared: bool) -> list[Json]:
    """Return what a rank does on the switch, chunks in a row at once."""
    runs: list[list[int]] = []
    for chunk, owner in enumerate(owners):
        if owner != rank:
            continue
        if runs and sum(runs[-1]) == chunk:
            runs[-1][1] += 1
        else:
            runs.append([chunk, 1])
    first = list_input_slots(collective, rank).start
    ops: list[Json] = []
    for chunk, size in runs:
        store = {"switch_channel_id": 0, "index": chunk, "size": size}
        if collective.op == "all_reduce":
            load = {**store, "switch_channel_id": 0 if shared else 1}
            ops.append(
                {"name": "glres", "src_buff": [load], "dst_buff": [store],
                 "channel_type": "switch", "reduce_op": "sum"}
            )  # fmt: skip
        else:
            own = {"type": "i", "index": chunk - first, "size": size}
            ops.append(
                {"name": "gstore", "src_buff": [own], "dst_buff": [store],
                 "channel_type": "switch"}
            )  # fmt: skip
    return ops


def _gpu(collective: Collective, rank: int, stores: list[Json], blocks: int, shared: bool) -> Json:
    ranks = collective.ranks
    others = [peer for peer in range(ranks) if peer != rank]
    reduces = collective.op == "all_reduce"
    buffers = ["i" if reduces and shared else "o"]
    if reduces and not shared:
        buffers.append("i")
    switches = [
        {"channel_type": "switch", "buffer_type": buffer,
         "rank_groups": [{"size": ranks, "ranks": list(range(ranks))}]}
        for buffer in buffers
    ]  # fmt: skip
    peers = [peer for _ in range(blocks) for peer in others]
    threadblocks = []
    for block in range(blocks):
        work = stores[block * _MOST_STORES : (block + 1) * _MOST_STORES]
        channels: list[Json] = [
            {
                "channel_type": "memory",
                "channel_ids": [block * len(others) + index for index in range(len(others))],
            },
            {"channel_type": "switch", "channel_ids": list(range(len(buffers)))},
        ]
        threadblocks.append(
            {
                "id": block,
                "ops": [*_meet(len(others)), NOP, *work, NOP, *_meet(len(others))],
                "channels": channels,
                "remote_buffer_refs": [],
            }
        )
    given = len(list_input_slots(collective, rank)) or collective.chunks
    gpu: dict[str, Any] = {
        "id": rank,
        "input_chunks": given,
        "output_chunks": collective.chunks,
        "scratch_chunks": 0,
        "threadblocks": threadblocks,
        "channels": [{"channel_type": "memory", "connected_to": peers}, *switches],
        "remote_buffers": [],
        "semaphores": [],
    }
    return gpu


def _meet(peers: int) -> list[Json]:
    """Signal every other rank, then wait for each."""
    ops = []
    for name in ("signal", "wait"):
        for first in range(0, peers, _CHANNELS_AT_ONCE):
            ids = list(range(first, min(first + _CHANNELS_AT_ONCE, peers)))
            ops.append({"name": name, "channel_ids": ids, "channel_type": "memory"})
    return ops
