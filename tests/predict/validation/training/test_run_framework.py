"""The software of a published run follows from what its row says."""

from typing import Any

import pytest

from meshwright.predict.validation.training.run_framework import infer_framework
from meshwright.spec import catalog
from meshwright.spec.layout import Layout

H100, A100, GB200 = (catalog.get_gpu(name) for name in ("h100-80g", "a100-80g", "gb200"))
GATED = {"ffn_gated": True}


def row(sharding: str | None, kind: str = "bf16", **more: Any) -> dict[str, Any]:
    layout = {"zero_stage_or_distopt": sharding, "dispatcher": more.pop("dispatcher", None)}
    return {"layout": layout, "precision_class": kind, "model": GATED, **more}


def test_half_precision_is_the_time_before_flash_kernels() -> None:
    found = infer_framework(row(None, "fp16"), Layout(), A100)
    assert (found.attention, found.fusion, found.tp_async) == ("unfused", "partial", True)


def test_a_zero_stage_beside_half_precision_is_deepspeed() -> None:
    found = infer_framework(row("zero1", "fp16"), Layout(zero=1), A100)
    assert found.rng_state_sync
    assert not found.overlap_exchange


def test_fsdp_of_an_ungated_model_is_the_first_flash_kernels() -> None:
    found = infer_framework(row("fsdp FULL_SHARD (zero3)", model={}), Layout(zero=3), A100)
    assert (found.attention, found.fusion) == ("flash1", "native")


def test_fsdp2_is_plain_pytorch_unless_it_has_experts() -> None:
    assert infer_framework(row("fsdp2 (zero3)"), Layout(zero=3), H100).fusion == "eager"
    experts = {"ffn_gated": True, "experts": 64}
    sparse = infer_framework(row("fsdp2 (zero3)", model=experts), Layout(zero=3), H100)
    assert sparse.fusion == "fused"


@pytest.mark.parametrize(
    ("named", "style"),
    [(None, "deepep"), ("nccl-alltoall", "alltoall"), ("deepep-uccl", "deepep")],
)
def test_the_dispatcher_is_taken_from_the_row(named: str | None, style: str) -> None:
    assert infer_framework(row("distopt", dispatcher=named), Layout(), H100).dispatcher == style


def test_overlap_and_graphs_follow_the_machine() -> None:
    split = Layout(tp=2, sequence_parallel=True)
    assert infer_framework(row("distopt"), split, GB200).tp_overlap
    assert infer_framework(row("distopt"), split, GB200).cuda_graphs
    assert not infer_framework(row("distopt"), split, A100).tp_overlap


@pytest.mark.parametrize(("release", "fused"), [("26.04", False), ("26.06", True), ("26.08", True)])
def test_fused_experts_came_with_a_release(release: str, fused: bool) -> None:
    source = f'docs/performance-summary.md, section "{release} NeMo Container"'
    assert infer_framework(row("distopt", source=source), Layout(), GB200).fused_experts is fused


def test_scaling_is_delayed_unless_current_scaling_is_named() -> None:
    assert infer_framework(
        row("distopt", "fp8", precision="fp8-hybrid"), Layout(), H100
    ).delayed_scaling
    assert not infer_framework(
        row("distopt", "fp8", precision="fp8-cs"), Layout(), H100
    ).delayed_scaling
