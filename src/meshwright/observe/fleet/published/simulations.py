"""Published outcomes of queues, made again by our simulator on the same workloads."""

from collections.abc import Callable
from typing import Final

from meshwright.observe.fleet.published.figure import Basis, Doubt, Figures, figures
from meshwright.observe.fleet.sources.public.columns import number
from meshwright.observe.fleet.sources.public.reading import Found
from meshwright.policy.queue import Ask, Counted, Policy, make_policy
from meshwright.policy.queue.ordered import Strict
from meshwright.policy.queue.orders import by_estimate
from meshwright.predict.queue import Outcome, outcome_of, simulate

_GPUS = 64
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
