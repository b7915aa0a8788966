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
from meshwright.timeline.readers.arrow_arrays import labels, numbers, table
from meshwright.timeline.readers.kineto import rank_in
from meshwright.timeline.readers.kineto_roles import Detail
from meshwright.timeline.readers.nsight_calls import read_calls
from meshwright.timeline.readers.nsight_database import (
    Database,
    NoProfile,
    decoded,
    integer,
    text,
    unpacked,
)
from meshwright.timeline.readers.nsight_groups import Group
from meshwright.timeline.readers.nsight_rows import Gathered
from meshwright.timeline.readers.nsight_spans import (
    PROCESS_BITS,
    Columns,
    columns_of,
    process_of,
    spans_table,
)
from meshwright.timeline.schema import COUNTERS, Source
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


def read_nsight(
    path: str | Path, *, rank: int | None = None, detail: Detail | str = Detail.STANDARD
) -> Timeline:
    """Read one export; `rank` stands in for what neither it nor its name says.

    Raises `DamagedFile` where it is corrupt; its `kept` is the `Timeline` of all that could be
    read. `InputError` where it is no export at all.
    """
    path = Path(path)
    with unpacked(path) as (place, packing):
        try:
            with Database(place) as database:
                _check(database)
                gathered = Gathered(database, Detail(detail))
                gathered.read()
                timeline = _timeline(gathered, path, rank)
        except NoProfile as fault:
            what = f"{fault}; {packing}" if packing else str(fault)
            raise InputError([Problem(str(path), what, _EXPORT)]) from None
    faults = [fault for fault in (packing, database.fault, *gathered.faults) if fault]
    if faults:
        fix = f"use the {timeline.num_spans:,} spans that could be read, or export it again"
        raise DamagedFile([Problem(str(path), "; ".join(faults), fix)], kept=timeline)
    return timeline


def _check(database: Database) -> None:
    if "StringIds" in database.columns:
        return
    if any(name.startswith("rocpd_") for name in database.other):
        raise NoProfile("is a database of rocprofv3, which is not read: record with torch.profiler")
    if database.columns or "StringTable" in database.other:
        raise NoProfile("is a database of nvprof, or of an Nsight older than 2019")
    raise NoProfile("is an SQLite database, but no export of Nsight Systems")


def _timeline(gathered: Gathered, path: Path, given: int | None) -> Timeline:
    columns = columns_of(gathered)
    database = gathered.database
    ranks, notes = _ranks(columns, gathered, path, given)
    base_ns, note = _base_ns(database, columns)
    notes += [note] if note else []
    spans = spans_table(columns, gathered, ranks, base_ns)
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
        source=Source.MEASURED,
        metadata={key: value for key, value in metadata.items() if value},
    )


def _ranks(
    columns: Columns, gathered: Gathered, path: Path, given: int | None
) -> tuple[dict[int, int], list[str]]:
    """The rank of each process, by Nsight's number; and how it was found."""
    users: dict[int, set[int]] = {}
    others: set[int] = set()
    for place in columns.places:
        if place.group <= Group.GRAPH:
            users.setdefault(process_of(place), set()).add(place.device)
        else:
            others.add(process_of(place))
    others -= set(users)
    if len(users) <= 1:
        # Helpers of the one process, such as loaders of data, are part of its rank.
        rank, note = _own_rank(columns, gathered, users) or rank_in({}, path, given)
        return dict.fromkeys([*users, *others], rank), [note] if note else []
    notes = [f"{len(users)} processes use a GPU: one rank each"]
    without = np.array([process_of(place) in others for place in columns.places], dtype=np.bool_)
    left = int(np.count_nonzero(without[columns.place]))
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
    notes.append(f"the trace says no ranks: counted in the order of {how}")
    return {process: number for number, process in enumerate(order)}, notes


def _own_rank(
    columns: Columns, gathered: Gathered, users: Mapping[int, set[int]]
) -> tuple[int, str] | None:
    said = _ranks_of_nccl(columns, gathered)
    found = [said[process] for process in users if process in said]
    return (found[0], "the rank is from NCCL") if found else None


def _ranks_of_nccl(columns: Columns, gathered: Gathered) -> dict[int, int]:
    """The rank of each process in the largest communicator that it made."""
    best: dict[int, tuple[int, int]] = {}
    for row, said in read_calls(columns, gathered).items():
        if said.rank >= 0:
            process = process_of(columns.places[columns.place[row]])
            if said.num_ranks > best.get(process, (0, 0))[0]:
                best[process] = (said.num_ranks, said.rank)
    return {process: rank for process, (_, rank) in best.items()}


