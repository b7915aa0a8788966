"""Published outcomes of queues, made again by our simulator on the same workloads."""

from collections.abc import Callable
from typing import Final

import numpy as np

from meshwright.observe.fleet.published.figure import Basis, Doubt, Figures, figures
from meshwright.observe.fleet.sources.public.columns import MIB, number, text
from meshwright.observe.fleet.sources.public.reading import Found
from meshwright.policy.queue import Ask, Counted, Node, Policy, make_policy
from meshwright.policy.queue.ordered import Strict
from meshwright.policy.queue.orders import by_estimate
from meshwright.predict.queue import SCORERS, Outcome, outcome_of, pack, simulate

_GPUS = 64
_SEEDS = (1, 2, 3)
_POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "fifo_hol": lambda: make_policy("fifo"),
    "fifo_skip": lambda: make_policy("fifo-skip"),
    "sjf_hol": lambda: Strict(by_estimate),
    "sjf_skip": lambda: make_policy("sjf"),
    "ssf_skip": lambda: make_policy("ssf"),
    "srtf_preempt": lambda: make_policy("srtf"),
    "srsf_preempt": lambda: make_policy("srsf"),
}
_UPSTREAM: Final = {"srtf_preempt": "shortest", "srsf_preempt": "shortest-gpu"}
"""What Muri's own simulator calls the same policies."""
_OVERHEAD = Doubt(
    "Muri's simulator places jobs on nodes and lets restarts cost time; this one does neither",
    Basis.OTHER,
)
_HOW = "64 GPUs that are only counted, nothing costs time, ties by the order of the file"


def replays(found: Found) -> Figures:
    """Take a workload through the queue under each policy."""
    block = found.part.whole()
    gpus, submit = number(block, "num_gpu"), number(block, "submit_time", 1e-3)
    run = number(block, "duration", 1e-3)
    asks = [
        Ask(job=str(place), submit_s=one[0], gpus=one[1], estimate_s=one[2])
        for place, one in enumerate(zip(submit.tolist(), gpus.tolist(), run.tolist(), strict=True))
    ]
    name = found.part.stem.removeprefix("sim_")
    made: Figures = {}
    for policy, make in _POLICIES.items():
        done = outcome_of(simulate(asks, run.tolist(), Counted(_GPUS), make()))
        path = f"muri.reference_replay_ours.results.{name}.{policy}"
        made |= figures(path, _values(done), _HOW, found.part.label)
        if policy in _UPSTREAM:
            path = f"muri.simulator_upstream_run_here.results.{name}.{_UPSTREAM[policy]}"
            made |= figures(path, _values(done), _HOW, found.part.label, _OVERHEAD)
    return made


def _values(done: Outcome) -> dict[str, float]:
    return {
        "jobs": done.jobs,
        "avg_jct_s": done.jct_s.mean,
        "p50_jct_s": done.jct_s.p50,
        "p99_jct_s": done.jct_s.p99,
        "makespan_s": done.makespan_s,
        "avg_wait_s": done.wait_s.mean,
    }


def packed(nodes: Found, pods: Found) -> Figures:
    """Fill a cluster with pods by each placement, more of their like after them, up to 130 %."""
    block, asked = nodes.part.whole(), pods.part.whole()
    cluster = [
        Node(gpus=int(gpus), kind=kind or "", cpus=cpus, memory=memory)
        for gpus, kind, cpus, memory in zip(
            number(block, "gpu").tolist(),
            text(block, "model").to_pylist(),
            number(block, "cpu_milli", 1e-3).tolist(),
            number(block, "memory_mib", MIB).tolist(),
            strict=True,
        )
        if gpus > 0
    ]
    asks = [
        Ask(
            job=name, submit_s=0.0, gpus=gpus, cpus=cpus, memory=memory,
            kinds=tuple(kind for kind in (kinds or "").split("|") if kind),
        )
        for name, gpus, cpus, memory, kinds in zip(
            text(asked, "name").to_pylist(),
            (number(asked, "num_gpu") * number(asked, "gpu_milli", 1e-3)).tolist(),
            number(asked, "cpu_milli", 1e-3).tolist(),
            number(asked, "memory_mib", MIB).tolist(),
            text(asked, "gpu_spec").to_pylist(),
            strict=True,
        )
    ]  # fmt: skip
    given = {
        name: 100
        * float(np.mean([pack(cluster, asks, name, seed=seed).given[-1] for seed in _SEEDS]))
        for name in SCORERS
    }
    how = "share of GPUs given away when 130 % have been asked for, mean of three orders"
    return figures("alibaba_v2023.packed", given, how, pods.part.label)
