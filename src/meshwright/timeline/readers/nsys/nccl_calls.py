"""Gives NCCL's calls, and the kernels they launched, what the calls' payloads say.

A kernel is found by its launch: the call of NCCL around it, or the calls of the group that the
ncclGroupEnd around it closes. Where one group launches several kernels it is not known which of
its calls each does, and they are left as they are.
"""

from typing import TYPE_CHECKING

import numpy as np

from meshwright.timeline.readers.nsys.nvtx_payloads import (
    NcclPayload,
    buffer_bytes,
    find_call_before_launch,
    merge_group_calls,
    parse_payload,
)
from meshwright.timeline.readers.nsys.row_groups import NsysRowGroup
from meshwright.timeline.readers.parsing.collective_args import CollectiveColumns
from meshwright.timeline.readers.parsing.label_encoder import LabelEncoder
from meshwright.timeline.readers.parsing.timestamps import Ints
from meshwright.timeline.schema import ABSENT

if TYPE_CHECKING:
    from meshwright.timeline.readers.nsys.nsys_rows import NsysRows
    from meshwright.timeline.readers.nsys.nsys_spans import NsysSpanColumns

_LARGEST_GROUP = 4096
"""Calls between ncclGroupStart and ncclGroupEnd that are looked at."""


def read_nccl_calls(columns: "NsysSpanColumns", gathered: "NsysRows") -> dict[int, NcclPayload]:
    """By row: what the payload of the call says."""
    found = {}
    for call in gathered.calls:
        said = parse_payload(columns.names[columns.name[call.row]], call.payload)
        if said is not None:
            found[call.row] = said
    return found


def match_nccl_calls(
    columns: "NsysSpanColumns", gathered: "NsysRows", kernels: Ints
) -> CollectiveColumns:
    """Find what the payloads say of calls and of these kernels."""
    count = len(columns.track)
    num_bytes = np.full(count, ABSENT, dtype=np.int64)
    for rows, sizes in gathered.sizes:
        num_bytes[rows] = sizes
    collective, group, dtype = (np.full(count, ABSENT, dtype=np.int32) for _ in range(3))
    kinds, groups = LabelEncoder(), LabelEncoder()
    said = read_nccl_calls(columns, gathered)
    sizes_of = {item.communicator: item.num_ranks for item in said.values() if item.num_ranks > 0}

    def note(row: int, kind: str, communicator: int, size: int) -> None:
        collective[row] = kinds[kind]
        group[row] = groups[f"{communicator:#x}"]
        num_bytes[row] = min(size, 2**62)

    for row, item in said.items():
        if item.collective is not None:
            note(row, item.collective, item.communicator, buffer_bytes(item, sizes_of))
    for kernel, members in _members(columns, kernels, said) if said else ():
        found = merge_group_calls(members, sizes_of)
        if found is not None:
            note(kernel, *found)
    return CollectiveColumns(
        num_bytes, (collective, list(kinds)), (group, list(groups)), (dtype, [])
    )


def _members(
    columns: "NsysSpanColumns", kernels: Ints, said: dict[int, NcclPayload]
) -> list[tuple[int, list[NcclPayload]]]:
    """The calls that each kernel does, where it is the only one of its call or group."""
    is_call = np.array([name.startswith("nccl") and ":" not in name for name in columns.names])
    calls = np.flatnonzero((columns.group > NsysRowGroup.API_CALL) & is_call[columns.name])
    kernels = kernels[columns.flow[kernels] >= 0]
    launches = np.flatnonzero((columns.group == NsysRowGroup.API_CALL) & (columns.flow >= 0))
    launches = launches[np.argsort(columns.flow[launches], kind="stable")]
    if not (kernels.size and calls.size and launches.size):
        return []
    owner = np.array([place.global_id for place in columns.tracks], dtype=np.int64)[columns.track]
    calls = calls[np.lexsort((columns.start_ns[calls], owner[calls]))]
    at = np.searchsorted(columns.flow[launches], columns.flow[kernels])
    launch = launches[np.minimum(at, len(launches) - 1)]
    fits = columns.flow[launch] == columns.flow[kernels]
    kernels, launch = kernels[fits], launch[fits]
    at = find_call_before_launch(
        columns.start_ns[calls], owner[calls], columns.start_ns[launch], owner[launch]
    )
    end = columns.start_ns + columns.duration_ns
    fits = (at >= 0) & (end[calls[at]] >= columns.start_ns[launch])
    kernels, at = kernels[fits], at[fits]
    single = np.bincount(at, minlength=1)[at] == 1
    names = [columns.names[code] for code in columns.name[calls].tolist()]
    found = []
    for kernel, place in zip(kernels[single].tolist(), at[single].tolist(), strict=True):
        rows = calls[_group(names, place)] if names[place] == "ncclGroupEnd" else calls[[place]]
        same = rows[owner[rows] == owner[calls[place]]]
        found.append((kernel, [said[row] for row in same.tolist() if row in said]))
    return found


def _group(names: list[str], end: int) -> list[int]:
    """The places of the calls of the group that ends at this one."""
    depth, first = 0, max(0, end - _LARGEST_GROUP)
    for place in range(end, first - 1, -1):
        depth += (names[place] == "ncclGroupEnd") - (names[place] == "ncclGroupStart")
        if depth == 0:
            return list(range(place + 1, end))
    return []
