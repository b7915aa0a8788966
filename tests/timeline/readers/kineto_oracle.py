"""The reader of PyTorch's traces written the obvious way: one dictionary per event, one by one.

Slow, and shares no code with the reader but the rules on names. Tests compare the two on every
trace there is.
"""

import gzip
import json
from collections import Counter
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

from meshwright.timeline.readers.parsing.communication_names import (
    dtype_bytes,
    match_communication_rule,
    normalize_collective,
    normalize_dtype,
    parse_kernel_dtype,
)

KERNELS = {"kernel", "Kernel", "mtia_ccp_events", "hpu_op", "collective_comm"}
COPIES = {"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"}
MARKS = {"gpu_user_annotation", "cuda_profiler_range"}
SYNCS = {"cuda_sync", "xpu_sync"}
DEVICE = KERNELS | COPIES | MARKS | SYNCS
LAUNCHES = {
    "cuda_runtime", "cuda_driver", "Runtime", "mtia_runtime", "xpu_runtime", "xpu_driver",
    "privateuse1_runtime", "privateuse1_driver", "glow_runtime",
}  # fmt: skip
OPERATORS = {"cpu_op", "Operator", "user_annotation"}


def read_slowly(path: Path) -> dict[str, list[Any]]:
    """Every span of a trace as columns of plain values."""
    document = _document(path)
    base = document.get("baseTimeNanoseconds", 0)
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    instants = [
        {**event, "dur": 0}
        for event in document["traceEvents"]
        if event.get("ph") == "i"
        and event["name"] != "[memory]"
        and not event["name"].startswith(("Iteration Start", "Record Window End"))
    ]
    events += instants
    processes = {e["pid"] for e in events if e.get("cat") in LAUNCHES | OPERATORS}
    rows = [_row(event, base, processes) for event in events]
    _link(events, rows)
    _flows(rows)
    return {name: [row[name] for row in rows] for name in rows[0]}


def count_slowly(path: Path) -> Counter[tuple[str, int, float]]:
    """Every value of every counter of a trace, without order."""
    document = _document(path)
    base = document.get("baseTimeNanoseconds", 0)
    found: Counter[tuple[str, int, float]] = Counter()
    since: Counter[str] = Counter()
    memory = [e for e in document["traceEvents"] if e.get("name") == "[memory]"]
    reserving = {e["args"]["Device Id"] for e in memory if e["args"].get("Total Reserved", 0) > 0}
    for event in memory:
        args, time = event["args"], base + nanoseconds(event["ts"])
        host = args["Device Type"] == 0
        where = "host" if host else f"gpu {args['Device Id']}"
        if "Total Allocated" in args:
            found[f"memory allocated {where}", time, float(args["Total Allocated"])] += 1
        else:
            since[where] += args["Bytes"]
            found[f"memory allocated {where} since start", time, float(since[where])] += 1
        if not host and args["Device Id"] in reserving:
            found[f"memory reserved {where}", time, float(args["Total Reserved"])] += 1
    for event in document["traceEvents"]:
        if event.get("ph") == "C":
            time = base + nanoseconds(event["ts"])
            for key, value in event["args"].items():
                name = event["name"] if len(event["args"]) == 1 else f"{event['name']}: {key}"
                found[name, time, float(value)] += 1
    return found


def nanoseconds(value: Any) -> int:
    """Microseconds, exactly."""
    return int((Decimal(value) * 1000).to_integral_value(ROUND_HALF_EVEN))


def _document(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    document: dict[str, Any] = json.loads(raw, parse_float=Decimal)
    return document


def _row(event: dict[str, Any], base: int, processes: set[Any]) -> dict[str, Any]:
    category, name, args = event.get("cat", ""), event["name"], event.get("args") or {}
    communicates = category in KERNELS and match_communication_rule(name) is not None
    if category in DEVICE:
        stream = str(args.get("stream", event["tid"])).removeprefix("stream ")
        end = " marks" if category in MARKS else " sync" if category in SYNCS else ""
        process, lane = f"gpu {args.get('device', event['pid'])}", f"stream {stream}{end}"
    elif category == "Trace":
        process, lane = "profiler", str(event["tid"])
    else:
        several = len(processes) > 1 and event["pid"] in processes
        process, lane = f"host {event['pid']}" if several else "host", f"thread {event['tid']}"
    kind = "host"
    if communicates:
        kind = "communication"
    elif category in SYNCS or (category in KERNELS and name == "event_wait"):
        kind = "wait"
    elif category in COPIES or (category in KERNELS and name == "dma_request"):
        kind = "memory_copy"
    elif category in KERNELS:
        kind = "compute"
    row = {
        "process": process, "lane": lane, "kind": kind, "name": name,
        "category": category or None,
        "start_ns": base + nanoseconds(event["ts"]),
        "duration_ns": max(0, nanoseconds(event.get("dur", 0))),
        "flow_out": args.get("correlation") if category in LAUNCHES else None,
        "flow_in": args.get("correlation") if category in DEVICE - MARKS else None,
        "bytes": args.get("bytes") if category in DEVICE else None,
        "collective": None, "group": None, "dtype": None,
    }  # fmt: skip
    if "Collective name" in args and (category in DEVICE or name == "record_param_comms"):
        element = normalize_dtype(args.get("dtype") or "")
        elements = max(args.get("In msg nelems", -1), args.get("Out msg nelems", -1))
        size = dtype_bytes(element)
        row["collective"] = normalize_collective(args["Collective name"])
        row["group"] = args.get("Process Group Name")
        row["dtype"] = element or None
        if size is not None and elements >= 0:
            row["bytes"] = elements * size
    return row


def _link(events: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Give kernels of collectives what the call around their launch says."""
    calls = [
        (event, row)
        for event, row in zip(events, rows, strict=True)
        if row["name"] == "record_param_comms" and "Collective name" in (event.get("args") or {})
    ]
    launches: dict[int, Any] = {}
    for event, row in zip(events, rows, strict=True):
        if row["flow_out"] is not None:
            launches.setdefault(row["flow_out"], (event, row))
    for event, row in zip(events, rows, strict=True):
        if row["kind"] != "communication":
            continue
        if "Collective name" not in (event.get("args") or {}) and row["flow_in"] in launches:
            launch, at = launches[row["flow_in"]]
            around = [
                call
                for call_event, call in calls
                if (call_event["pid"], call_event["tid"]) == (launch["pid"], launch["tid"])
                and call["start_ns"] <= at["start_ns"] <= call["start_ns"] + call["duration_ns"]
            ]
            if around:
                inner = max(around, key=lambda call: call["start_ns"])
                for name in ("bytes", "collective", "group", "dtype"):
                    row[name] = inner[name]
        row["collective"] = row["collective"] or normalize_collective(row["name"])
        row["dtype"] = row["dtype"] or parse_kernel_dtype(row["name"])


def _flows(rows: list[dict[str, Any]]) -> None:
    ended = {row["flow_in"] for row in rows}
    started: set[int] = set()
    for row in rows:
        flow = row["flow_out"]
        if flow is None or flow < 0 or flow not in ended or flow in started:
            row["flow_out"] = None
        else:
            started.add(flow)
