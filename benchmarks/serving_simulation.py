"""How many requests the serving simulator takes through engines in a second of processor time."""

import gc
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.result import figure
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.plan.serving_question import ServingQuestion
from meshwright.predict.serving.plan.serving_search import plan_serving
from meshwright.predict.serving.sim.served_requests import ServedRequests
from meshwright.predict.serving.sim.serving_fleet import (
    ReplicaPool,
    ServingFleet,
    default_scheduler_config,
    simulate_fleet,
)
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.workload import (
    LogNormalLength,
    PoissonArrivals,
    ServingWorkload,
    UniformLength,
    WorkloadRequest,
    read_requests,
)

NAME = "serving_simulation"
QUESTION = "How fast are requests simulated through serving engines?"

TRACES = Path(__file__).resolve().parents[2] / "shared" / "request_traces"
CONVERSATIONS = TRACES / "azure_llm_2023" / "AzureLLMInferenceTrace_conv.csv"
SHARED = TRACES / "mooncake" / "conversation_trace.jsonl"
REPEATS = 5
OBJECTIVE = {"ttft": 1.0, "itl": 0.05}


def measure(quick: bool) -> dict[str, object]:
    """Simulate a drawn stream and two recorded ones, and plan for one."""
    count, missing = (5_000 if quick else 100_000), []
    drawn = _drawn(count)
    figures = [
        _rate("short prompts, long answers, 1 engine", drawn, _fleet(), quick, ">= 50_000"),
        _rate("the same at twice the load", _faster(drawn, 2), _fleet(), quick, ">= 50_000"),
        _rate("the same behind a router, 8 engines", _faster(drawn, 8), _fleet(8), quick),
    ]
    for title, path, fleet in (
        ("Azure's conversations, 70B on 2 × 4 GPUs", CONVERSATIONS, _large(2)),
        ("Mooncake's conversations with their prefixes, 70B on 8 × 4 GPUs", SHARED, _large(8)),
    ):
        if path.exists():
            asked = list(read_requests(path).requests)
            figures.append(_rate(title, asked[: 1000 if quick else None], fleet, quick))
        else:
            missing.append(title)
    figures.append(_planned(quick))
    notes = (
        "Requests over the processor time of one core, the best of five runs; latencies, goodput "
        "and occupancy are worked out from the columns in some hundredths of a second more. "
        "Mooncake's prompts have 12,000 tokens and more, 16 to a block, so that some 800 blocks "
        "are named, found and let go for each request. No peer is measured beside it: Vidur 0.0.26 "
        "installs from PyPI without the profiles that its predictor learns from."
    )
    if missing:
        notes += f" Left out, as there is no trace here: {', '.join(missing)}."
    return {"figures": figures, "peers": [], "notes": notes}


def _rate(
    title: str, asked: list[WorkloadRequest], fleet: ServingFleet, quick: bool, target: str = ""
) -> dict[str, object]:
    best = min(
        _seconds(lambda: simulate_fleet(fleet, asked)) for _ in range(1 if quick else REPEATS)
    )
    return figure(title, len(asked) / best, "requests/s", "" if quick else target)


def _planned(quick: bool) -> dict[str, object]:
    """Time a plan for Llama 70B, from the question to the cheapest fleet."""
    stream = ServingWorkload(
        arrival=PoissonArrivals(rate_per_s=20),
        prompt=LogNormalLength(median=800, sigma=0.8, longest=8000),
        output=LogNormalLength(median=200, sigma=0.7, longest=2000),
    )
    question = ServingQuestion(
        model=catalog.get_model("llama3.1-70b"),
        cluster=catalog.get_cluster("h200-superpod").with_gpus(64),
        requests=tuple(stream.generate(0, 500 if quick else 5000)),
        slo=OBJECTIVE,
    )
    return figure(
        "a plan for 70B and 5,000 requests", _seconds(lambda: plan_serving(question)), "s"
    )


def _seconds(work: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    found = work()
    took = time.process_time() - start
    if isinstance(found, ServedRequests):
        # What was simulated has to be whole to count.
        assert found.completed.all()
        assert (found.end_s >= found.first_s).all()
    return took


def _drawn(count: int) -> list[WorkloadRequest]:
    stream = ServingWorkload(
        arrival=PoissonArrivals(rate_per_s=18),
        prompt=UniformLength(low=20, high=200),
        output=UniformLength(low=200, high=800),
    )
    return list(stream.generate(0, count))


def _faster(asked: list[WorkloadRequest], times: float) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(
            arrival_s=one.arrival_s / times,
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.output_tokens,
        )
        for one in asked
    ]


def _fleet(count: int = 1) -> ServingFleet:
    replica = Replica(
        model=catalog.get_model("llama3.1-8b"),
        cluster=catalog.get_cluster("h200-superpod").with_gpus(8),
    )
    return ServingFleet(
        serving_pool=ReplicaPool(
            replica=replica, scheduler_config=default_scheduler_config(replica), count=count
        )
    )


def _large(count: int) -> ServingFleet:
    replica = Replica(
        model=catalog.get_model("llama3.1-70b"),
        cluster=catalog.get_cluster("h200-superpod").with_gpus(4 * count),
        layout=Layout(tp=4),
    )
    copies = ReplicaPool(
        replica=replica, scheduler_config=default_scheduler_config(replica), count=count
    )
    return ServingFleet(serving_pool=copies, routing="prefix")
