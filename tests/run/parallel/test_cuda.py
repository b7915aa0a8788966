"""Ranks that share one GPU train as one process does: the kernels of a GPU under every axis.

NCCL refuses two ranks on one device; gloo takes tensors of a GPU through the host, but not the
messages between pairs that pipelines, rings and products in pieces need.
"""

import msgspec
import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch

from meshwright.spec.layout import Layout
from meshwright.spec.model import Experts, decoder
from tests.run.parallel.equivalence import Case, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DENSE = decoder("dense", layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=128)
ROUTED = decoder(
    "routed",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=128,
    vocab=128,
    experts=Experts(count=4, top_k=2, width=64, gated=True, shared_width=64),
)
DEVICE = "cuda"
TOLERANCE = 1e-4
"""Kernels of a GPU add up in an order that depends on the shapes."""


def case(name: str, *, packed: bool = False, routed: bool = False, **fields: object) -> Case:
    layout = msgspec.convert({"microbatch": 2, "precision": "fp32", **fields}, Layout)
    model = ROUTED if routed else DENSE
    return Case(name, model, layout, packed=packed, device=DEVICE, weight_tolerance=TOLERANCE)


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
