"""Steps come from the profiler's marks; what they launched is counted, what surrounds them not."""

import pytest

from meshwright.errors import InputError
from meshwright.observe.analyze.compute_efficiency.mfu import analyze_rank_mfu
from meshwright.observe.analyze.device_time.breakdown import analyze_rank_breakdown
from meshwright.observe.analyze.rank_summary import summarize_rank
from meshwright.observe.analyze.spans.analysis_extent import (
    AnalysisExtent,
    count_complete_steps,
    find_counted_window,
    select_counted_spans,
)
from meshwright.observe.analyze.spans.row_selection import select_steps
from meshwright.observe.analyze.spans.steps import find_rank_steps, find_steps
from meshwright.observe.analyze.step_profile import build_step_profile
from meshwright.observe.analyze.timeline_strip import build_strip
from meshwright.observe.findings import RankContext
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.traces import call, host, kernel, step, timeline


def _two_steps() -> Timeline:
    return timeline(
        step(4, 100, 200),
        step(5, 200, 320),
        kernel(90, 105, "early"),
        call(110, 112, flow_out=1),
        kernel(120, 150, "one", flow_in=1),
        call(150, 152, flow_out=2),
        kernel(210, 240, "two", flow_in=2),
        call(230, 232, flow_out=3),
        kernel(260, 300, "three", flow_in=3),
    )


def test_a_step_has_the_work_that_it_launched() -> None:
    first, second = find_rank_steps(_two_steps()).steps
    assert (first.number, first.duration_ns) == (4, 100)
    assert (first.num_spans, first.device_busy_ns) == (2, 60)
    assert (first.device_start_ns, first.device_end_ns) == (120, 240)
    assert (second.number, second.num_spans, second.device_busy_ns) == (5, 1, 40)


def test_variation_is_deviation_over_mean() -> None:
    (found,) = find_steps(_two_steps())
    assert found.variation == pytest.approx(14.142135623730951 / 110)
    assert found.slowest_step is not None
    assert found.slowest_step.number == 5


def test_optimizer_steps_part_a_trace_without_marks() -> None:
    part = timeline(*(host(t, t + 5, "Optimizer.step#AdamW.step") for t in (10, 60, 120)))
    found = find_rank_steps(part)
    assert found.step_marker == "Optimizer.step"
    assert [(s.start_ns, s.end_ns) for s in found.steps] == [(15, 65), (65, 125)]


def test_a_trace_without_marks_has_no_steps() -> None:
    found = find_rank_steps(timeline(kernel(0, 5)))
    assert (found.steps, found.variation, found.slowest_step) == ((), None, None)


def test_settled_work_was_launched_by_steps_before_the_last() -> None:
    part = _two_steps()
    spans = select_counted_spans(part)
    assert [spans.names[code] for code in spans.name] == ["one", "two"]
    assert select_counted_spans(part, AnalysisExtent.ALL).row.size == 4


def _trailing() -> Timeline:
    """Three steps of two kernels each, on a device that is a step behind the host."""
    rows = [step(number, 100 * number, 100 * number + 100) for number in (1, 2, 3)]
    for at, launch in enumerate((110, 150, 210, 250, 310, 350)):
        rows.append(call(launch, launch + 2, flow_out=at))
        rows.append(kernel(200 + 50 * at, 240 + 50 * at, f"step {at // 2 + 1}", flow_in=at))
    for number in (1, 2, 3):
        name = f"ProfilerStep#{number}"
        mark = host(100 + 100 * number, 190 + 100 * number, name, process="gpu 0", lane="marks")
        rows.append(mark)
    return timeline(*rows)


def test_where_the_device_trails_whole_steps_are_counted() -> None:
    part = _trailing()
    spans = select_counted_spans(part)
    assert [spans.names[code] for code in spans.name] == ["step 1"] * 2 + ["step 2"] * 2
    assert count_complete_steps(part) == 2
    assert spans.row.size / count_complete_steps(part) == 2
    assert spans.window_ns == (200, 390)


def test_the_window_ends_with_the_latest_mark_of_the_last_step() -> None:
    part = _trailing()
    # The device begins step 3 at 400, when the host has launched all of it.
    assert find_counted_window(part, AnalysisExtent.WINDOW) == (0, 400)
    assert select_counted_spans(part, AnalysisExtent.WINDOW).window_ns == (200, 490)
    assert count_complete_steps(part, AnalysisExtent.WINDOW) == 0


def test_breakdown_overlap_and_picture_are_of_the_window_the_rest_of_whole_steps() -> None:
    found = summarize_rank(_trailing())
    assert (found.breakdown.num_spans, found.complete_steps_breakdown.num_spans) == (6, 4)
    assert (found.breakdown.window_ns, found.complete_steps_breakdown.window_ns) == (290, 190)
    assert found.idle.idle_ns == found.complete_steps_breakdown.idle_ns == 30
    assert found.breakdown.idle_ns == 50
    assert build_strip(_trailing()).num_spans == 6


def test_work_queued_before_the_profile_is_not_in_the_window() -> None:
    marks = (step(1, 100, 200), step(2, 200, 300))
    part = timeline(
        *marks, kernel(90, 95), call(110, 112, flow_out=1), kernel(120, 130, flow_in=1),
        kernel(140, 150, "launched by the driver"),
        call(210, 212, flow_out=2), kernel(230, 240, flow_in=2),
    )  # fmt: skip
    assert select_counted_spans(part, AnalysisExtent.WINDOW).start.tolist() == [120, 140]
    without = timeline(*marks, kernel(90, 95), kernel(199, 205), kernel(200, 230))
    assert select_counted_spans(without, AnalysisExtent.WINDOW).start.tolist() == [90, 199]


