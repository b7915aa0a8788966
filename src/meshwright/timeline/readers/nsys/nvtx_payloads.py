"""What NCCL says of its calls in an Nsight export: the binary payloads of its NVTX ranges.

A blob is a head of 32 bytes (u32 domain, u32, u32 schema, u32, u64 bytes of the payload, u64 bytes
in all; as Nsight Systems 2026 writes it) and the payload. The layouts of the payloads are NCCL's,
src/include/nvtx_payload_schemas.h. Exports have blobs only with `--include-blobs=true`.

Also finds the call that launched a kernel: the last call of its thread that began before the
launch, which for grouped calls is ncclGroupEnd.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.timeline.readers.parsing.communication_names import normalize_collective
from meshwright.timeline.readers.parsing.timestamps import Ints
from meshwright.timeline.schema import ABSENT

_HEAD = struct.Struct("<IIIIQQ")
_COMM_AND_BYTES = struct.Struct("<QQ")
_COMM_AND_RANKS = struct.Struct("<Qii")
_PARENT_AND_RANKS = struct.Struct("<QQii")
_WHOLE = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
"""Collectives whose payload says the bytes of one rank's part."""
_LARGEST_GROUP = 1 << 24


class NcclNvtxRange(NamedTuple):
    """One NVTX range of NCCL with its payload."""

    row: int
    payload: bytes


class NcclPayload(NamedTuple):
    """What a call says, by its name and payload."""

    collective: str | None
    communicator: int
    num_bytes: int
    """Of one rank's part where the collective has parts; -1 where it does not say."""
    num_ranks: int
    rank: int


def parse_nvtx_blob(row: int, blob: bytes) -> NcclNvtxRange | None:
    """Take the payload of a blob; None where it is of another form."""
    if len(blob) < _HEAD.size:
        return None
    _, _, _, _, size, whole = _HEAD.unpack_from(blob)
    if not 8 <= size <= 4096 or not _HEAD.size + size <= min(whole, len(blob)):
        return None
    return NcclNvtxRange(row, blob[_HEAD.size : _HEAD.size + size])


def parse_payload(name: str, payload: bytes) -> NcclPayload | None:
    """What the payload of this function says."""
    if name.startswith("ncclComm"):
        form = _PARENT_AND_RANKS if name.endswith(("Split", "Grow")) else _COMM_AND_RANKS
        if len(payload) < form.size:
            return None
        communicator, *_, num_ranks, rank = form.unpack_from(payload)
        if not 0 <= rank < num_ranks <= _LARGEST_GROUP:
            return None
        return NcclPayload(None, communicator, ABSENT, num_ranks, rank)
    collective = normalize_collective(name)
    if collective is None or len(payload) < _COMM_AND_BYTES.size:
        return None
    communicator, num_bytes = _COMM_AND_BYTES.unpack_from(payload)
    return NcclPayload(
        collective, communicator, num_bytes if num_bytes < 2**56 else ABSENT, ABSENT, ABSENT
    )


def buffer_bytes(said: NcclPayload, sizes: Mapping[int, int]) -> int:
    """The bytes of the whole buffer, with the sizes of communicators; -1 where that is unknown."""
    if said.collective not in _WHOLE or said.num_bytes < 0:
        return said.num_bytes
    ranks = sizes.get(said.communicator, ABSENT)
    return said.num_bytes * ranks if ranks > 0 else ABSENT


def find_call_before_launch(
    start: Ints, thread: Ints, launch_start: Ints, launch_thread: Ints
) -> Ints:
    """The place of the last call of a launch's thread that began before it; -1 where none did."""
    order = np.lexsort((start, thread))
    keys = np.concatenate([order, np.arange(len(launch_start)) + len(start)])
    times, threads = np.concatenate([start, launch_start]), np.concatenate([thread, launch_thread])
    # Calls come before launches of the same moment.
    merged = keys[np.lexsort((keys >= len(start), times[keys], threads[keys]))]
    is_call = merged < len(start)
    last = np.maximum.accumulate(np.where(is_call, np.arange(len(merged)), ABSENT))
    found = np.full(len(times), ABSENT, dtype=np.int64)
    found[merged] = np.where(last >= 0, merged[last], ABSENT)
    found = found[len(start) :]
    fits = (found >= 0) & (thread[found] == launch_thread)
    return np.where(fits, found, ABSENT)


def merge_group_calls(
    members: Sequence[NcclPayload], sizes: Mapping[int, int]
) -> tuple[str, int, int] | None:
    """Collective, communicator and bytes of calls that one kernel does; None if unclear."""
    communicators = {said.communicator for said in members}
    kinds = {said.collective or "" for said in members}
    if len(communicators) != 1 or "" in kinds:
        return None
    communicator = communicators.pop()
    if kinds <= {"send", "recv"}:
        sent, received = (
            sum(max(said.num_bytes, 0) for said in members if said.collective == kind)
            for kind in ("send", "recv")
        )
        return (kinds.pop() if len(kinds) == 1 else "send_recv"), communicator, max(sent, received)
    if len(kinds) != 1:
        return None
    parts = [buffer_bytes(said, sizes) for said in members]
    return kinds.pop(), communicator, sum(parts) if min(parts) >= 0 else ABSENT
