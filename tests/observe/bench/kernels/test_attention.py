"""Attention: every mask runs both ways, and its arithmetic is what the mask leaves."""

import pytest

from meshwright.observe.bench.bench_case import BenchCase
from meshwright.observe.bench.bench_family import BenchTarget
from meshwright.observe.bench.kernels.attention import (
    DOCUMENTS,
    list_attention_cases,
    list_validation_attention,
    prepare_attention,
)

torch = pytest.importorskip("torch", reason="the bench measures with torch")

HERE = BenchTarget(torch.device("cpu"))


def case_of(mask: str, part: str = "forward", length: int = 64) -> BenchCase:
    sizes: dict[str, int | float | str] = {
        "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "length": length, "mask": mask,
    }  # fmt: skip
    return BenchCase(family="attention", name=part, sizes=sizes)


def flops(mask: str, length: int = 64) -> float:
    made = prepare_attention(case_of(mask, length=length), HERE)
    assert made is not None
    assert made.flops is not None
    return made.flops


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("mask", ["causal", "full", "window", "packed"])
def test_every_mask_runs_both_ways(mask: str, part: str) -> None:
    made = prepare_attention(case_of(mask, part), HERE)
    assert made is not None
    made.calls[0]()
    made.calls[0]()


def test_documents_have_a_share_of_the_arithmetic() -> None:
    assert flops("packed") == pytest.approx(DOCUMENTS * flops("causal", 64 // DOCUMENTS))
    assert flops("full") > flops("causal") > flops("packed")


def test_a_full_bench_has_every_mask_both_ways_and_held_out_shapes_are_others() -> None:
    found = list_attention_cases("full", on_gpu=True)
    masks = {(case.text("mask"), case.name) for case in found}
    assert masks == {
        (mask, part)
        for mask in ("causal", "full", "window", "packed")
        for part in ("forward", "backward")
    }
    assert not {case.key for case in found} & {case.key for case in list_validation_attention()}
