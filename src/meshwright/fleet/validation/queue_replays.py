"""Published outcomes of queues, made again by our simulator on the same workloads."""

from collections.abc import Callable
from typing import Final

import numpy as np

from meshwright.fleet.sources.public_traces.columns import MIB, read_numbers, read_text
from meshwright.fleet.sources.public_traces.public_trace_source import RecognizedTable
from meshwright.fleet.validation.statistic import (
    StatisticBasis,
    StatisticCaveat,
    Statistics,
    make_statistics,
)
from meshwright.policy.job_queue import CountedPool, JobRequest, NodeSpec, QueuePolicy, make_policy
from meshwright.policy.job_queue.policies.ordered_queue import StrictOrderPolicy
from meshwright.policy.job_queue.sort_keys import by_estimate
from meshwright.predict.job_queue import (
    SCORERS,
    QueueOutcome,
    pack_cluster,
    simulate_queue,
    summarize_run,
)

_GPUS = 64
_SEEDS = (1, 2, 3)
_POLICIES: Final[dict[str, Callable[[], QueuePolicy]]] = {
    "fifo_hol": lambda: make_policy("fifo"),
    "fifo_skip": lambda: make_policy("fifo-greedy"),
    "sjf_hol": lambda: StrictOrderPolicy(by_estimate),
    "sjf_skip": lambda: make_policy("sjf"),
    "ssf_skip": lambda: make_policy("ssf"),
    "srtf_preempt": lambda: make_policy("srtf"),
    "srsf_preempt": lambda: make_policy("srsf"),
}
_UPSTREAM: Final = {"srtf_preempt": "shortest", "srsf_preempt": "shortest-gpu"}
"""What Muri's own simulator calls the same policies."""
_OVERHEAD = StatisticCaveat(
    "Muri's simulator places jobs on nodes and lets restarts cost time; this one does neither",
    StatisticBasis.OTHER,
)
_HOW = "64 GPUs that are only counted, nothing costs time, ties by the order of the file"


def replay_workload(found: RecognizedTable) -> Statistics:
    """Take a workload through the queue under each policy."""
    block = found.table.read_all()
    gpus, submit = read_numbers(block, "num_gpu"), read_numbers(block, "submit_time", 1e-3)
    run = read_numbers(block, "duration", 1e-3)
    asks = [
        JobRequest(job_id=str(place), submit_s=one[0], gpus=one[1], estimate_s=one[2])
        for place, one in enumerate(zip(submit.tolist(), gpus.tolist(), run.tolist(), strict=True))
    ]
    name = found.table.stem.removeprefix("sim_")
    made: Statistics = {}
    for policy, make in _POLICIES.items():
        done = summarize_run(simulate_queue(asks, run.tolist(), CountedPool(_GPUS), make()))
        path = f"muri.reference_replay_ours.results.{name}.{policy}"
        made |= make_statistics(path, _values(done), _HOW, found.table.label)
        if policy in _UPSTREAM:
            path = f"muri.simulator_upstream_run_here.results.{name}.{_UPSTREAM[policy]}"
            made |= make_statistics(path, _values(done), _HOW, found.table.label, _OVERHEAD)
    return made


def _values(done: QueueOutcome) -> dict[str, float]:
    return {
        "jobs": done.jobs,
        "avg_jct_s": done.jct_s.mean,
        "p50_jct_s": done.jct_s.p50,
        "p99_jct_s": done.jct_s.p99,
        "makespan_s": done.makespan_s,
        "avg_wait_s": done.wait_s.mean,
    }


def replay_packing(nodes: RecognizedTable, pods: RecognizedTable) -> Statistics:
    """Fill a cluster with pods by each placement, more of their like after them, up to 130 %."""
    block, asked = nodes.table.read_all(), pods.table.read_all()
    cluster = [
        NodeSpec(gpus=int(gpus), gpu_kind=kind or "", cpus=cpus, memory_bytes=memory)
        for gpus, kind, cpus, memory in zip(
            read_numbers(block, "gpu").tolist(),
            read_text(block, "model").to_pylist(),
            read_numbers(block, "cpu_milli", 1e-3).tolist(),
            read_numbers(block, "memory_mib", MIB).tolist(),
            strict=True,
        )
        if gpus > 0
    ]
    asks = [
        JobRequest(
            job_id=name, submit_s=0.0, gpus=gpus, cpus=cpus, memory_bytes=memory,
            gpu_kinds=tuple(kind for kind in (kinds or "").split("|") if kind),
        )
        for name, gpus, cpus, memory, kinds in zip(
            read_text(asked, "name").to_pylist(),
            (read_numbers(asked, "num_gpu") * read_numbers(asked, "gpu_milli", 1e-3)).tolist(),
            read_numbers(asked, "cpu_milli", 1e-3).tolist(),
            read_numbers(asked, "memory_mib", MIB).tolist(),
            read_text(asked, "gpu_spec").to_pylist(),
            strict=True,
        )
    ]  # fmt: skip
    given = {
        name: 100
        * float(
            np.mean(
                [
                    pack_cluster(cluster, asks, name, seed=seed).allocated_fraction[-1]
                    for seed in _SEEDS
                ]
            )
        )
        for name in SCORERS
    }
    how = "share of GPUs given away when 130 % have been asked for, mean of three orders"
    return make_statistics("alibaba_v2023.packed", given, how, pods.table.label)
