"""A bench's requests as a `Timeline`: who waited, who was answered, how many were open."""

import heapq
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshwright.errors import Problem
from meshwright.observe.bench.serving.request_result import RequestResult
from meshwright.observe.bench.serving.serving_metrics import compute_throughput_over_time
from meshwright.observe.bench.serving.serving_result import ServingBenchResult, ServingBenchRun
from meshwright.spec.field_checks import raise_problems
from meshwright.timeline import SpanKind, TimelineWriter

_RATES = 200


def write_request_timeline(result: ServingBenchResult, folder: str) -> None:
    """Write the requests of every run; each run is a rank of the timeline."""
    raise_problems(check_timeline_folder(folder))
    for number, run in enumerate(result.runs):
        told = {"bench": "serve", "model": result.server.model, f"run {number}": run.name}
        with TimelineWriter(folder, rank=number, metadata=told) as timeline:
            _record(timeline, run)


def check_timeline_folder(folder: str) -> list[Problem]:
    """Return what keeps a timeline from being written to a folder."""
    if not any(Path(folder).glob("rank-*.parquet*")):
        return []
    fix = "name another folder, or remove this one"
    return [Problem(folder, "has a timeline already", fix)]


def _record(timeline: TimelineWriter, run: ServingBenchRun) -> None:
    begun = round(run.started_unix_s * 1e9)

    def ns(at_s: float) -> int:
        return begun + round(at_s * 1e9)

    for one, lane in assign_lanes(run.requests):
        said: dict[str, object] = {
            "request": one.index,
            "prompt": one.prompt_tokens,
            "output": one.output_tokens,
        }
        if one.error:
            said["fault"] = one.error
        extra = msgspec.json.encode(said).decode()
        split = one.sent_s + (one.ttft_s if one.chunk_gaps_us else one.end_s - one.sent_s)
        for name, kind, a, b in (
            ("until the first token", SpanKind.WAIT, one.sent_s, split),
            ("answer", SpanKind.COMMUNICATION, split, one.end_s),
        ):
            if b > a:
                timeline.span(name, ns(a), ns(b) - ns(a), kind=kind, lane=lane, extra=extra)
    open_now = 0
    for at_s, step in sorted(
        (at, step) for one in run.requests for at, step in ((one.sent_s, 1), (one.end_s, -1))
    ):
        open_now += step
        timeline.counter("requests in flight", ns(at_s), open_now)
    for at_s, rate in compute_throughput_over_time(run, _RATES):
        timeline.counter("output tokens", ns(at_s), rate, unit="tokens/s")


def assign_lanes(requests: Sequence[RequestResult]) -> list[tuple[RequestResult, str]]:
    """Give each request the first lane that is free: as many lanes as were ever open at once."""
    found, free, busy = list[tuple[RequestResult, str]](), list[int](), list[tuple[float, int]]()
    count = 0
    for one in sorted(requests, key=lambda one: one.sent_s):
        while busy and busy[0][0] <= one.sent_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        heapq.heappush(busy, (one.end_s, lane))
        found.append((one, f"slot {lane:04d}"))
    return found
