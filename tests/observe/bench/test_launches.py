"""Launching: what a calibration has a field for is measured first."""

import pytest

from meshwright.observe.bench import layer_launches
from meshwright.observe.bench.family import Place
from meshwright.observe.bench.launches import cases, work
from meshwright.observe.bench.layer_launches import DEPTHS, KINDS, layer_sample, small_model
from meshwright.observe.bench.timing import HostTimer
from meshwright.observe.calibrate.plain import LAUNCHES
from meshwright.spec.model import Experts

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


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_small_and_of_their_kind(kind: str) -> None:
    few, many = (small_model(kind, depth) for depth in DEPTHS)
    assert (few.layers, many.layers) == DEPTHS
    assert few.blocks == many.blocks
    assert isinstance(few.blocks[0].mlp, Experts) == (kind == "experts")


def test_a_layer_is_what_depth_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_launches, "DEPTHS", (1, 2))
    (case,) = [one for one in cases("quick", on_gpu=True) if one.name == "layer_forward"][:1]
    assert layer_sample(case, Place(torch.device("cpu")))() >= 0
