"""Made-up results for tests: requests with latencies that are known."""

from collections.abc import Sequence

from meshwright.observe.bench.case import Machine
from meshwright.observe.bench.serving.drive import Generator
from meshwright.observe.bench.serving.result import Result, Run
from meshwright.observe.bench.serving.served import Served
from meshwright.observe.bench.serving.server import Server
from meshwright.observe.bench.serving.wire import Asking


def served(index: int, sent_s: float, pieces_ms: Sequence[float], **more: object) -> Served:
    """Return an answered request whose pieces came after these milliseconds each."""
    pieces = tuple(round(piece * 1000) for piece in pieces_ms)
    given: dict[str, object] = {
        "index": index,
        "due_s": sent_s,
        "sent_s": sent_s,
        "end_s": sent_s + sum(pieces) / 1e6,
        "asked_prompt": 10,
        "asked_output": len(pieces),
        "prompt_tokens": 10,
        "output_tokens": len(pieces),
        "pieces_us": pieces,
        "digest": f"answer {index}",
    }
    return Served(**(given | more))  # type: ignore[arg-type]


def run_of(requests: Sequence[Served], name: str = "8 at a time", **more: object) -> Run:
    """Return a run of these requests."""
    given: dict[str, object] = {"in_flight": 8, "generator": Generator(), "began_unix_s": 1e9}
    return Run(name=name, requests=tuple(requests), **(given | more))  # type: ignore[arg-type]


def result_of(*runs: Run, **more: object) -> Result:
    """Return a result of these runs."""
    given: dict[str, object] = {
        "command": "mw bench serve http://127.0.0.1:1",
        "date": "2026-01-01T00:00:00+00:00",
        "seed": 0,
        "server": Server(url="http://127.0.0.1:1", model="small", software="fake 1"),
        "asking": Asking(model="small"),
        "machine": Machine(device="cpu", host="cpu", cores=2),
        "software": {"python": "3.12"},
    }
    return Result(runs=runs, **(given | more))  # type: ignore[arg-type]
