"""Made-up results for tests: requests with latencies that are known."""

from collections.abc import Sequence

from meshwright.observe.bench.serving.load_generator import GeneratorStats
from meshwright.observe.bench.serving.openai_protocol import RequestOptions
from meshwright.observe.bench.serving.request_result import RequestResult
from meshwright.observe.bench.serving.server_probe import ServerInfo
from meshwright.observe.bench.serving.serving_result import ServingBenchResult, ServingBenchRun
from meshwright.observe.hardware.machine import Machine


def served(index: int, sent_s: float, pieces_ms: Sequence[float], **more: object) -> RequestResult:
    """Return an answered request whose pieces came after these milliseconds each."""
    pieces = tuple(round(piece * 1000) for piece in pieces_ms)
    given: dict[str, object] = {
        "index": index,
        "scheduled_s": sent_s,
        "sent_s": sent_s,
        "end_s": sent_s + sum(pieces) / 1e6,
        "requested_prompt_tokens": 10,
        "requested_output_tokens": len(pieces),
        "prompt_tokens": 10,
        "output_tokens": len(pieces),
        "chunk_gaps_us": pieces,
        "answer_hash": f"answer {index}",
    }
    return RequestResult(**(given | more))  # type: ignore[arg-type]


def run_of(
    requests: Sequence[RequestResult], name: str = "8 at a time", **more: object
) -> ServingBenchRun:
    """Return a run of these requests."""
    given: dict[str, object] = {
        "max_concurrency": 8,
        "generator": GeneratorStats(),
        "started_unix_s": 1e9,
    }
    return ServingBenchRun(name=name, requests=tuple(requests), **(given | more))  # type: ignore[arg-type]


def result_of(*runs: ServingBenchRun, **more: object) -> ServingBenchResult:
    """Return a result of these runs."""
    given: dict[str, object] = {
        "command": "mw bench serve http://127.0.0.1:1",
        "date": "2026-01-01T00:00:00+00:00",
        "seed": 0,
        "server": ServerInfo(url="http://127.0.0.1:1", model="small", software="fake 1"),
        "request_options": RequestOptions(model="small"),
        "machine": Machine(device="cpu", host="cpu", cores=2),
        "software": {"python": "3.12"},
    }
    return ServingBenchResult(runs=runs, **(given | more))  # type: ignore[arg-type]
