"""Reads an SQLite export of Nsight Systems (`nsys export --type sqlite`) into a `Timeline`.

Every process that uses a GPU is a rank. Which one, NCCL says where its payloads were exported
(`--include-blobs=true`) and communicators were made while the profiler ran; else the order of the
devices, or of the processes. Times become those of the wall clock, by the start of the session.

Tables come and go with versions of the schema (read: 3.20 to 3.25 and older ones): what is not
there is left out. The tables that hold the environment of the processes are never read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.readers.kineto.kineto_reader import detect_rank
from meshwright.timeline.readers.nsys.nccl_calls import read_nccl_calls
from meshwright.timeline.readers.nsys.nsys_database import (
    NotAnNsysExport,
    NsysDatabase,
    build_integer_sql,
    build_text_sql,
    decode_text,
    open_decompressed,
)
from meshwright.timeline.readers.nsys.nsys_rows import NsysRows
from meshwright.timeline.readers.nsys.nsys_spans import (
    THREAD_ID_BITS,
    NsysSpanColumns,
    build_nsys_spans,
    find_process_id,
    join_columns,
)
from meshwright.timeline.readers.nsys.row_groups import NsysRowGroup
from meshwright.timeline.readers.parsing.arrow_arrays import (
    build_arrow_table,
    to_dictionary_array,
    to_number_array,
)
from meshwright.timeline.readers.parsing.event_categories import TraceDetail
from meshwright.timeline.readers.parsing.inferred_rank import INFERRED_RANK_NOTE_PREFIX
from meshwright.timeline.schema import COUNTER_COLUMNS_BY_NAME, TimelineSource
from meshwright.timeline.timeline import Timeline

_EXPORT = "export the report with `nsys export --type sqlite`"
_LARGEST_BASE_NS = 2**61
_MOST_NAMES = 100_000
_MOST_DEVICES = 1024
_PROPERTIES = (
    ("name", "name"), ("totalMemory", "totalGlobalMem"), ("smCount", "numSms"),
    ("computeMajor", "computeMajor"), ("computeMinor", "computeMinor"), ("warpSize", "warpSize"),
    ("memoryBandwidth", "memoryBandwidth"), ("clockRate", "clockRate"),
)  # fmt: skip
"""Columns of TARGET_INFO_GPU, and what the profiler of PyTorch calls them."""


def read_nsys(
    path: str | Path, *, rank: int | None = None, detail: TraceDetail | str = TraceDetail.STANDARD
) -> Timeline:
    """Read one export; `rank` stands in for what neither it nor its name says.

    Raises `DamagedFile` where it is corrupt; its `kept` is the `Timeline` of all that could be
    read. `InputError` where it is no export at all.
    """
    path = Path(path)
    with open_decompressed(path) as (place, packing):
        try:
            with NsysDatabase(place) as database:
                _check(database)
                gathered = NsysRows(database, TraceDetail(detail))
                gathered.read()
                timeline = _timeline(gathered, path, rank)
        except NotAnNsysExport as fault:
            what = f"{fault}; {packing}" if packing else str(fault)
            raise InputError([Problem(str(path), what, _EXPORT)]) from None
    faults = [fault for fault in (packing, database.error, *gathered.errors) if fault]
    if faults:
        fix = f"use the {timeline.num_spans:,} spans that could be read, or export it again"
        raise DamagedFile([Problem(str(path), "; ".join(faults), fix)], kept=timeline)
    return timeline


def _check(database: NsysDatabase) -> None:
    if "StringIds" in database.columns:
        return
    if any(name.startswith("rocpd_") for name in database.unknown_tables):
        raise NotAnNsysExport(
            "is a database of rocprofv3, which is not read: record with torch.profiler"
        )
    if database.columns or "StringTable" in database.unknown_tables:
        raise NotAnNsysExport("is a database of nvprof, or of an Nsight older than 2019")
    raise NotAnNsysExport("is an SQLite database, but no export of Nsight Systems")


def _timeline(gathered: NsysRows, path: Path, given: int | None) -> Timeline:
    columns = join_columns(gathered)
    database = gathered.database
    ranks, notes = _ranks(columns, gathered, path, given)
    base_ns, note = _base_ns(database, columns)
    notes += [note] if note else []
    spans = build_nsys_spans(columns, gathered, ranks, base_ns)
    notes += [f"{count:,} {what}" for what, count in gathered.notes.items()]
    metadata = {
        "profiler": "nsight systems",
        "devices": _json(_devices(database)),
        "processes": _json(_processes(database, columns, ranks)),
        "threads": _json(_threads(gathered, columns, ranks)),
        "settings": _json(_settings(database)),
        "base_ns": str(base_ns),
        "notes": "\n".join(notes),
    }
    return Timeline(
        spans=spans,
        counters=_no_counters(),
        source=TimelineSource.MEASURED,
        metadata={key: value for key, value in metadata.items() if value},
    )


def _ranks(
    columns: NsysSpanColumns, gathered: NsysRows, path: Path, given: int | None
) -> tuple[dict[int, int], list[str]]:
    """The rank of each process, by Nsight's number; and how it was found."""
    users: dict[int, set[int]] = {}
    others: set[int] = set()
    for place in columns.tracks:
        if place.group <= NsysRowGroup.GRAPH:
            users.setdefault(find_process_id(place), set()).add(place.device)
        else:
            others.add(find_process_id(place))
    others -= set(users)
    if len(users) <= 1:
        # Helpers of the one process, such as loaders of data, are part of its rank.
        rank, note = _own_rank(columns, gathered, users) or detect_rank({}, path, given)
        return dict.fromkeys([*users, *others], rank), [note] if note else []
    notes = [f"{len(users)} processes use a GPU: one rank each"]
    without = np.array(
        [find_process_id(place) in others for place in columns.tracks], dtype=np.bool_
    )
    left = int(np.count_nonzero(without[columns.track]))
    if left:
        notes.append(f"{left:,} spans of {len(others)} processes without a GPU were left out")
    said = _ranks_of_nccl(columns, gathered)
    if set(users) <= set(said) and len({said[process] for process in users}) == len(users):
        return {process: said[process] for process in users}, [*notes, "ranks are from NCCL"]
    first = {process: min(devices) for process, devices in users.items()}
    if len(set(first.values())) == len(users):
        order, how = sorted(users, key=lambda process: first[process]), "devices"
    else:
        order, how = sorted(users), "processes' numbers"
    notes.append(f"{INFERRED_RANK_NOTE_PREFIX}; ranks counted in the order of {how}")
    return {process: number for number, process in enumerate(order)}, notes


