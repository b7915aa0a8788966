"""Every schedule that the simulator can run is recognised in its timeline; bubbles are measured."""

import numpy as np
import pytest

from meshwright.observe.analyze.pipeline_bubble import analyze_pipeline
from meshwright.observe.analyze.spans.row_selection import select_comparison_rows
from meshwright.predict.event_sim.step_simulation import simulate_step
from meshwright.spec.layout import ScheduleKind
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.jobs import steady_job
from tests.predict.runs import KINDS, run_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pp", "batch"), [(2, 6), (4, 8), (4, 16), (8, 24)])
def test_a_simulated_schedule_is_recognised(kind: ScheduleKind, pp: int, batch: int) -> None:
    found = analyze_pipeline(simulate_step(run_of(kind, batch=batch, pp=pp)).build_timeline())
    assert found is not None
    assert found.schedule == kind
    assert found.match_score == 1.0
    assert found.num_microbatches == batch


def test_noise_does_not_hide_the_schedule() -> None:
    step = simulate_step(run_of("1f1b"), jitter_cv=0.2, seed=3)
    found = analyze_pipeline(step.build_timeline())
    assert found is not None
    assert found.schedule == "1f1b"


def test_the_bubble_of_gpipe_is_the_one_of_the_formula() -> None:
    # p - 1 of m + p - 1 slots are empty (Huang et al. 2019); stages are equal but for the ends.
    found = analyze_pipeline(simulate_step(run_of("gpipe", batch=8, pp=4)).build_timeline())
    assert found is not None
    assert found.bubble_share == pytest.approx(3 / 11, rel=0.02)
    assert [one.stage for one in found.ranks] == [0, 1, 2, 3]
    warmups = np.diff([one.warmup_ns for one in found.ranks])
    assert np.all(warmups > 0)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_messages_alone_tell_the_schedule(kind: ScheduleKind) -> None:
    step = simulate_step(run_of(kind, batch=8, pp=4))
    found = analyze_pipeline(step.build_timeline().select(kinds=["communication"]))
    assert found is not None
    assert found.schedule == kind


def test_a_job_without_stages_has_no_pipeline() -> None:
    assert analyze_pipeline(steady_job()) is None
    assert analyze_pipeline(Timeline.empty()) is None


def _again(timeline: Timeline, times: int, *, shift: int = 0, longer_ns: int = 0) -> Timeline:
    """The step several times one after another, on ranks with other numbers."""
    low, high = timeline.extent_ns
    names = [name for name in timeline.spans.column_names if not name.startswith("flow")]
    parts = []
    for number in range(times):
        columns: dict[str, object] = {name: timeline.spans.column(name) for name in names}
        columns["rank"] = timeline.column("rank") + shift
        columns["start_ns"] = timeline.column("start_ns") + number * (high - low + longer_ns)
        parts.append(
            Timeline.from_columns(columns, source="measured", metadata=dict(timeline.metadata))
        )
    return Timeline.concat(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_and_steps_are_kept_apart(kind: ScheduleKind) -> None:
    step = simulate_step(run_of(kind, batch=8, pp=4)).build_timeline()
    alone = analyze_pipeline(step)
    apart = max(step.ranks) + 1
    # Between steps ranks update: that is no bubble, however long it takes.
    job = Timeline.concat([_again(step, 3, shift=apart * at, longer_ns=10**9) for at in range(2)])
    found = analyze_pipeline(job)
    assert alone is not None
    assert found is not None
    assert (found.schedule, found.match_score) == (kind, 1.0)
    assert (found.num_microbatches, found.num_stages, found.num_steps) == (8, 4, 3)
    assert len(found.ranks) == 8
    assert found.bubble_share == pytest.approx(alone.bubble_share, rel=1e-6)


def test_steps_that_the_profile_cuts_are_left_out() -> None:
    step = simulate_step(run_of("1f1b", batch=8, pp=4)).build_timeline()
    job = _again(step, 4, longer_ns=1000)
    low, high = step.extent_ns
    cut = job.select(window_ns=(low + (high - low) // 2, 4 * high))
    found, alone = analyze_pipeline(cut), analyze_pipeline(step)
    assert found is not None
    assert alone is not None
    assert (found.schedule, found.num_steps) == ("1f1b", 3)
    assert found.bubble_share == pytest.approx(alone.bubble_share, rel=1e-6)


def test_a_stage_that_is_not_there_does_not_hide_the_schedule() -> None:
    step = simulate_step(run_of("1f1b", batch=8, pp=4)).build_timeline()
    found = analyze_pipeline(step.select(ranks=step.ranks[:3]))
    assert found is not None
    assert (found.schedule, found.num_stages) == ("1f1b", 4)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_messages_of_replicas_and_steps_tell_the_schedule(kind: ScheduleKind) -> None:
    step = simulate_step(run_of(kind, batch=8, pp=4)).build_timeline()
    apart = max(step.ranks) + 1
    job = Timeline.concat([_again(step, 2, shift=apart * at) for at in range(2)])
    found = analyze_pipeline(job.select(kinds=["communication"]))
    assert found is not None
    assert (found.schedule, found.num_microbatches, found.num_stages) == (kind, 8, 4)


def test_what_is_kept_of_a_rank_still_tells_interleaved_stages() -> None:
    step = simulate_step(run_of("interleaved", batch=8, pp=4)).build_timeline()
    found = analyze_pipeline(
        Timeline.concat([select_comparison_rows(part) for part in step.split_by_rank()])
    )
    assert found is not None
    assert found.schedule == "interleaved"


@pytest.mark.parametrize("name", ["forward", "send activations"])
def test_stages_beyond_any_pipeline_are_read_and_not_compared(name: str) -> None:
    sends, backward = name.startswith("send"), name.replace("activations", "gradients")
    names = [name, backward if sends else "backward"] * 4
    timeline = Timeline.from_columns(
        {
            "rank": [0] * 8 + [1] * 8,
            "stage": [0] * 8 + [100_000] * 8,
            "layer": [0] * 8 + [100_000] * 8,
            "microbatch": [0, 0, 1, 1, 2, 2, 3, 3] * 2,
            "start_ns": [10 * place for place in range(16)],
            "duration_ns": 5,
            "kind": "communication" if sends else "compute",
            "name": names * 2,
            "collective": "send" if sends else None,
            "process": "gpu 0",
            "lane": "forward-backward",
        },
        source="measured",
    )
    found = analyze_pipeline(timeline)
    assert found is None if sends else found is not None and found.schedule == ""
