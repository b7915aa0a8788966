"""A simulated serving run as a `Timeline`: each engine is a rank with its steps and counters.

Steps that were taken together are one span, whose `extra` says how many there were.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.predict.serving.sim.served_requests import Ints, ServedRequests
from meshwright.predict.serving.sim.simulated_engine import Floats, StepRuns
from meshwright.timeline import SpanKind, Timeline, TimelineSource

Objects = npt.NDArray[np.object_]
Columns = dict[str, npt.NDArray[Any]]
STEP_NAMES = ("decode", "prefill", "prefill and decode", "admit")
_COUNTED = {"requests running": "running", "requests waiting": "waiting"}


def build_serving_timeline(
    served: ServedRequests, metadata: dict[str, str] | None = None
) -> Timeline:
    """Return what every engine did; requests that wait and run are lanes of their own process."""
    parts = [_steps(number, did) for number, did in enumerate(served.engines)]
    parts.append(_requests(served))
    spans = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    counters = [
        _counter(number, name, getattr(did, field), did.end_s)
        for number, did in enumerate(served.engines)
        for name, field in _COUNTED.items()
    ]
    counters += [
        _counter(number, "KV cache in use", did.used_blocks / size, did.end_s)
        for number, (did, size) in enumerate(zip(served.engines, served.kv_blocks, strict=True))
    ]
    columns = {name: np.concatenate([one[name] for one in counters]) for name in counters[0]}
    told = {"simulated": "serving", **(metadata or {})}
    return Timeline.from_columns(spans, columns, source=TimelineSource.SIMULATED, metadata=told)


def _steps(number: int, did: StepRuns) -> Columns:
    prompts, decodes = did.prompt_tokens > 0, did.decodes > 0
    name = np.select([prompts & decodes, prompts, decodes], [2, 1, 0], default=3)
    rows = zip(did.steps, did.decodes, did.prompt_tokens, strict=True)
    extra = _said({"steps": a, "decodes": b, "prompt_tokens": c} for a, b, c in rows)
    return {
        **_same(
            len(extra), rank=number, process="engine", lane="steps", kind=SpanKind.COMPUTE.value
        ),
        **_times(did.start_s, did.end_s),
        "name": np.array(STEP_NAMES, dtype=object)[name],
        "extra": extra,
    }


def _requests(served: ServedRequests) -> Columns:
    """Return two spans for each request: until its first token, and from there to its end."""
    some = np.flatnonzero(served.completed)
    first, end, begin = served.first_s[some], served.end_s[some], served.arrival_s[some]
    rows = zip(some, served.prompt_tokens[some], served.output_tokens[some], strict=True)
    own = {
        "rank": served.engine[some],
        "lane": _lanes(begin, end),
        "extra": _said({"request": a, "prompt": b, "output": c} for a, b, c in rows),
    }
    parts = [
        {
            **_same(len(some), process="requests", kind=kind.value, name=name),
            **_times(start_s, end_s),
            **own,
        }
        for name, kind, start_s, end_s in (
            ("until the first token", SpanKind.WAIT, begin, first),
            ("answer", SpanKind.COMMUNICATION, first, end),
        )
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _said(rows: Iterable[dict[str, Any]]) -> Objects:
    """Return JSON objects of whole numbers."""
    encode = msgspec.json.encode
    texts = [encode({name: int(value) for name, value in row.items()}).decode() for row in rows]
    return np.array(texts, dtype=object)


def _lanes(start_s: Floats, end_s: Floats) -> Objects:
    """Give each request the first lane that is free: as many as were ever open at once."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    found, count = np.empty(len(start_s), dtype=object), 0
    for place in np.argsort(start_s, kind="stable"):
        while busy and busy[0][0] <= start_s[place]:
            heappush(free, heappop(busy)[1])
        if free:
            lane = heappop(free)
        else:
            lane, count = count, count + 1
        heappush(busy, (float(end_s[place]), lane))
        found[place] = f"slot {lane:04d}"
    return found


def _same(count: int, **values: int | str) -> Columns:
    """Return columns of one value each."""
    return {
        name: np.full(count, value, dtype=object if isinstance(value, str) else np.int64)
        for name, value in values.items()
    }


def _times(start_s: Floats, end_s: Floats) -> Columns:
    start = _ns(start_s)
    return {"start_ns": start, "duration_ns": _ns(end_s) - start}


def _counter(number: int, name: str, values: Floats, at_s: Floats) -> Columns:
    return {
        **_same(len(values), rank=number, name=name),
        "time_ns": _ns(at_s),
        "value": values,
    }


def _ns(seconds: Floats) -> Ints:
    return np.rint(seconds * 1e9).astype(np.int64)
