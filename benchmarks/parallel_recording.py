"""What it costs that every rank writes down its passes, exchanges, waits and steps.

Two ranks train over gloo on this machine's processors. Two ways to the same figure: what one span
costs times the spans of a step, with its share of flushes and of turning files over; and steps with
and without a recorder in turns, in the same processes.
"""

import itertools
import math
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.run.parallel.mesh import Mesh
    from meshwright.run.parallel.timeline_recorder import TimelineRecorder

NAME = "parallel_recording"
QUESTION = "What does recording cost a step of several ranks?"

LAYOUTS: dict[str, dict[str, object]] = {
    "tensors over two": {"tp": 2, "sequence_parallel": True},
    "two stages": {"pp": 2, "schedule": "1f1b"},
    "two replicas": {"dp": 2, "zero": 1},
}
KEEP_STEPS = 200


class Size(NamedTuple):
    """How large a model, and how often steps take turns."""

    layers: int
    hidden: int
    length: int
    sequences: int
    pairs: int


FULL = Size(layers=8, hidden=256, length=128, sequences=8, pairs=40)
QUICK = Size(layers=2, hidden=64, length=32, sequences=4, pairs=4)


class Seen(NamedTuple):
    """What one rank saw of a layout."""

    without_s: float
    """A step that nobody records, the middle one."""
    changes: list[float]
    """For each pair of steps, by how much the recorded one was longer, as a share."""
    spans: float
    """Spans of a recorded step."""
    span_s: float
    """What a span costs when it is written, the mean of this layout's kinds."""
    share: float
    """Of a step, by what spans, flushes and turned files cost."""


def measure(quick: bool) -> dict[str, object]:
    """Measure every layout."""
    from meshwright.run.parallel.launch.rank_spawner import spawn_ranks

    size = QUICK if quick else FULL
    figures: list[dict[str, object]] = []
    for name, words in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            seen = Seen(*spawn_ranks(2, _on_rank, words, size, Path(folder), timeout_s=900)[0])
        figures += [
            {"name": f"{name}: step", "value": round(1e3 * seen.without_s, 1), "unit": "ms"},
            {"name": f"{name}: spans of a step and rank", "value": round(seen.spans), "unit": ""},
            {"name": f"{name}: a span", "value": round(1e6 * seen.span_s, 2), "unit": "µs"},
            {
                "name": f"{name}: recording, counted",
                "value": round(100 * seen.share, 3),
                "unit": "%",
                "target": "< 1",
            },
            {
                "name": f"{name}: recording, in turns",
                "value": round(100 * median(seen.changes), 2),
                "unit": "%",
                "target": "< 1",
            },
            {
                "name": f"{name}: in turns, known to within",
                "value": round(100 * _standard_error(seen.changes), 2),
                "unit": "± %",
            },
        ]
    notes = (
        f"{size.layers} layers of {size.hidden}, {size.sequences} sequences of {size.length} in "
        f"microbatches of one, fp32, one thread a rank. In turns: the middle of {size.pairs} pairs "
        "of steps, each pair beginning with the other kind than the one before. A flush falls into "
        "few steps, so that the middle leaves it out; counted has its share. Where turns are known "
        "to within more than 1 %, as on a busy machine, they neither confirm nor refute the target."
    )
    return {"figures": figures, "peers": [], "notes": notes}


def _standard_error(values: list[float]) -> float:
    """Return that of the median, with the spread taken from the middle half of the values.

    Of a normal distribution the middle half is 1.349 standard deviations wide, and a median has
    1.253 times the standard error of a mean.
    """
    ordered = sorted(values)
    wide = ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]
    return 1.253 * wide / 1.349 / math.sqrt(len(ordered))


def _on_rank(words: dict[str, object], size: Size, folder: Path) -> tuple[object, ...]:
    """Train by turns with and without a recorder."""
    from meshwright.run.parallel.timeline_recorder import TimelineRecorder

    mesh, step = _steps(words, size)
    recorder = TimelineRecorder(folder / "timeline", mesh.rank)

    def timed(who: "TimelineRecorder | None") -> float:
        mesh.recorder = None
        mesh.world.barrier()
        mesh.recorder = who
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    for who in (None, recorder, None):
        timed(who)
    without, changes = [], []
    for pair in range(size.pairs):
        if pair % 2:
            off, on = timed(None), timed(recorder)
        else:
            on, off = timed(recorder), timed(None)
        without.append(off)
        changes.append(on / off - 1)
    mesh.recorder = None
    recorder.close()
    step_s = median(without)
    spans, span_s, share = _counted(folder, mesh, size.pairs + 1, step_s)
    mesh.world.barrier()
    return (step_s, changes, spans, span_s, share)