def _own_rank(
    columns: NsysSpanColumns, gathered: NsysRows, users: Mapping[int, set[int]]
) -> tuple[int, str] | None:
    said = _ranks_of_nccl(columns, gathered)
    found = [said[process] for process in users if process in said]
    return (found[0], "the rank is from NCCL") if found else None


def _ranks_of_nccl(columns: NsysSpanColumns, gathered: NsysRows) -> dict[int, int]:
    """The rank of each process in the largest communicator that it made."""
    best: dict[int, tuple[int, int]] = {}
    for row, said in read_nccl_calls(columns, gathered).items():
        if said.rank >= 0:
            process = find_process_id(columns.tracks[columns.track[row]])
            if said.num_ranks > best.get(process, (0, 0))[0]:
                best[process] = (said.num_ranks, said.rank)
    return {process: rank for process, (_, rank) in best.items()}


def _base_ns(database: NsysDatabase, columns: NsysSpanColumns) -> tuple[int, str]:
    """What to add to the export's times to make them those of the wall clock."""
    name = "TARGET_INFO_SESSION_START_TIME"
    values = (
        database.build_integer_sql(name, "utcEpochNs"),
        database.build_integer_sql(name, "systemClockNs"),
    )
    rows = database.read_rows(name, *values, most=1)
    if not rows or not 0 < rows[0][0] < _LARGEST_BASE_NS:
        return 0, "the export has no start of the session: times count from the recording's own"
    start_ns, clock_ns = rows[0]
    # Times count from the session's start; newer exports count on the system's clock, which they
    # then say the start of the session on.
    if 0 < clock_ns <= start_ns and columns.start_ns.size and columns.start_ns.min() >= clock_ns:
        start_ns -= clock_ns
    return start_ns, ""


