"""Tensor parallelism, with and without sequence parallelism, gives what one device gives."""

from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch

from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.weight_init import materialize
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.sharded_model import shard_model
from meshwright.run.parallel.tensor_parallel.tensor_parallel import find_tensor_parallel_problems
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_decoder_model, build_gpt
from tests.run.parallel.covering import olmo2, olmoe
from tests.run.parallel.equivalence import Case, check

BIASED = build_gpt("biased", layers=2, hidden=32, heads=4, vocab=61, max_positions=32)
DENSE = build_decoder_model("dense", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)


def cases(ranks: int) -> list[Case]:
    plain = Layout(tp=ranks, microbatch=2, precision="fp32")
    sequence = Layout(tp=ranks, sequence_parallel=True, microbatch=2, precision="fp32")
    recomputed = msgspec.structs.replace(sequence, recompute="full")
    return [
        Case("all tokens on every rank", DENSE, plain),
        Case("a share of the tokens on each", DENSE, sequence),
        Case("packed documents", DENSE, sequence, packed=True),
        Case("products in pieces", DENSE, msgspec.structs.replace(sequence, overlap_tp=True)),
        Case("with biases, in pieces", BIASED, msgspec.structs.replace(sequence, overlap_tp=True)),
        Case("norms of all heads", olmo2(2), plain),
        Case("norms of all heads, recomputed", olmo2(2), recomputed),
        Case("norms of all heads, with means", olmo2(2, "layer"), sequence),
        Case("norms of all heads, slices of experts", olmoe(2), sequence),
    ]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_heads_train_as_one_device(ranks: int) -> None:
    # Of four ranks two each hold the same key and value head.
    found = check(cases(ranks))
    assert {name: lines for name, lines in found.items() if lines} == {}


def found_by_ranks() -> tuple[tuple[float, float], list[tuple[str, int]]]:
    return _logit_gradients(), _sums_of_norms()


@pytest.fixture(scope="module")
def ranks() -> list[tuple[tuple[float, float], list[tuple[str, int]]]]:
    return spawn_ranks(2, found_by_ranks)


def test_gradients_through_the_logits_of_ranks_are_those_of_one_device(ranks: list[Any]) -> None:
    for (over_input, over_weight), _ in ranks:
        assert over_input < 1e-5
        assert over_weight < 1e-5


def _logit_gradients() -> tuple[float, float]:
    """Return how far the gradients of a loss over all logits are from one device's."""
    torch.set_num_threads(1)
    mine = shard_model(DENSE, Mesh(Layout(tp=2, precision="fp32")), dtype=torch.float32, seed=1)
    whole = build_decoder(DENSE, dtype=torch.float32)
    materialize(whole, "cpu", seed=1)
    given = torch.randn(1, 4, DENSE.hidden, generator=torch.Generator().manual_seed(0))
    here, there = given.clone().requires_grad_(), given.clone().requires_grad_()
    shared, part = mine.decoder.head.vocab_parallel, mine.decoder.head.weight
    all_words = whole.head.weight
    assert shared is not None
    assert part is not None
    assert all_words is not None
    for logits in (shared.logits(here, part, None), there @ all_words.t()):
        logits.square().sum().backward()  # type: ignore[no-untyped-call]
    assert all_words.grad is not None
    expected = mine.shard_specs["head.weight"].select_local(all_words.grad)
    return _apart(here.grad, there.grad), _apart(part.grad, expected)


def _apart(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    assert found is not None
    assert wanted is not None
    return float((found - wanted).norm() / wanted.norm())


def _sums_of_norms() -> list[tuple[str, int]]:
    """Return what two ranks sum up in a forward pass of a layer with norms of all heads."""
    mesh = Mesh(Layout(tp=2, precision="fp32"))
    mine = shard_model(olmo2(1), mesh, dtype=torch.float32, seed=1)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    before = len(mesh.flight_recorder.records)
    mine.pipeline_stage.forward_one_chunk(0, Microbatch(tokens, tokens), None)
    entries = list(mesh.flight_recorder.records)[before:]
    return [
        (entry.op, entry.elements) for entry in entries if "sharded_norm" in str(entry.call_site)
    ]


def test_norms_of_all_heads_cost_one_small_sum_of_queries_and_keys_together(
    ranks: list[Any],
) -> None:
    for _, found in ranks:
        assert found == [("all_reduce sum", 2 * 8 * 2)]


def test_models_with_norms_of_all_heads_are_not_refused() -> None:
    for name in ("olmo2-7b", "olmoe-1b-7b"):
        assert find_tensor_parallel_problems(catalog.get_model(name), Layout(tp=2)) == []
