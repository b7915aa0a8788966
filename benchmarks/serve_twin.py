"""How near simulated serving comes to the engine itself, over workloads of many kinds.

The engine answers each workload on a GPU with random weights; `predict/serving` answers the same
requests with a cost model, its virtual clock and the same batcher. Workloads differ in model,
precision, lengths, requests at a time, and in whether all are there at once or come over time.
Engines of one kind are started once and answer all their workloads, in a process of their own.

    python -m benchmarks.run serve_twin                       (about 3 minutes of a GPU)
    python -m benchmarks.serve_twin FILE                      (simulate again what FILE measured)
    python -m benchmarks.serve_twin FILE unstreamed           (of an engine before it streamed)
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.result import figure
from meshwright.errors import MissingDependency

if TYPE_CHECKING:
    from meshwright.predict.serving.cost.serving_engine import ServingEngine

NAME = "serve_twin"
QUESTION = "How near does simulated serving come to the engine on one GPU?"
CLUSTER = "h200-superpod"


class Work(NamedTuple):
    """Requests of one kind to an engine of one kind; lengths are the least and the most."""

    model: str
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    at_a_time: int = 256
    per_s: float | None = None
    """Requests that come in a second, by chance; None has all there at once."""
    fp8: bool = False

    @property
    def kind(self) -> tuple[str, bool]:
        """What an engine is started for."""
        return self.model, self.fp8

    def __str__(self) -> str:
        fp8 = " fp8" if self.fp8 else ""
        come = "at once" if self.per_s is None else f"{self.per_s:g}/s"
        lengths = "/".join(
            f"{low}" if low == high else f"{low}-{high}" for low, high in (self.prompt, self.output)
        )
        return f"{self.model}{fp8}, {self.requests} × {lengths}, {come}, {self.at_a_time} at a time"

    def drawn(self) -> Iterator[tuple[float, int, int]]:
        """Yield arrival, prompt and answer of each request."""
        rng, now = random.Random(7), 0.0
        for _ in range(self.requests):
            yield now, rng.randint(*self.prompt), rng.randint(*self.output)
            if self.per_s is not None:
                now += rng.expovariate(self.per_s)


SMALL, MIDDLE, LARGE = "qwen3-0.6b", "llama3.1-8b", "qwen3-14b"
UNSEEN = (
    Work("mistral-nemo-12b", 96, (200, 900), (80, 160), at_a_time=64, fp8=True),
    Work("qwen3-1.7b", 180, (200, 600), (60, 160), at_a_time=128, per_s=45),
    Work("qwen2.5-7b", 14, (7000, 7000), (40, 40), at_a_time=32),
    Work("llama3.2-3b", 160, (100, 900), (100, 250), at_a_time=96),
)
"""Workloads that calibration has not seen, of models it has not seen either: they judge."""
SEEN = (
    Work(SMALL, 256, (100, 1024), (100, 1024)),
    Work(SMALL, 512, (512, 512), (128, 128), at_a_time=512),
    Work(SMALL, 32, (64, 64), (800, 800)),
    Work(SMALL, 96, (4000, 4000), (16, 16)),
    Work(MIDDLE, 256, (500, 500), (250, 250), fp8=True),
    Work(MIDDLE, 512, (250, 250), (150, 150), at_a_time=512, fp8=True),
    Work(MIDDLE, 48, (200, 2000), (100, 300), per_s=10, fp8=True),
    Work("qwen3-8b", 96, (200, 600), (100, 200), at_a_time=96, fp8=True),
    Work(LARGE, 128, (300, 700), (100, 250), at_a_time=128),
    Work(LARGE, 16, (1500, 1500), (150, 150)),
    Work(LARGE, 12, (5000, 5000), (64, 64)),
    Work(MIDDLE, 64, (1000, 1000), (200, 200), at_a_time=32),
    Work(MIDDLE, 16, (8000, 8000), (16, 16)),
    Work(MIDDLE, 4, (500, 500), (300, 300)),
)
"""Workloads that were looked at when our engine was last calibrated, to steps and not to them."""
EARLIER = (
    Work(SMALL, 300, (300, 700), (50, 200), per_s=60),
    Work(MIDDLE, 256, (100, 1024), (100, 1024)),
    Work(MIDDLE, 60, (400, 1200), (100, 300), per_s=8),
    Work("qwen3-4b", 160, (50, 2000), (50, 200), at_a_time=128),
    Work("llama3.2-1b", 256, (200, 1500), (50, 300)),
)
"""Workloads that were measured once, are long or tell nothing new, and are run no more."""
WORKS = UNSEEN + SEEN
KNOWN = WORKS + EARLIER
QUICK = SEEN[:1]
LAST_START_S = 170.0
"""No further engine is started after so long, so that what was measured is kept."""


def answer(works: list[Work]) -> list[dict[str, float]]:
    """Let one engine answer workloads of its kind; return what each took."""
    from meshwright.run.serve.engine.engine_config import EngineConfig
    from meshwright.run.serve.llm import LLM
    from meshwright.spec import catalog
    from meshwright.spec.scheduler_config import SchedulerConfig

    first = works[0]
    limits = SchedulerConfig(
        max_num_seqs=max(each.at_a_time for each in works),
        kv_cache_dtype="fp8" if first.fp8 else "auto",
        enable_prefix_caching=False,
    )
    settings = EngineConfig(
        scheduler_config=limits, max_model_len=8300, random_weights=True,
        quantization="fp8" if first.fp8 else "none",
    )  # fmt: skip
    engine = LLM(catalog.get_model(first.model), settings).engine
    _go(engine, first._replace(requests=8, per_s=None))
    return [_go(engine, work) for work in works]


def _go(engine: Any, work: Work) -> dict[str, float]:
    """Send requests when they come, so many at a time, and take turns until all are answered."""
    from meshwright.run.serve.request import Request
    from meshwright.run.serve.sampling_params import SamplingParams

    rng = random.Random(3)
    waiting = [
        (when, tuple(rng.randrange(5000) for _ in range(prompt)), output)
        for when, prompt, output in work.drawn()
    ][::-1]
    sent: list[float] = []
    seen: list[list[float]] = []
    steps = engine.stats().steps
    start = time.perf_counter()

    def send(arrival: float, tokens: tuple[int, ...], output: int) -> None:
        sampling = SamplingParams(temperature=0.6, max_tokens=output, ignore_eos=True, seed=1)
        times: list[float] = []
        sent.append(arrival)
        seen.append(times)
        engine.add_request(
            Request(prompt_token_ids=tokens, sampling_params=sampling),
            lambda _: times.append(now()),
        )

    def now() -> float:
        return time.perf_counter() - start

    while waiting or not engine.is_idle:
        free = work.at_a_time - engine.scheduler.num_running - len(engine.scheduler.waiting_queue)
        while waiting and free and waiting[-1][0] <= now():
            send(*waiting.pop())
            free -= 1
        engine.step()
        for sink, piece in engine.take_outputs():
            sink(piece)
    took = now()
    written = sum(output for _, _, output in work.drawn())
    firsts = [times[0] - when for times, when in zip(seen, sent, strict=True)]
    gaps = [(each[-1] - each[0]) / max(1, len(each) - 1) for each in seen]
    return {
        "tokens_per_s": written / took, "seconds": took, "first_s": median(firsts),
        "gap_s": median(gaps), "steps": engine.stats().steps - steps,
    }  # fmt: skip


def simulated(work: Work, engine: "ServingEngine | None" = None) -> dict[str, float]:
    """Return the same figures, predicted for the engine as it is described, or otherwise."""
    from meshwright.predict.serving.cost.quantization import Quantization
    from meshwright.predict.serving.cost.replica import Replica
    from meshwright.predict.serving.cost.serving_engine import MESHWRIGHT
    from meshwright.predict.serving.sim.serving_fleet import (
        ReplicaPool,
        ServingFleet,
        default_scheduler_config,
        simulate_fleet,
    )
    from meshwright.predict.serving.sim.serving_metrics import compute_serving_metrics
    from meshwright.spec import catalog
    from meshwright.spec.workload import WorkloadRequest

    formats = Quantization(weights="fp8", kv="fp8") if work.fp8 else Quantization()
    replica = Replica(
        model=catalog.get_model(work.model),
        cluster=catalog.get_cluster(CLUSTER),
        quantization=formats,
        engine=engine or MESHWRIGHT,
    )
    limits = default_scheduler_config(
        replica, max_num_seqs=work.at_a_time, enable_prefix_caching=False
    )
    fleet = ServingFleet(serving_pool=ReplicaPool(replica=replica, scheduler_config=limits))
    requests = [
        WorkloadRequest(arrival_s=when, prompt_tokens=prompt, output_tokens=output)
        for when, prompt, output in work.drawn()
    ]
    found = compute_serving_metrics(simulate_fleet(fleet, requests), fleet)
    return {"tokens_per_s": found.output_tokens_per_s, "seconds": found.seconds}


def figures_of(
    measured: dict[str, dict[str, float]], engine: "ServingEngine | None" = None
) -> list[dict[str, object]]:
    """Hold what was measured against what is predicted, for the engine of now or another."""
    works = {str(work): work for work in KNOWN}
    rows = [(works[name], was) for name, was in measured.items() if name in works]
    off: dict[Work, float] = {}
    found = []
    for work, was in rows:
        predicted = simulated(work, engine)["tokens_per_s"]
        off[work] = 100 * (predicted / was["tokens_per_s"] - 1)
        found += [
            figure(f"{work}: predicted", predicted, "output tokens/s"),
            figure(f"{work}: measured", was["tokens_per_s"], "output tokens/s"),
            figure(f"{work}: off", off[work], "%"),
        ]
    sizes = [abs(each) for each in off.values()]
    unseen = [abs(off[work]) for work in UNSEEN if work in off]
    return [
        figure("workloads", len(rows), "", ">= 12" if len(rows) > len(QUICK) else ""),
        figure("throughput, median error", median(sizes), "%", "<= 8"),
        figure("throughput, largest error", max(sizes), "%"),
        *([figure("not seen before, median error", median(unseen), "%", "<= 8")] if unseen else []),
        *found,
    ]


def measure(quick: bool) -> dict[str, object]:
    """Measure on the GPU, predict, compare."""
    import torch

    if not torch.cuda.is_available():
        raise MissingDependency(
            "models of real sizes are served on a GPU", "run it where there is one"
        )
    works = QUICK if quick else WORKS
    measured: dict[str, dict[str, float]] = {}
    notes = ""
    start = time.perf_counter()
    for (model, fp8), group in groupby(works, key=lambda work: work.kind):
        numbers = [str(WORKS.index(work)) for work in group]
        if time.perf_counter() - start > LAST_START_S:
            notes += f"{model}{' fp8' if fp8 else ''} left out: it was late. "
            continue
        command = [sys.executable, "-m", "benchmarks.serve_twin", *numbers]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            notes += f"{model}{' fp8' if fp8 else ''} failed: {done.stderr.strip()[-300:]}. "
            continue
        measured |= json.loads(done.stdout.splitlines()[-1])
    return {
        "figures": figures_of(measured),
        "notes": notes + f"measured: {json.dumps(measured)}",
    }


def measured_in(path: Path) -> dict[str, dict[str, float]]:
    """Return what a kept result measured, by workload."""
    notes = json.loads(path.read_text(encoding="utf-8"))["measured"]["notes"]
    found: dict[str, dict[str, float]] = json.loads(notes.partition("measured: ")[2])
    return found


def main(given: list[str]) -> None:
    """Answer the workloads of these numbers, or compare again those of a file."""
    from msgspec.structs import replace

    from meshwright.predict.serving.cost.serving_engine import MESHWRIGHT

    if given[0].isdecimal():
        works = [WORKS[int(number)] for number in given]
        print(json.dumps(dict(zip(map(str, works), answer(works), strict=True))))
        return
    engine = replace(MESHWRIGHT, max_prefetch_rows=0) if "unstreamed" in given else MESHWRIGHT
    for row in figures_of(measured_in(Path(given[0])), engine):
        print(f"{row['name']}: {row['value']:,.1f} {row['unit']}")


if __name__ == "__main__":
    main(sys.argv[1:])