def _devices(database: NsysDatabase) -> list[dict[str, Any]]:
    """The GPUs by the number that their process gives them, as PyTorch's profiler lists them."""
    gpus = "TARGET_INFO_GPU"
    known = [(column, label) for column, label in _PROPERTIES if database.has_columns(gpus, column)]
    ids = [database.build_integer_sql(gpus, name) for name in ("id", "cuDevice")]
    read = [
        build_text_sql(column) if column == "name" else build_integer_sql(column)
        for column, _ in known
    ]
    rows = database.read_rows(gpus, *ids, *read, most=_MOST_DEVICES)
    mapped = "TARGET_INFO_CUDA_DEVICE"
    pairs = (database.build_integer_sql(mapped, name) for name in ("gpuId", "cudaId"))
    numbers_of = dict(database.read_rows(mapped, *pairs, most=_MOST_DEVICES))
    found = {}
    for id_, device, *values in rows:
        number = numbers_of.get(id_, device if device >= 0 else id_)
        plain = [decode_text(value) if isinstance(value, bytes) else value for value in values]
        said = dict(zip((label for _, label in known), plain, strict=True))
        said = {label: value for label, value in said.items() if value not in {None, -1}}
        found[number] = {"id": number, **said}
    return [found[number] for number in sorted(found)]


def _processes(
    database: NsysDatabase, columns: NsysSpanColumns, ranks: Mapping[int, int]
) -> list[dict[str, Any]]:
    rows = database.read_rows(
        "PROCESSES",
        database.build_integer_sql("PROCESSES", "globalPid"),
        database.build_text_sql("PROCESSES", "name"),
        most=_MOST_NAMES,
    )
    names = {number >> THREAD_ID_BITS: name for number, name in rows}
    devices: dict[int, set[int]] = {}
    for place in columns.tracks:
        if place.group <= NsysRowGroup.GRAPH:
            devices.setdefault(find_process_id(place), set()).add(place.device)
    return [
        {
            "rank": rank,
            "pid": process & (1 << THREAD_ID_BITS) - 1,
            "name": decode_text(names.get(process)),
            "devices": sorted(devices.get(process, ())),
        }
        for process, rank in sorted(ranks.items(), key=lambda item: (item[1], item[0]))
    ]


def _threads(
    gathered: NsysRows, columns: NsysSpanColumns, ranks: Mapping[int, int]
) -> dict[str, dict[str, str]]:
    """By rank and lane: what a thread with spans is called."""
    used = {place.global_id for place in columns.tracks if place.group > NsysRowGroup.SYNC}
    found: dict[str, dict[str, str]] = {}
    for thread in sorted(used & gathered.threads.keys()):
        rank = ranks.get(thread >> THREAD_ID_BITS)
        name = gathered.names.plain.get(gathered.threads[thread])
        if rank is not None and name:
            lane = f"thread {thread & (1 << THREAD_ID_BITS) - 1}"
            found.setdefault(str(rank), {})[lane] = name
    return found


def _settings(database: NsysDatabase) -> dict[str, str]:
    wanted = {"EXPORT_SCHEMA_VERSION": "schema", "EXPORT_PRODUCT_VERSION": "version"}
    found = {}
    for name in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        columns = (database.build_text_sql(name, "name"), database.build_text_sql(name, "value"))
        for key, value in database.read_rows(name, *columns, most=1000):
            if decode_text(key) in wanted and value:
                found[wanted[decode_text(key)]] = decode_text(value)
    return found


def _no_counters() -> Any:
    none = np.empty(0, dtype=np.int32)
    arrays = {
        "rank": to_number_array(none),
        "name": to_dictionary_array(none, []),
        "unit": to_dictionary_array(none, []),
        "time_ns": to_number_array(none.astype(np.int64)),
        "value": to_number_array(none.astype(np.float64)),
    }
    return build_arrow_table(arrays, COUNTER_COLUMNS_BY_NAME)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode() if value else ""