def _steps(words: dict[str, object], size: Size) -> "tuple[Mesh, Callable[[], object]]":
    """Return this rank's mesh, and what trains one step on it."""
    import msgspec
    import torch

    from meshwright.run.parallel.mesh import Mesh
    from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
    from meshwright.run.train.data.batch import SequenceInfo, TrainBatch
    from meshwright.run.train.optimizer import OptimizerConfig, make_optimizer
    from meshwright.run.train.step_backend import MeshStepBackend, make_sharded_model
    from meshwright.spec.layout import Layout
    from meshwright.spec.model import build_decoder_model

    wide = 3 * size.hidden
    model = build_decoder_model(
        "dense", layers=size.layers, hidden=size.hidden, heads=4, ffn=wide, vocab=4096
    )
    layout = msgspec.convert({"precision": "fp32", "microbatch": 1} | words, Layout)
    spread = make_sharded_model(model, Mesh(layout), seed=1)
    sync = make_gradient_sync(spread)
    settings = OptimizerConfig()
    optimizer = make_optimizer(sync.named_parameters(), layout, settings, total_steps=10_000)
    step = MeshStepBackend(spread, sync, optimizer, microbatch=1)
    whole = SequenceInfo(
        documents=1,
        max_document_length=size.length,
        num_targets=size.length,
        num_tokens=size.length,
    )
    count = size.sequences // layout.dp
    rows = torch.randint(0, 4096, (count, size.length + 1))
    given = (rows[:, :-1].clone(), rows[:, 1:].clone(), None, None, (whole,) * count)
    numbers = itertools.count()

    def run() -> None:
        number = next(numbers)
        step(TrainBatch(number, *given), number)

    return spread.mesh, run


def _counted(folder: Path, mesh: "Mesh", steps: int, step_s: float) -> tuple[float, float, float]:
    """Return a step's spans, what one costs, and the share of a step that recording takes."""
    from meshwright.run.parallel.timeline_recorder import FLUSH_NS, TimelineRecorder
    from meshwright.timeline import read_timeline

    timeline = read_timeline(folder / "timeline", columns=["lane", "kind"], ranks=[mesh.rank])
    lanes, kinds = timeline.string_column("lane"), timeline.string_column("kind")
    passes = sum(
        int((lanes.codes == i).sum()) for i, v in enumerate(lanes.values) if v == "forward-backward"
    )
    waits = sum(int((kinds.codes == i).sum()) for i, v in enumerate(kinds.values) if v == "wait")
    spans = timeline.num_spans / steps
    own = TimelineRecorder(folder / "own", mesh.rank)
    # A collective leaves two spans, itself and the wait for it.
    exchange = _exchange(own)
    pass_s, exchange_s, other_s = map(_mean_s, (_pass(own, mesh), exchange, _phase(own)))
    others = timeline.num_spans - passes - 2 * waits
    written_s = (passes * pass_s + waits * exchange_s + others * other_s) / steps
    own.flush()
    # What comes together between two flushes.
    for number in range(max(1, int(spans / 2 * FLUSH_NS / 1e9 / step_s))):
        exchange(number)
    began = time.perf_counter()
    own.flush()
    flush_s = time.perf_counter() - began
    began = time.perf_counter()
    own.close()
    with TimelineRecorder(folder / "own", mesh.rank):
        turned_s = time.perf_counter() - began
    share = written_s / step_s + flush_s / (FLUSH_NS / 1e9) + turned_s / (KEEP_STEPS * step_s)
    return spans, written_s / spans, share


TRIES, REPEATS = 4000, 5


def _mean_s(write: "Callable[[int], object]") -> float:
    """Return what a call takes, the middle of some means."""
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for number in range(TRIES):
            write(number)
        found.append((time.perf_counter() - began) / TRIES)
    return median(found)


def _pass(recorder: "TimelineRecorder", mesh: "Mesh") -> "Callable[[int], None]":
    """Return what writes a pass."""
    from meshwright.spec.layout.pipeline_chunks import ModelChunk

    chunk = ModelChunk(mesh.coordinate.pp, mesh.coordinate.pp, 0, 4, True, True)
    return lambda number: recorder.record_pass("F", chunk, number % 16, 1e-3)


def _exchange(recorder: "TimelineRecorder") -> "Callable[[int], None]":
    """Return what writes a collective and the wait for it, and reads the clock for it."""
    import torch

    kind = torch.float32

    def write(number: int) -> None:
        issued_ns, since_ns, end_ns = time.time_ns(), time.time_ns(), time.time_ns()
        recorder.record_collective(
            "tp",
            "all_reduce sum",
            4096 + number % 8,
            kind,
            issued_ns=issued_ns,
            waits_since_ns=since_ns,
            end_ns=end_ns,
        )

    return write


def _phase(recorder: "TimelineRecorder") -> "Callable[[int], None]":
    """Return what writes a span around some lines."""

    def write(_: int) -> None:
        with recorder.span("optimizer"):
            pass

    return write
