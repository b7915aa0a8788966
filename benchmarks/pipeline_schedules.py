"""How fast pipeline schedules are built, verified and tuned, beside PyTorch's own builders."""

import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from meshwright.policy.pipeline import (
    PipelinePassDurations,
    add_transfers,
    build_schedule,
    find_zero_bubble_schedule,
    verify_schedule,
)
from meshwright.policy.pipeline.schedule_tuner import compute_makespan
from meshwright.spec.layout import ScheduleKind

NAME = "pipeline_schedules"
QUESTION = "How long does it take to build and verify a pipeline schedule?"

REPEATS = 5


class Case(NamedTuple):
    """A schedule to build."""

    kind: ScheduleKind
    ranks: int
    microbatches: int
    virtual_stages: int | None = None
    target: str = ""


CASES = (
    Case("interleaved", 16, 256, 8, "< 0.5"),
    Case("1f1b", 64, 1024, None, "< 1"),
    Case("zb-h2", 64, 1024),
    Case("zb-v", 16, 256),
    Case("dualpipe", 16, 256),
    Case("dualpipe-v", 16, 256),
)
LENGTHS = PipelinePassDurations(forward=10, backward_input=11, backward_weight=8, transfer=1)


def median_s(work: Callable[[], object]) -> float:
    """Return the median time of some runs."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def build_and_verify(case: Case) -> None:
    """Build one schedule and refuse to go on where it is unsound."""
    schedule = build_schedule(
        case.kind, case.ranks, case.microbatches, virtual_stages=case.virtual_stages
    )
    problems = verify_schedule(schedule)
    if problems:
        raise AssertionError(problems)


def torch_interleaved(ranks: int, microbatches: int, local: int) -> list[Any]:
    """Let PyTorch compute the same interleaved order, without stages and process group."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    schedule: Any = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    # Its order has no public door: the constructor wants a process group.
    vars(schedule).update(
        pp_group_size=ranks,
        _n_microbatches=microbatches,
        n_local_stages=local,
        microbatches_per_round=ranks,
    )
    order = schedule._calculate_single_rank_operations  # noqa: SLF001
    return [order(rank) for rank in range(ranks)]


def peers(case: Case) -> list[dict[str, object]]:
    """Measure what PyTorch takes to build one order, where it is installed."""
    if importlib.util.find_spec("torch") is None:
        return []
    given = case.ranks, case.microbatches, case.virtual_stages or 1
    torch_interleaved(*given)  # imports
    seconds = median_s(lambda: torch_interleaved(*given))
    return [{"name": f"torch: {title(case)}, built only", "value": seconds, "unit": "s"}]


def title(case: Case) -> str:
    """Name a case in a few words."""
    chunks = f"×{case.virtual_stages}" if case.virtual_stages else ""
    return f"{case.kind} {case.ranks}{chunks}, {case.microbatches} microbatches"


def idle_shares(ranks: int, microbatches: int) -> list[dict[str, object]]:
    """Return how long the tuner takes, and what three orders idle."""
    start = time.perf_counter()
    tuned = find_zero_bubble_schedule(ranks, microbatches, LENGTHS, max_in_flight=3 * ranks)
    tuned_s = time.perf_counter() - start
    work = microbatches * (LENGTHS.forward + LENGTHS.backward_input + LENGTHS.backward_weight)
    orders = {
        "1f1b": build_schedule("1f1b", ranks, microbatches),
        "zb-h1": build_schedule("zb-h1", ranks, microbatches),
        "zero_bubble, 3p in flight": tuned,
    }
    name = f"zero_bubble {ranks}, {microbatches} microbatches"
    return [
        {"name": name, "value": tuned_s, "unit": "s"},
        *(
            {
                "name": f"idle share of {name}",
                "value": 100 * (compute_makespan(order, LENGTHS)[1] / work - 1),
                "unit": "%",
            }
            for name, order in orders.items()
        ),
    ]


def measure(quick: bool) -> dict[str, object]:
    """Measure and return the figures."""
    cases = [case._replace(ranks=4, microbatches=16) for case in CASES] if quick else list(CASES)
    figures: list[dict[str, object]] = [
        {
            "name": title(case),
            "value": median_s(partial(build_and_verify, case)),
            "unit": "s",
            "target": case.target,
        }
        for case in cases
    ]
    first, second = cases[:2]
    only_build = partial(
        build_schedule,
        first.kind,
        first.ranks,
        first.microbatches,
        virtual_stages=first.virtual_stages,
    )
    plain = build_schedule(second.kind, second.ranks, second.microbatches)
    figures += [
        {"name": f"{title(first)}, built only", "value": median_s(only_build), "unit": "s"},
        {
            "name": f"transfers into {title(second)}",
            "value": median_s(partial(add_transfers, plain)),
            "unit": "s",
        },
        *idle_shares(*((4, 16) if quick else (16, 256))),
    ]
    return {
        "figures": figures,
        "peers": peers(first),
        "notes": "One core, medians of five. Built and verified (counts, placement, deadlock) "
        "unless said otherwise. Idle shares with forward 10, backward-input 11, backward-weight 8, "
        "hop 1, over the work of a rank.",
    }
