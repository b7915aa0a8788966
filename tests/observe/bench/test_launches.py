"""Launching: what a calibration has a field for is measured first."""

import pytest

from meshwright.observe.bench.family import Place
from meshwright.observe.bench.launches import cases, work
from meshwright.observe.bench.timing import HostTimer
from meshwright.observe.calibrate.plain import LAUNCHES

torch = pytest.importorskip("torch", reason="the bench measures with torch")


def test_a_quick_bench_has_all_that_a_calibration_reads_and_a_full_one_begins_with_it() -> None:
    quick, full = cases("quick", on_gpu=True), cases("full", on_gpu=True)
    assert {case.name for case in quick} >= set(LAUNCHES)
    assert full[: len(quick)] == quick
    assert {case.name for case in full} >= {"graph_node", "allocate", "malloc", "free"}


@pytest.mark.parametrize("case", cases("full", on_gpu=False), ids=lambda case: case.key)
def test_a_processor_takes_microseconds_for_a_small_operation(case: object) -> None:
    made = work(case, Place(torch.device("cpu")))  # type: ignore[arg-type]
    assert made is not None
    timed = HostTimer(budget_s=0.0).time(made)
    assert len(timed.samples) == 3
    assert 1e-8 < timed.seconds < 1e-2
