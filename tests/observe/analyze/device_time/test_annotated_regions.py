"""Kernels belong to the annotation around their launch."""

from pathlib import Path

import pytest

from meshwright.observe.analyze.device_time.annotated_regions import (
    AnnotatedRegion,
    analyze_rank_regions,
)
from meshwright.timeline.readers.trace_folder import iter_timelines
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.traces import Row, call, collective, host, kernel, timeline


def note(start: int, end: int, name: str, **more: object) -> Row:
    return host(start, end, name, "user_annotation", **more)


def by_path(part: Timeline) -> dict[tuple[str, ...], AnnotatedRegion]:
    return {region.path: region for region in analyze_rank_regions(part).regions}


def test_a_region_has_the_kernels_of_those_inside_it() -> None:
    found = by_path(
        timeline(
            note(0, 50, "forward"),
            note(10, 30, "attention"),
            call(2, 3, flow_out=1), kernel(100, 110, "embed", flow_in=1),
            call(12, 13, flow_out=2), kernel(110, 140, "flash", flow_in=2),
            call(14, 15, flow_out=3), collective(140, 145, flow_in=3),
        )
    )  # fmt: skip
    whole, inner = found["forward",], found["forward", "attention"]
    assert (whole.num_kernels, whole.total_ns, whole.self_ns) == (3, 45, 10)
    assert (inner.num_kernels, inner.total_ns, inner.self_ns) == (2, 35, 35)
    assert (whole.communication_ns, whole.host_ns, whole.num_calls) == (5, 50, 1)
    assert [one.name for one in whole.kernels] == ["flash", "embed", "ncclDevKernel_AllReduce"]


def test_a_thread_without_annotations_works_for_the_main_one() -> None:
    part = timeline(
        note(0, 50, "backward"),
        call(20, 21, flow_out=1, lane="thread 2"), kernel(30, 40, flow_in=1),
        call(60, 61, flow_out=2, lane="thread 2"), kernel(70, 75, flow_in=2),
    )  # fmt: skip
    found = analyze_rank_regions(part)
    assert [(one.path, one.total_ns) for one in found.regions] == [(("backward",), 10)]
    assert (found.device_ns, found.from_main_thread_ns, found.unattributed_ns) == (15, 10, 5)


def test_one_graph_launch_gives_all_its_kernels_to_the_region() -> None:
    found = by_path(
        timeline(
            note(0, 50, "decode"),
            call(1, 2, "cudaGraphLaunch", flow_out=7),
            kernel(10, 20, flow_in=7), kernel(20, 30, "norm", flow_in=7),
        )
    )  # fmt: skip
    assert found["decode",].num_kernels == 2


def test_annotations_that_start_together_are_told_apart() -> None:
    found = by_path(
        timeline(
            note(0, 50, "outer"), note(0, 20, "inner"),
            call(5, 6, flow_out=1), kernel(60, 70, flow_in=1),
            call(30, 31, flow_out=2), kernel(70, 90, flow_in=2),
        )
    )  # fmt: skip
    assert found["outer",].num_calls == found["outer", "inner"].num_calls == 1
    assert (found["outer",].self_ns, found["outer", "inner"].self_ns) == (20, 10)


def test_compiled_graphs_are_numbered_in_order_of_time() -> None:
    found = by_path(
        timeline(
            note(40, 50, "## Call CompiledFxGraph fzzz ##"),
            note(0, 10, "## Call CompiledFxGraph fabc ##"),
            call(5, 6, flow_out=1), kernel(60, 70, flow_in=1),
            call(45, 46, flow_out=2), kernel(70, 90, flow_in=2),
        )
    )  # fmt: skip
    assert {path: one.total_ns for path, one in found.items()} == {
        ("compiled graph 1",): 10,
        ("compiled graph 2",): 20,
    }


def test_without_annotations_there_are_no_regions() -> None:
    found = analyze_rank_regions(timeline(call(0, 1, flow_out=1), kernel(5, 9, flow_in=1)))
    assert (found.regions, found.device_ns, found.unattributed_ns) == ((), 4, 4)
    assert analyze_rank_regions(Timeline.empty()).regions == ()


@pytest.mark.real
def test_backward_of_a_real_trace_is_launched_by_autograds_thread(shared: Path) -> None:
    (part,) = iter_timelines(shared / "traces/hta/trace_diff/control/control.json.gz")
    found = analyze_rank_regions(part)
    top = found.regions[0]
    assert top.path == ("## backward ##",)
    assert top.total_ns == pytest.approx(found.from_main_thread_ns, rel=0.01)
    assert found.unattributed_ns < 0.01 * found.device_ns
