"""Makes large traces of small ones: more ranks, or one rank for longer.

More ranks are copies with other numbers, each some microseconds later. A longer trace repeats its
events one after another in time, with numbers of correlations, flows and steps that stay unique.
"""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
_NUMBERS = ("correlation", "External id")


def load(path: Path) -> dict[str, Any]:
    """Read a trace."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        document: dict[str, Any] = json.load(file)
    return document


def more_ranks(source: Path, folder: Path, ranks: int) -> Path:
    """Write so many ranks, made of those of a folder in turn; not again where they are there."""
    files = sorted(source.glob("*.json*"))
    folder.mkdir(parents=True, exist_ok=True)
    for place, file in enumerate(files):
        missing = [
            rank
            for rank in range(place, ranks, len(files))
            if not (folder / f"rank-{rank}.json").exists()
        ]
        document = load(file) if missing else {}
        for rank in missing:
            info = {**document.get("distributedInfo", {"backend": "nccl"})}
            info |= {"rank": rank, "world_size": ranks}
            later = (rank * 37) % 101
            events = [_moved(event, later) for event in document["traceEvents"]]
            whole = {**document, "distributedInfo": info, "traceEvents": events}
            _write(folder / f"rank-{rank}.json", [json.dumps(whole)])
    return folder


def longer(source: Path, path: Path, times: int) -> Path:
    """Write a trace that repeats another so many times; not again where it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, _repeated(load(source), times))
    return path


def _repeated(document: dict[str, Any], times: int) -> Iterator[str]:
    events: list[Event] = document.pop("traceEvents")
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    first = min(event["ts"] for event in spans)
    last = max(event["ts"] + event.get("dur", 0) for event in spans)
    numbers = [_arguments(event).get("correlation", 0) for event in spans]
    most = 1 + max(number for number in numbers if isinstance(number, int))
    steps = [int(match[1]) for event in spans if (match := _STEP.fullmatch(event.get("name", "")))]
    apart = int(last - first) + 1000
    head = json.dumps(document, separators=(",", ":"))[:-1]
    yield head + ("," if document else "") + '"traceEvents":['
    for turn in range(times):
        for place, event in enumerate(events):
            if turn and event.get("ph") == "M":
                continue
            again = event
            if turn:
                again = _numbered(_moved(event, turn * apart), turn * most)
                match = _STEP.fullmatch(str(again.get("name", "")))
                if match:
                    number = int(match[1]) + turn * (1 + max(steps))
                    again = {**again, "name": f"ProfilerStep#{number}"}
            text = json.dumps(again, separators=(",", ":"))
            yield text if not turn and not place else ",\n" + text
    yield "]}"


def _moved(event: Event, later_us: int) -> Event:
    if event.get("ph") == "M" or not isinstance(event.get("ts"), int | float):
        return event
    return {**event, "ts": event["ts"] + later_us}


def _arguments(event: Event) -> dict[str, Any]:
    given = event.get("args")
    return given if isinstance(given, dict) else {}


def _numbered(event: Event, more: int) -> Event:
    """The event with its numbers moved up, so that no other turn has them."""
    given = _arguments(event)
    changed = {
        name: given[name] + more
        for name in _NUMBERS
        if isinstance(given.get(name), int) and given[name] > 0
    }
    if changed:
        event = {**event, "args": {**given, **changed}}
    if event.get("ph") in ("s", "f") and isinstance(event.get("id"), int):
        event = {**event, "id": event["id"] + more}
    return event


def _write(path: Path, pieces: Iterator[str] | list[str]) -> None:
    unfinished = path.with_name(path.name + ".partial")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(pieces)
    unfinished.replace(path)
