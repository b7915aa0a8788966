"""How fast one training step is simulated event by event, and how near the closed form is."""

import itertools
import resource
import statistics
import sys
import time
from typing import NamedTuple

from meshwright.predict.event_sim.noise import StepNoise
from meshwright.predict.event_sim.replicas import simulate_replicas
from meshwright.predict.event_sim.step_simulation import SimulatedStep, simulate_step
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout, ScheduleKind
from meshwright.spec.workload import LoRASpec, TrainingWorkload

NAME = "step_simulation"
QUESTION = "How long does the event simulation of a training step take?"

MIB = 2**20
REPEATS = 5


class Case(NamedTuple):
    """A Llama-3.1-405B step to simulate."""

    title: str
    layout: Layout
    batch: int
    target: str


CASES = (
    Case(
        "16,384 GPUs",
        Layout(tp=8, pp=16, dp=128, sequence_parallel=True, zero=1, stage_layers=(7, *[8] * 14, 7)),
        2048,
        "< 1",
    ),
    Case(
        "131,072 GPUs",
        Layout(tp=8, pp=64, dp=256, sequence_parallel=True, zero=1, stage_layers=(1, *[2] * 62, 1)),
        256 * 512,
        "< 5",
    ),
)


def fresh_run(case: Case) -> TrainingRun:
    """Return the run of a case, with nothing computed yet."""
    cluster = catalog.get_cluster("h100-superpod").with_gpus(case.layout.gpus)
    model = catalog.get_model("llama3.1-405b")
    step = TrainingWorkload(tokens=8192 * case.batch, sequence_length=8192, global_batch=case.batch)
    return TrainingRun(JobSpec(model=model, cluster=cluster, layout=case.layout, workload=step))


SPLITS: dict[ScheduleKind, tuple[tuple[int, ...] | None, ...]] = {
    **dict.fromkeys(("gpipe", "1f1b", "zb-h1", "zb-h2", "dualpipe"), (None, (5, 9, 9, 9))),
    **dict.fromkeys(("interleaved", "zb-v", "dualpipe-v"), (None, (3, 4, 4, 4, 5, 4, 4, 4))),
}
"""Layers of every chunk of Llama-3.1-8B on four ranks: even and uneven, by schedule."""


def small_runs(quick: bool) -> list[TrainingRun]:
    """List small pipelines of every schedule: splits, ZeRO stages, adapters, batches."""
    model, cluster = (
        catalog.get_model("llama3.1-8b"),
        catalog.get_cluster("h100-superpod").with_gpus(32),
    )
    found = []
    for kind, splits in SPLITS.items():
        grid = itertools.product(
            splits, (1, 3) if quick else (0, 1, 2, 3), (None, LoRASpec(rank=16)), (2, 4, 9, 32)
        )
        for split, zero, adapter, microbatches in grid:
            layout = Layout(
                pp=4,
                tp=2,
                sequence_parallel=True,
                dp=4,
                zero=zero,
                schedule=kind,
                virtual_stages=2 if kind in ("interleaved", "zb-v", "dualpipe-v") else 1,
                stage_layers=split,
            )
            batch = 4 * microbatches
            step = TrainingWorkload(
                tokens=4096 * batch, sequence_length=4096, global_batch=batch, adapter=adapter
            )
            work = JobSpec(model=model, cluster=cluster, layout=layout, workload=step)
            found.append(TrainingRun(work))
    return found


def gap(run: TrainingRun) -> float:
    """Return how far the closed form is from the events, as a share of the step."""
    return abs(predict_step(run).step_s / simulate_step(run).step_s - 1)


def timed(case: Case, repeats: int) -> tuple[list[float], SimulatedStep]:
    """Return the times of some simulations, schedule included, and one outcome."""
    times = []
    for _ in range(repeats):
        run = fresh_run(case)
        start = time.perf_counter()
        step = simulate_step(run)
        _ = step.step_s
        times.append(time.perf_counter() - start)
    return times, step


def peak_memory_mib() -> float:
    """Return the most memory this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak * 1024 / MIB


def measure(quick: bool) -> dict[str, object]:
    """Measure and return the figures."""
    figures: list[dict[str, object]] = []
    for case in CASES[:1] if quick else CASES:
        times, step = timed(case, 1 if quick else REPEATS)
        figures += [
            {"name": case.title, "value": times[0], "unit": "s", "target": case.target},
            {"name": f"{case.title}, again", "value": statistics.median(times), "unit": "s"},
        ]
        start = time.perf_counter()
        spans = step.build_timeline().num_spans
        drawn = time.perf_counter() - start
        apart = abs(step.step_s / predict_step(step.run).step_s - 1)
        figures += [
            {"name": f"{case.title}, timeline", "value": drawn, "unit": "s"},
            {"name": f"{case.title}, spans", "value": spans, "unit": "spans"},
            {
                "name": f"{case.title}, apart from the closed form",
                "value": 100 * apart,
                "unit": "%",
                "target": "< 2",
            },
        ]
    run = fresh_run(CASES[0])
    start = time.perf_counter()
    simulate_replicas(run, StepNoise(jitter_cv=0.03, slow_share=1e-3, slow_factor=1.2))
    replicas = time.perf_counter() - start
    gaps = [gap(run) for run in small_runs(quick)]
    figures += [
        {"name": "16,384 GPUs, all 128 replicas", "value": replicas, "unit": "s"},
        {
            "name": f"{len(gaps)} small pipelines, farthest from the closed form",
            "value": 100 * max(gaps),
            "unit": "%",
            "target": "< 2",
        },
    ]
    figures.append(
        {"name": "peak memory", "value": peak_memory_mib(), "unit": "MiB", "target": "< 1024"}
    )
    return {
        "figures": figures,
        "peers": [],
        "notes": "Llama-3.1-405B on H100, tp 8, 1F1B with uneven stages: 16 stages with 16 "
        "microbatches, and 64 stages with 512. One core, schedule included: the first time in a "
        "process, and the median of five. The peak covers simulations and timelines of all cases. "
        "Small pipelines: all eight schedules, even and uneven, ZeRO 0 to 3, with adapters or not.",
    }
