"""Launching: what a calibration has a field for is measured first."""

import pytest

from meshwright.observe.bench.bench_family import BenchTarget
from meshwright.observe.bench.kernels import layer_overhead
from meshwright.observe.bench.kernels.launch_overhead import list_launch_cases, prepare_launch
from meshwright.observe.bench.kernels.layer_overhead import (
    DEPTHS,
    KINDS,
    build_small_model,
    make_layer_sampler,
)
from meshwright.observe.bench.timing import HostTimer
from meshwright.observe.calibrate.bandwidth_fit import LAUNCHES
from meshwright.spec.model import MoESpec

torch = pytest.importorskip("torch", reason="the bench measures with torch")


def test_a_quick_bench_has_all_that_a_calibration_reads_and_a_full_one_begins_with_it() -> None:
    quick, full = list_launch_cases("quick", on_gpu=True), list_launch_cases("full", on_gpu=True)
    assert {case.name for case in quick} >= set(LAUNCHES)
    assert full[: len(quick)] == quick
    assert {case.name for case in full} >= {"graph_node", "allocate", "malloc", "free"}


@pytest.mark.parametrize("case", list_launch_cases("full", on_gpu=False), ids=lambda case: case.key)
def test_a_processor_takes_microseconds_for_a_small_operation(case: object) -> None:
    made = prepare_launch(case, BenchTarget(torch.device("cpu")))  # type: ignore[arg-type]
    assert made is not None
    timed = HostTimer(budget_s=0.0).time(made)
    assert len(timed.samples_s) == 3
    assert 1e-8 < timed.median_s < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_small_and_of_their_kind(kind: str) -> None:
    few, many = (build_small_model(kind, depth) for depth in DEPTHS)
    assert (few.layers, many.layers) == DEPTHS
    assert few.blocks == many.blocks
    assert isinstance(few.blocks[0].mlp, MoESpec) == (kind == "experts")


def test_a_layer_is_what_depth_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_overhead, "DEPTHS", (1, 2))
    (case,) = [
        one for one in list_launch_cases("quick", on_gpu=True) if one.name == "layer_forward"
    ][:1]
    assert make_layer_sampler(case, BenchTarget(torch.device("cpu")))() >= 0