def test_fewer_than_two_profiler_steps_leave_the_window_whole() -> None:
    rows = (kernel(90, 130), call(110, 112, flow_out=1), kernel(130, 230, flow_in=1))
    optimizers = [host(t, t + 5, "Optimizer.step#AdamW.step") for t in (100, 200, 300)]
    for marks in ([step(4, 100, 200)], optimizers, []):
        assert select_counted_spans(timeline(*marks, *rows), AnalysisExtent.WINDOW).row.size == 2


def test_every_analysis_divides_by_the_same_steps() -> None:
    part = _trailing()
    assert summarize_rank(part).num_steps == 2
    assert RankContext(part).num_steps == 2
    assert analyze_rank_mfu(part).num_steps == 2
    assert (
        analyze_rank_mfu(part).time_ns == 200
    )  # From the device's start of step 1 to that of step 3.
    found = build_step_profile([part])
    assert found.num_steps == (2,)
    assert found.kernels["step 1"].calls == 1


def test_the_critical_path_is_of_a_counted_step_and_of_its_own_work() -> None:
    part = _trailing()
    path = summarize_rank(part, path_in=part).critical_path
    assert path is not None
    assert path.step == 2
    # The device is busy with step 1 until 290; the host began step 2 at 200.
    assert (path.total_ns, path.ns_by_cause) == (100, {"kernel": 80, "kernel gap": 20})


def test_of_a_single_step_what_it_launched_is_counted() -> None:
    part = timeline(
        step(4, 100, 200),
        kernel(90, 130, "queued before"),
        call(110, 112, flow_out=1),
        kernel(130, 230, "its own", flow_in=1),
    )
    assert find_counted_window(part) == (100, 200)
    assert (select_counted_spans(part).start.tolist(), count_complete_steps(part)) == ([130], 1)


def test_of_a_single_step_without_launches_all_is_counted() -> None:
    part = timeline(step(4, 100, 200), kernel(0, 5))
    assert (select_counted_spans(part).row.size, count_complete_steps(part)) == (1, 1)


def test_work_without_a_recorded_launch_goes_with_what_ran_before_it() -> None:
    part = timeline(
        step(1, 100, 200), step(2, 200, 300),
        kernel(90, 95, "queued before"),
        call(110, 112, flow_out=1), kernel(120, 130, "known", flow_in=1),
        kernel(140, 150, "launched by the driver"),
        kernel(215, 220, "of an unknown stream", lane="stream 9"),
        call(210, 212, flow_out=2), kernel(230, 240, "next", flow_in=2),
        kernel(250, 260, "driver, next"),
        kernel(255, 260, "too late", lane="stream 9"),
    )  # fmt: skip
    spans = select_counted_spans(part)
    told = [spans.names[code] for code in spans.name]
    assert told == ["known", "launched by the driver", "of an unknown stream"]


def test_without_launches_the_devices_own_marks_part_steps() -> None:
    marks = [
        host(start, start + 40, f"ProfilerStep#{number}", process="gpu 0", lane="marks")
        for number, start in ((1, 100), (2, 140))
    ]
    part = timeline(step(1, 0, 50), step(2, 50, 90), *marks, kernel(110, 120), kernel(150, 160))
    assert select_counted_spans(part).start.tolist() == [110]


def test_a_step_that_several_threads_mark_is_one() -> None:
    twice = {**step(1, 1, 49), "lane": "thread 2"}
    assert [mark.number for mark in find_rank_steps(timeline(step(1, 0, 50), twice)).steps] == [1]


def test_optimizers_that_follow_each_other_end_one_step() -> None:
    rows = [host(t, t + 5, "Optimizer.step#AdamW.step") for t in (100, 200, 300)]
    rows += [host(t, t + 5, "Optimizer.step#Muon.step") for t in (106, 206, 306)]
    rows += [call(t, t + 1, flow_out=t) for t in (50, 150, 250, 350)]
    rows += [kernel(t + 2, t + 4, flow_in=t) for t in (50, 150, 250, 350)]
    part = timeline(*rows)
    assert [(s.start_ns, s.end_ns) for s in find_rank_steps(part).steps] == [(111, 211), (211, 311)]
    assert select_counted_spans(part).start.tolist() == [152, 252]
    assert count_complete_steps(part) == 2


def test_chosen_steps_are_whole_for_every_analysis() -> None:
    chosen = select_steps(_trailing(), [2, 3])
    assert (select_counted_spans(chosen).row.size, count_complete_steps(chosen)) == (4, 2)
    assert analyze_rank_breakdown(chosen) == analyze_rank_breakdown(
        chosen, AnalysisExtent.COMPLETE_STEPS
    )
    assert analyze_rank_breakdown(chosen).num_spans == 4
    assert RankContext(chosen).num_steps == 2


def test_chosen_steps_must_follow_each_other() -> None:
    with pytest.raises(InputError, match="has step 2 between"):
        select_steps(_trailing(), [1, 3])


def test_without_launches_work_goes_by_its_own_start() -> None:
    part = timeline(step(1, 0, 50), step(2, 50, 90), kernel(10, 20), kernel(60, 70))
    assert select_counted_spans(part).start.tolist() == [10]
