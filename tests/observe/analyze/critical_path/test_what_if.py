"""What-if answers against timelines in which the change was really made."""

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.observe.analyze.critical_path import (
    CriticalPathChange,
    evaluate_changes,
    find_critical_path,
    suggest_changes,
)
from meshwright.predict.event_sim.step_simulation import simulate_step
from meshwright.spec.layout import ScheduleKind
from tests.observe.analyze.jobs import collective, steady_job, timeline_of
from tests.predict.runs import KINDS, run_of


@pytest.mark.parametrize("kind", KINDS)
def test_a_faster_stage_gives_what_the_simulator_says(kind: ScheduleKind) -> None:
    run = run_of(kind, batch=8, pp=4)
    slow, fast = simulate_step(run, slowdown={1: 1.5}), simulate_step(run)
    job = slow.build_timeline()
    gain = evaluate_changes(
        find_critical_path(job).graph, [CriticalPathChange("rank", str(job.ranks[1]), 1 / 1.5)]
    )[0]
    low, high = fast.build_timeline().extent_ns
    assert gain.before_ns == pytest.approx(job.extent_ns[1], rel=1e-4)
    assert gain.after_ns == pytest.approx(high - low, rel=1e-3)


def test_a_slower_stage_gives_what_the_simulator_says() -> None:
    run = run_of("1f1b", batch=8, pp=4)
    step, truth = simulate_step(run), simulate_step(run, slowdown={2: 1.3})
    job = step.build_timeline()
    gain = evaluate_changes(
        find_critical_path(job).graph, [CriticalPathChange("rank", str(job.ranks[2]), 1.3)]
    )[0]
    # The simulator slows passes alone; here the update of the same rank is slower too.
    update_ns = 0.3 * step.optimizer_s[2] * 1e9
    assert gain.after_ns == pytest.approx(truth.build_timeline().extent_ns[1] + update_ns, rel=1e-4)


def test_the_gain_ends_where_something_else_decides() -> None:
    # Rank 1 computes 1200 µs and the others 900: twice as fast, it saves 300 and not 600.
    job = steady_job(ranks=3, steps=1, compute_us=lambda rank, _step: 900.0 + 300 * (rank == 1))
    gain = evaluate_changes(
        find_critical_path(job, step=0).graph, [CriticalPathChange("rank", "1", 0.5)]
    )[0]
    assert (gain.before_ns, gain.after_ns) == (1_300_000, 1_000_000)


@pytest.mark.parametrize(
    ("change", "truth"),
    [
        (CriticalPathChange("collective", "all_reduce"), {"transfer_us": lambda _step: 0.0}),
        (
            CriticalPathChange("arrival", "1"),
            {"compute_us": lambda _rank, _step: 900.0},
        ),
        (
            CriticalPathChange("kernel", "gemm", 0.5),
            {"compute_us": lambda rank, _step: 450.0 + 150 * (rank == 1)},
        ),
    ],
)
def test_changes_of_a_job_of_three_ranks(change: CriticalPathChange, truth: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"compute_us": lambda rank, _step: 900.0 + 300 * (rank == 1)}
    job = steady_job(ranks=3, steps=1, **usual)
    made = steady_job(ranks=3, steps=1, **{**usual, **truth})
    gain = evaluate_changes(find_critical_path(job, step=0).graph, [change])[0]
    low, high = made.extent_ns
    assert gain.after_ns == pytest.approx(high - low, abs=2)


def test_free_communication_that_hides_saves_nothing() -> None:
    def call(start: float, flow: int) -> dict[str, object]:
        return {
            "start": start, "end": start + 1, "process": "host", "lane": "thread 1",
            "kind": "host", "name": "cudaLaunchKernel", "category": "cuda_runtime",
            "flow_out": flow,
        }  # fmt: skip

    job = timeline_of(
        [
            call(0, 1), call(2, 2),
            {"start": 5, "end": 505, "flow_in": 1},
            collective(0, 6, 300, flow_in=2),
        ]
    )  # fmt: skip
    path = find_critical_path(job, window_ns=(0, 600_000))
    changes = (CriticalPathChange("collective", "all"), CriticalPathChange("kernel", "kernel", 0.5))
    hidden, halved = evaluate_changes(path.graph, changes)
    assert hidden.after_ns == hidden.before_ns == 505_000
    assert halved.after_ns == 300_000  # Now the collective ends last.


def _calls_and_kernels(*pieces: tuple[float, float, float, str]) -> list[dict[str, object]]:
    """Launch, start and end of kernels."""
    rows: list[dict[str, object]] = []
    for flow, (launched, start, end, name) in enumerate(pieces):
        rows.append({
            "start": launched, "end": launched + 1, "process": "host", "lane": "thread 1",
            "kind": "host", "name": "cudaLaunchKernel", "category": "cuda_runtime",
            "flow_out": flow,
        })  # fmt: skip
        rows.append({"start": start, "end": end, "name": name, "flow_in": flow})
    return rows


def test_a_gain_is_a_part_of_the_windows_own_work() -> None:
    rows = _calls_and_kernels((0, 5, 1005, "earlier"), (900, 1005, 1105, "inside"))
    path = find_critical_path(timeline_of(rows), window_ns=(800_000, 1_000_000))
    (gain,) = evaluate_changes(path.graph, [CriticalPathChange("kernel", "inside", 0.5)])
    assert (gain.before_ns, gain.after_ns) == (100_000, 50_000)


def test_all_collectives_are_those_of_any_library() -> None:
    unknown = {"name": "ncclDevKernel_Generic", "collective": None}
    rows = [{"start": 0, "end": 100}, collective(0, 100, 400, **unknown)]
    path = find_critical_path(timeline_of(rows))
    (gain,) = evaluate_changes(path.graph, [CriticalPathChange("collective", "all")])
    assert (gain.before_ns, gain.after_ns) == (400_000, 100_000)


def test_gains_read_as_sentences() -> None:
    job = steady_job(ranks=2, steps=1)
    path = find_critical_path(job, step=0)
    texts = [str(gain) for gain in evaluate_changes(path.graph, suggest_changes(path))]
    assert texts[0] == "if all_reduce were free: -10.0 %"
    assert texts[1] == "if kernel gemm were 2× faster: -45.0 %"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (CriticalPathChange("kernel", "nothing", 0.5), "no kernel is called 'nothing'"),
        (CriticalPathChange("collective", "nothing"), "no collective 'nothing'"),
        (CriticalPathChange("rank", "12", 0.5), "no rank '12'"),
    ],
)
def test_what_cannot_be_changed_is_named(change: CriticalPathChange, message: str) -> None:
    path = find_critical_path(steady_job(ranks=2, steps=1), step=0)
    with pytest.raises(InputError, match=message):
        evaluate_changes(path.graph, [change])
