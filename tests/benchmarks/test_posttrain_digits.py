"""The runs with fewer bits stand in the result, and what a machine cannot do is told."""

import msgspec
import pytest

pytest.importorskip("torch", reason="trains a model")

import torch

from benchmarks import posttrain_digits
from benchmarks.posttrain_digits import ways_of
from benchmarks.result import Measured


def test_a_gpu_adds_the_runs_that_it_can_do() -> None:
    here, left_out = ways_of(None)
    assert [way.name for way in here] == [
        "bf16", "bf16, truncated", "bf16, engine in fp8", "bf16, engine in fp8, truncated"
    ]  # fmt: skip
    assert {way.device for way in here} == {"cpu"}
    assert left_out == "Runs on a GPU are left out: torch sees none."
    ways, nothing = ways_of((9, 0))
    assert [way.name for way in ways[4:]] == [f"on a GPU, {way.name}" for way in here]
    assert {way.device for way in ways[4:]} == {"cuda"}
    assert not nothing
    ways, left_out = ways_of((8, 0))
    assert [way.name for way in ways[4:]] == ["on a GPU, bf16", "on a GPU, bf16, truncated"]
    assert "fp8 on the GPU is left out" in left_out


@pytest.mark.slow
def test_the_result_holds_rollouts_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = msgspec.convert(posttrain_digits.measure(quick=True), Measured)
    named = {each.name: each.value for each in found.figures}
    for ending in ("sampled after", "greedy after", "processor time"):
        assert f"seed 0, bf16, engine in fp8, truncated, {ending}" in named
    gap = "engine against trainer, most |Δ log p|"
    gaps = [named[f"seed 0{way}, {gap}"] for way in ("", ", bf16", ", bf16, engine in fp8")]
    assert gaps == sorted(gaps), "fewer bits, further apart"
    assert "torch sees none" in found.notes
