"""Ranks that share one GPU train as one process does: the kernels of a GPU under every axis.

NCCL refuses two ranks on one device; gloo takes tensors of a GPU through the host, but not the
messages between pairs that pipelines, rings and products in pieces need. Whether the host waits for
the GPU is seen on one rank whose partners are played.
"""

import math

import msgspec
import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch

from meshwright.spec.layout import Layout
from meshwright.spec.model import MoESpec, build_decoder_model
from tests.run.parallel.equivalence import Case, check
from tests.run.parallel.nearness import Kind
from tests.run.parallel.played_step import played_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DENSE = build_decoder_model("dense", layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=128)
ROUTED = build_decoder_model(
    "routed",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=128,
    vocab=128,
    experts=MoESpec(count=4, top_k=2, width=64, gated=True, shared_width=64),
)
DEVICE = "cuda"
TOLERANCES: dict[Kind, float] = {"loss": 1e-5, "norm": 1e-4, "gradient": 1e-4, "update": 5e-3}
"""Kernels of a GPU add up in an order that depends on the shapes."""


def case(name: str, *, packed: bool = False, routed: bool = False, **fields: object) -> Case:
    layout = msgspec.convert({"microbatch": 2, "precision": "fp32", **fields}, Layout)
    model = ROUTED if routed else DENSE
    return Case(name, model, layout, packed=packed, device=DEVICE, tolerances=TOLERANCES)


def test_two_ranks_on_one_gpu_train_as_one() -> None:
    found = check(
        [
            case("tensor", tp=2),
            case("tensor and sequence", tp=2, sequence_parallel=True),
            case("keys gathered", cp=2, cp_kind="allgather"),
            case("heads exchanged", cp=2, cp_kind="ulysses", packed=True),
            case("replicas", dp=2),
            case("sharded states", dp=2, zero=1),
            case("sharded gradients", dp=2, zero=2),
            case("sharded weights", dp=2, zero=3),
            case("experts", dp=2, ep=2, routed=True),
            case("recomputed", tp=2, sequence_parallel=True, recompute="full"),
        ]
    )
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_four_ranks_on_one_gpu_train_as_one() -> None:
    found = check(
        [
            case("tensor by replicas", tp=2, sequence_parallel=True, dp=2, zero=3),
            case("hybrid sharding", dp=4, zero=3, shard=2),
            case("tensor by context", tp=2, cp=2, cp_kind="ulysses"),
            case("experts by tensor", tp=2, sequence_parallel=True, dp=2, ep=2, routed=True),
        ]
    )
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "sequence_parallel": True, "overlap_tp": True},
        {"cp": 2},
        {"cp": 2, "cp_kind": "ulysses"},
        {"cp": 2, "cp_kind": "allgather"},
        {"dp": 2},
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 3},
        {"pp": 2},
    ],
    ids=str,
)
def test_the_host_never_waits_for_the_gpu_within_a_step(fields: dict[str, object]) -> None:
    # Routed experts are left out: how many rows go where has to be read, unless it is fixed.
    layout = msgspec.convert({"microbatch": 1, "precision": "bf16", **fields}, Layout)
    with played_step(DENSE, layout, DEVICE) as (step, batch):
        for number in range(3):  # tables are made, kernels compiled
            step(batch, number)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number in range(3, 6):
                figures = step(batch, number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # Reading is what the trainer does a step later, from a copy that it began in time.
        assert not math.isnan(float(figures.losses.tokens))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_wait_for_the_gpu_is_seen() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.tensor([1.0], device=DEVICE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
