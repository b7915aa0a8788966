"""Gives each collective's kernel what its call on the host said: kind, bytes, group, element type.

A kernel's own arguments come first. Where it has none, the call is found as the profiler meant it:
kernel, its launch by correlation, and around the launch on the same thread the innermost
`record_param_comms`. What is still unknown is read from the kernel's name, which tells the kind and
for reductions the element type.

Bytes are those of the larger of input and output, the whole buffer: what all-gather makes, what
reduce-scatter takes.
"""

from typing import TYPE_CHECKING

import numpy as np

from meshwright.timeline.readers.chrome_trace.event_columns import COLLECTIVE_OPERATOR, EventColumns
from meshwright.timeline.readers.parsing.collective_args import CollectiveColumns
from meshwright.timeline.readers.parsing.communication_names import (
    dtype_bytes,
    match_communication_rule,
    normalize_collective,
    normalize_dtype,
    parse_kernel_dtype,
)
from meshwright.timeline.readers.parsing.event_categories import EventRole
from meshwright.timeline.readers.parsing.label_encoder import Codes, LabelEncoder
from meshwright.timeline.readers.parsing.timestamps import Ints
from meshwright.timeline.schema import ABSENT

if TYPE_CHECKING:
    from meshwright.timeline.readers.kineto.kineto_spans import KinetoSpanColumns

_NESTED = 4
"""How many calls that ended before the launch may lie between it and the one around it."""


def match_collective_calls(
    columns: "KinetoSpanColumns", gathered: EventColumns
) -> CollectiveColumns:
    """Find what is known of each span's communication."""
    count = columns.count
    num_bytes = np.full(count, ABSENT, dtype=np.int64)
    for rows, sizes in gathered.sizes:
        num_bytes[rows] = sizes
    kinds, groups, dtypes = LabelEncoder(), LabelEncoder(), LabelEncoder()
    collective, group, dtype = (np.full(count, ABSENT, dtype=np.int32) for _ in range(3))
    known = np.zeros(count, dtype=np.bool_)
    for item in gathered.collectives:
        row = item.row
        known[row] = True
        ours = normalize_collective(item.name)
        if ours is not None:
            collective[row] = kinds[ours]
        if item.group is not None:
            group[row] = groups[item.group]
        if item.dtype:
            element = normalize_dtype(item.dtype)
            dtype[row] = dtypes[element]
            size = dtype_bytes(element)
            if size is not None and 0 <= item.elements < 2**56:
                num_bytes[row] = item.elements * size
    _from_calls(columns, known, (num_bytes, collective, group, dtype))
    _from_names(columns, (collective, kinds), (dtype, dtypes))
    return CollectiveColumns(
        num_bytes, (collective, list(kinds)), (group, list(groups)), (dtype, list(dtypes))
    )


def _communicates(columns: "KinetoSpanColumns") -> tuple[Ints, list[int]]:
    """Rows of kernels that communicate, and the distinct codes of their names."""
    kernels = np.flatnonzero(columns.role == EventRole.KERNEL)
    used = np.flatnonzero(np.bincount(columns.name[kernels], minlength=1))
    codes = [
        code for code in used.tolist() if match_communication_rule(columns.names[code]) is not None
    ]
    return kernels[np.isin(columns.name[kernels], codes)], codes


def _from_calls(
    columns: "KinetoSpanColumns", known: np.ndarray, arrays: tuple[Ints | Codes, ...]
) -> None:
    """Copy to kernels without arguments those of the call around their launch."""
    kernels, _ = _communicates(columns)
    kernels = kernels[~known[kernels] & (columns.flow[kernels] >= 0)]
    operator = columns.names.index(COLLECTIVE_OPERATOR)
    calls = np.flatnonzero((columns.name == operator) & known & (columns.role > EventRole.SYNC))
    launches = np.flatnonzero((columns.role == EventRole.LAUNCH) & (columns.flow >= 0))
    if not kernels.size or not calls.size or not launches.size:
        return
    order = np.argsort(columns.flow[launches], kind="stable")
    launches = launches[order]
    at = np.searchsorted(columns.flow[launches], columns.flow[kernels])
    at = np.minimum(at, len(launches) - 1)
    found = columns.flow[launches[at]] == columns.flow[kernels]
    kernels, launch = kernels[found], launches[at[found]]
    call = _around(columns, calls, launch)
    for array in arrays:
        array[kernels[call >= 0]] = array[call[call >= 0]]


def _around(columns: "KinetoSpanColumns", calls: Ints, launches: Ints) -> Ints:
    """The innermost of the calls around each launch on its thread; -1 where there is none."""
    start, end = columns.start_ns, columns.start_ns + columns.duration_ns
    calls = calls[np.lexsort((start[calls], columns.lane[calls]))]
    # One number that sorts by thread, then time: places of the calls among all starts.
    keys = np.concatenate([calls, launches])
    order = np.lexsort((np.arange(len(keys)), start[keys], columns.lane[keys]))
    is_call = order < len(calls)
    before = np.cumsum(is_call) - 1
    last = np.empty(len(keys), dtype=np.int64)
    last[order] = before
    at = last[len(calls) :]
    found = np.full(len(launches), ABSENT, dtype=np.int64)
    for _ in range(_NESTED + 1):
        there = np.maximum(at, 0)
        call = calls[there]
        fits = (
            (found < 0)
            & (at >= 0)
            & (columns.lane[call] == columns.lane[launches])
            & (end[call] >= start[launches])
        )
        found[fits] = call[fits]
        at = at - 1
    return found


def _from_names(
    columns: "KinetoSpanColumns",
    collective: tuple[Codes, LabelEncoder],
    dtype: tuple[Codes, LabelEncoder],
) -> None:
    """What the name of a kernel says, for those that nothing else is known of."""
    kernels, codes = _communicates(columns)
    for (array, numbers), read in ((collective, normalize_collective), (dtype, parse_kernel_dtype)):
        of_name = np.full(len(columns.names), ABSENT, dtype=np.int32)
        rows = kernels[array[kernels] == ABSENT]
        for code in np.intersect1d(codes, columns.name[rows]).tolist():
            said = read(columns.names[code])
            if said is not None:
                of_name[code] = numbers[said]
        array[rows] = of_name[columns.name[rows]]
