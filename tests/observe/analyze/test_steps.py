"""Steps come from the profiler's marks; what they launched is counted, what surrounds them not."""

import pytest

from meshwright.observe.analyze.steps import Extent, counted, cut_ns, steps, steps_of
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
    first, second = steps_of(_two_steps()).steps
    assert (first.number, first.duration_ns) == (4, 100)
    assert (first.num_spans, first.busy_ns) == (2, 60)
    assert (first.device_start_ns, first.device_end_ns) == (120, 240)
    assert (second.number, second.num_spans, second.busy_ns) == (5, 1, 40)


def test_variation_is_deviation_over_mean() -> None:
    (found,) = steps(_two_steps())
    assert found.variation == pytest.approx(14.142135623730951 / 110)
    assert found.slowest is not None
    assert found.slowest.number == 5


def test_optimizer_steps_part_a_trace_without_marks() -> None:
    part = timeline(*(host(t, t + 5, "Optimizer.step#AdamW.step") for t in (10, 60, 120)))
    found = steps_of(part)
    assert found.found_by == "Optimizer.step"
    assert [(s.start_ns, s.end_ns) for s in found.steps] == [(15, 65), (65, 125)]


def test_a_trace_without_marks_has_no_steps() -> None:
    found = steps_of(timeline(kernel(0, 5)))
    assert (found.steps, found.variation, found.slowest) == ((), None, None)


def test_settled_work_was_launched_by_steps_before_the_last() -> None:
    part = _two_steps()
    spans = counted(part)
    assert [spans.names[code] for code in spans.name] == ["one", "two"]
    assert counted(part, Extent.ALL).row.size == 4


def test_the_cut_is_the_latest_mark_of_any_step() -> None:
    on_device = host(205, 300, "ProfilerStep#5", process="gpu 0", lane="stream 7 marks")
    assert cut_ns(timeline(step(4, 100, 200), step(5, 200, 320), on_device)) == 205


def test_one_step_is_not_cut() -> None:
    assert cut_ns(timeline(step(4, 100, 200), kernel(0, 5))) is None


def test_without_launches_work_goes_by_its_own_start() -> None:
    part = timeline(step(1, 0, 50), step(2, 50, 90), kernel(10, 20), kernel(60, 70))
    assert counted(part).start.tolist() == [10]
