"""One timeline for each device: where one process drives several, each is a rank of its own.

Busy, idle and hidden time are a device's. Most jobs have one device for each rank. A process that
drives several (`DataParallel`, a model spread by `device_map`, an engine with one process) is
parted here as NCCL does it, to which every device is a rank. Each part has the host's rows and
those of its device. Ranks are numbered in the order of processes, then of devices.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.intervals import Ints
from meshwright.observe.analyze.spans.row_selection import renumber_rank
from meshwright.timeline.memo import memoize
from meshwright.timeline.readers.parsing.arrow_arrays import to_bool_array
from meshwright.timeline.timeline import Timeline

SHARED_PROCESS_NOTE = "one process drives"
"""How the note begins that says which rank is which device."""
SHARED_SPANS_KEY = "shared_spans"
"""Metadata: how many spans a rank shares with an earlier one, those of the host."""
MIN_DEVICE_SHARE = 0.01
"""Of a rank's device time: a device with less was touched, not used, and stays with the first."""


def split_by_device(timeline: Timeline) -> Iterator[Timeline]:
    """One timeline per device, in the order of ranks."""
    for part in timeline.split_by_rank():
        yield from _parts(part) or (part,)


@memoize
def _parts(part: Timeline) -> tuple[Timeline, ...]:
    """The parts of a rank that drives several devices; none where it drives one."""
    devices = _devices(part)
    if len(devices) < 2:
        return ()
    process = part.string_column("process")
    on_gpu = np.array([*(name.startswith("gpu") for name in process.values), False])
    first = part.ranks[0] * len(devices)
    named = [f"rank {first + at} is {process.values[code]}" for at, code in enumerate(devices)]
    note = f"{SHARED_PROCESS_NOTE} {len(devices)} devices: {', '.join(named)}"
    found = []
    for place, code in enumerate(devices):
        others = on_gpu.copy()
        others[code] = False
        if place == 0:
            others[:-1] &= np.isin(np.arange(len(process.values)), devices)
        own = part.spans.filter(to_bool_array(~others[process.codes]))
        metadata = _metadata(part, process.values[code], note)
        if place:
            metadata[SHARED_SPANS_KEY] = str(int((~on_gpu[process.codes]).sum()))
        whole = msgspec.structs.replace(part, spans=own, metadata=metadata)
        found.append(renumber_rank(whole, first + place))
    return tuple(found)


def _devices(part: Timeline) -> list[int]:
    """Codes of the processes that stand for devices which do a part of the work, in order."""
    process = part.string_column("process")
    spans = find_device_spans(part)
    codes: Ints = process.codes[spans.row]
    if not codes.size or codes.min() == codes.max():
        return []
    spent = np.bincount(codes, spans.end - spans.start)
    used = np.flatnonzero(spent > MIN_DEVICE_SHARE * spent.sum()).tolist()
    named = [code for code in used if process.values[code].startswith("gpu")]
    return sorted(named, key=lambda code: _number(process.values[code]))


def _number(process: str) -> tuple[int, str]:
    digits = process.removeprefix("gpu").strip()
    return (int(digits), "") if digits.isdigit() else (1 << 62, digits)


def _metadata(part: Timeline, process: str, note: str) -> dict[str, str]:
    """What is known of the run, with this device first among those listed."""
    notes = "\n".join(line for line in (part.metadata.get("notes", ""), note) if line)
    metadata = {**part.metadata, "notes": notes}
    try:
        listed: Any = msgspec.json.decode(part.metadata.get("devices", "") or "[]")
    except msgspec.DecodeError:
        return metadata
    if isinstance(listed, list):
        number = _number(process)[0]
        listed.sort(key=lambda one: not (isinstance(one, dict) and one.get("id") == number))
        metadata["devices"] = msgspec.json.encode(listed).decode()
    return metadata