def _base_ns(database: Database, columns: Columns) -> tuple[int, str]:
    """What to add to the export's times to make them those of the wall clock."""
    name = "TARGET_INFO_SESSION_START_TIME"
    values = (database.integer(name, "utcEpochNs"), database.integer(name, "systemClockNs"))
    rows = database.rows(name, *values, most=1)
    if not rows or not 0 < rows[0][0] < _LARGEST_BASE_NS:
        return 0, "the export has no start of the session: times count from the recording's own"
    start_ns, clock_ns = rows[0]
    # Times count from the session's start; newer exports count on the system's clock, which they
    # then say the start of the session on.
    if 0 < clock_ns <= start_ns and columns.start_ns.size and columns.start_ns.min() >= clock_ns:
        start_ns -= clock_ns
    return start_ns, ""


def _devices(database: Database) -> list[dict[str, Any]]:
    """The GPUs by the number that their process gives them, as PyTorch's profiler lists them."""
    gpus = "TARGET_INFO_GPU"
    known = [(column, label) for column, label in _PROPERTIES if database.has(gpus, column)]
    ids = [database.integer(gpus, name) for name in ("id", "cuDevice")]
    read = [text(column) if column == "name" else integer(column) for column, _ in known]
    rows = database.rows(gpus, *ids, *read, most=_MOST_DEVICES)
    mapped = "TARGET_INFO_CUDA_DEVICE"
    pairs = (database.integer(mapped, name) for name in ("gpuId", "cudaId"))
    numbers_of = dict(database.rows(mapped, *pairs, most=_MOST_DEVICES))
    found = {}
    for id_, device, *values in rows:
        number = numbers_of.get(id_, device if device >= 0 else id_)
        plain = [decoded(value) if isinstance(value, bytes) else value for value in values]
        said = dict(zip((label for _, label in known), plain, strict=True))
        said = {label: value for label, value in said.items() if value not in {None, -1}}
        found[number] = {"id": number, **said}
    return [found[number] for number in sorted(found)]


def _processes(
    database: Database, columns: Columns, ranks: Mapping[int, int]
) -> list[dict[str, Any]]:
    rows = database.rows(
        "PROCESSES",
        database.integer("PROCESSES", "globalPid"),
        database.text("PROCESSES", "name"),
        most=_MOST_NAMES,
    )
    names = {number >> PROCESS_BITS: name for number, name in rows}
    devices: dict[int, set[int]] = {}
    for place in columns.places:
        if place.group <= Group.GRAPH:
            devices.setdefault(process_of(place), set()).add(place.device)
    return [
        {
            "rank": rank,
            "pid": process & (1 << PROCESS_BITS) - 1,
            "name": decoded(names.get(process)),
            "devices": sorted(devices.get(process, ())),
        }
        for process, rank in sorted(ranks.items(), key=lambda item: (item[1], item[0]))
    ]


def _threads(
    gathered: Gathered, columns: Columns, ranks: Mapping[int, int]
) -> dict[str, dict[str, str]]:
    """By rank and lane: what a thread with spans is called."""
    used = {place.owner for place in columns.places if place.group > Group.SYNC}
    found: dict[str, dict[str, str]] = {}
    for thread in sorted(used & gathered.threads.keys()):
        rank = ranks.get(thread >> PROCESS_BITS)
        name = gathered.names.plain.get(gathered.threads[thread])
        if rank is not None and name:
            lane = f"thread {thread & (1 << PROCESS_BITS) - 1}"
            found.setdefault(str(rank), {})[lane] = name
    return found


def _settings(database: Database) -> dict[str, str]:
    wanted = {"EXPORT_SCHEMA_VERSION": "schema", "EXPORT_PRODUCT_VERSION": "version"}
    found = {}
    for name in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        columns = (database.text(name, "name"), database.text(name, "value"))
        for key, value in database.rows(name, *columns, most=1000):
            if decoded(key) in wanted and value:
                found[wanted[decoded(key)]] = decoded(value)
    return found


def _no_counters() -> Any:
    none = np.empty(0, dtype=np.int32)
    arrays = {
        "rank": numbers(none),
        "name": labels(none, []),
        "unit": labels(none, []),
        "time_ns": numbers(none.astype(np.int64)),
        "value": numbers(none.astype(np.float64)),
    }
    return table(arrays, COUNTERS)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode() if value else ""
