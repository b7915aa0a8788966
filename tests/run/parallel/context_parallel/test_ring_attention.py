"""Attention in parts, merged by their normalisers, is attention; one process plays all ranks.

Shapes: B sequences, T tokens of a sequence, H query heads, K key and value heads, E key width.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch", reason="computes with torch")

import torch
from torch import Tensor

from meshwright.run.kernels.attention.fused_attention import FusedAttentionArgs
from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.attention.sdpa import AttentionBackendChoice, attention_reference
from meshwright.run.nn.sharding.shard_spec import IndexRange
from meshwright.run.parallel.context_parallel import partial_attention
from meshwright.run.parallel.context_parallel.all_gather_attention import iter_all_gather_parts
from meshwright.run.parallel.context_parallel.partial_attention import (
    AttentionInputs,
    AttentionOptions,
    AttentionRule,
    make_attention_rule,
    select_documents_in_spans,
)
from meshwright.run.parallel.context_parallel.ring_attention import (
    RingAttentionSchedule,
    attend_in_parts,
    is_part_masked,
    list_ring_attention_parts,
    ring_attention,
)
from meshwright.run.parallel.context_parallel.token_partition import TokenPartition
from meshwright.run.parallel.flight_recorder import FlightRecorder
from meshwright.run.parallel.group_coordinator import AsyncWork, GroupCoordinator, P2PMessage

B, T, H, K, E = 2, 24, 4, 2, 8
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def documents() -> PackedSequences:
    return PackedSequences.from_lengths([(5, 12, 7), (1, 22, 1)])


def ask(case: str) -> AttentionOptions:
    made: dict[str, AttentionOptions] = {
        "plain": {},
        "documents": {"documents": documents()},
        "window": {"window": 5},
        "window of documents": {"window": 5, "documents": documents()},
        "chunks": {"chunk": 7},
        "chunks of documents": {"chunk": 4, "documents": documents()},
        "soft cap": {"softcap": 2.0},
        "slopes": {"alibi": torch.linspace(0.1, 0.5, H)},
        "everything": {
            "softcap": 2.0,
            "alibi": torch.linspace(0.1, 0.5, H),
            "window": 9,
            "documents": documents(),
            "scale": 0.4,
        },
        "written out": {"prefer": "reference"},
    }
    return made[case]


CASES = (
    "plain",
    "documents",
    "window",
    "window of documents",
    "chunks",
    "chunks of documents",
    "soft cap",
    "slopes",
    "everything",
    "written out",
)


def options(asked: AttentionOptions) -> dict[str, Any]:
    """Return what attention written out takes of what is asked."""
    return {name: value for name, value in asked.items() if name != "prefer"}


def tensors(values: int = E) -> list[Tensor]:
    made = torch.Generator().manual_seed(3)
    shapes = ((B, T, H, E), (B, T, K, E), (B, T, K, values), (H,))
    return [torch.randn(shape, generator=made).requires_grad_() for shape in shapes]


def by_ring(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, asked: AttentionOptions
) -> Tensor:
    """Compute the parts of every rank of a ring of three, in the order their keys come."""
    order, ranks, length = TokenPartition.zigzag(3), 3, q.shape[1]
    rule, size = make_attention_rule(q, length, asked), length // ranks
    found = []
    for rank in range(ranks):
        turns = []
        for turn in range(ranks):
            source = (rank - turn) % ranks
            for part in list_ring_attention_parts(order, rank, source, rule):
                start, stop = (at + source * size for at in part.keys)
                turns.append(part._replace(keys=IndexRange(start, stop)))
        kv = order.to_rank_order(torch.cat((k, v), -1))
        found.append(
            attend_in_parts(
                order.select_local_tokens(q, rank),
                kv,
                sinks,
                RingAttentionSchedule(rule, (tuple(turns),)),
            )
        )
    return order.to_full_sequence(torch.cat(found, 1))


def by_gathering(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, asked: AttentionOptions
) -> Tensor:
    """Compute each rank's queries against all keys."""
    length = q.shape[1]
    order, rule = TokenPartition.zigzag(3), make_attention_rule(q, length, asked)
    kv = torch.cat((k, v), -1)
    found = []
    for rank in range(3):
        parts = tuple(iter_all_gather_parts(order.get_rank_spans(rank, length), rule))
        found.append(
            attend_in_parts(
                order.select_local_tokens(q, rank), kv, sinks, RingAttentionSchedule(rule, (parts,))
            )
        )
    return order.to_full_sequence(torch.cat(found, 1))


@pytest.mark.parametrize("way", [by_ring, by_gathering])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_parts_make_up_the_whole_attention_and_its_gradients(
    way: Any, causal: bool, case: str
) -> None:
    # Values are narrower than keys where no fused kernel is tried.
    given, asked = tensors(E if case == "plain" else E - 2), ask(case)
    asked["causal"] = causal
    wanted = attention_reference(
        *given[:3],
        sinks=given[3],
        **options(asked),
    )
    found = way(*given, asked)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5))
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((wanted * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def flash(q: Tensor, k: Tensor, v: Tensor, ask: FusedAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute what the flash kernel is asked for, as its authors describe it.

    Documents are cut out of queries and keys by their own starts; a causal mask and a window count
    from the last query and the last key of each; a query without keys has a normaliser of +inf.
    """
    batch, length, heads = q.shape[:3]
    keys = ask.key_documents or ask.documents
    if ask.documents is None or keys is None:
        bounds = [(row * length, row * length + length) for row in range(batch)]
        others = [(row * k.shape[1], (row + 1) * k.shape[1]) for row in range(batch)]
    else:
        bounds = list(pairwise(ask.documents.cu_seqlens.tolist()))
        others = list(pairwise(keys.cu_seqlens.tolist()))
        assert max(stop - start for start, stop in bounds) <= ask.documents.max_length
        assert max(stop - start for start, stop in others) <= keys.max_length
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
    out = q.new_zeros(len(q), heads, v.shape[-1])
    lse = q.new_full((heads, len(q)), torch.inf)
    for (start, stop), (first, last) in zip(bounds, others, strict=True):
        if start == stop or first == last:
            continue
        scores = torch.einsum("the,she->hts", q[start:stop], k[first:last]) * ask.scale
        ends = torch.arange(stop - start)[:, None] - (stop - start)
        behind = ends - (torch.arange(last - first) - (last - first))
        if ask.causal:
            scores = scores.masked_fill(behind < 0, -torch.inf)
        if ask.window is not None:
            scores = scores.masked_fill(behind >= ask.window, -torch.inf)
        sums = torch.logsumexp(scores, -1)
        lse[:, start:stop] = sums.masked_fill(sums == -torch.inf, torch.inf)
        shares = scores.softmax(-1).nan_to_num()
        out[start:stop] = torch.einsum("hts,she->the", shares, v[first:last])
    if ask.documents is None:
        lse = lse.view(heads, batch, length).transpose(0, 1)
    return out.view(batch, length, heads, -1), lse


@torch.no_grad()
@pytest.mark.parametrize("way", [by_ring, by_gathering])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "case", ["plain", "documents", "window", "window of documents", "chunks of documents"]
)
def test_what_the_flash_kernel_is_asked_for_makes_up_the_whole(
    monkeypatch: pytest.MonkeyPatch, way: Any, causal: bool, case: str
) -> None:
    block = "meshwright.run.parallel.context_parallel.partial_attention"
    monkeypatch.setattr(f"{block}.fused_forward", flash)
    monkeypatch.setattr(
        f"{block}.select_attention_backend",
        lambda *_: AttentionBackendChoice("flash", "played by the test"),
    )
    given, asked = tensors(E - 2), ask(case)
    asked["causal"] = causal
    wanted = attention_reference(*given[:3], sinks=given[3], **options(asked))
    torch.testing.assert_close(way(*given, asked), wanted, atol=1e-5, rtol=1e-5)


def test_scores_that_do_not_fit_at_once_are_made_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "meshwright.run.parallel.context_parallel.partial_attention.MAX_SCORE_BYTES", 1500
    )
    test_parts_make_up_the_whole_attention_and_its_gradients(by_ring, True, "everything")


def pairs(order: TokenPartition, ranks: int) -> Iterator[list[int]]:
    """Yield for every rank how many pairs of tokens it scores in each turn."""
    rule = make_attention_rule(torch.empty(1, T // ranks, 1, 8), T, {})
    for rank in range(ranks):
        turns = []
        for turn in range(ranks):
            (part,) = list_ring_attention_parts(order, rank, (rank - turn) % ranks, rule)
            whole = part.queries.size * part.keys.size
            turns.append(whole // 2 if part.is_aligned else whole)
        yield turns


def test_every_rank_of_a_causal_ring_has_the_same_work_in_every_turn() -> None:
    size = T // 4
    assert list(pairs(TokenPartition.zigzag(4), 4)) == [[size * size // 2] * 4] * 4


class Mirror(GroupCoordinator):
    """A rank of two whose neighbour has what it has; writes down what is done in which order."""

    def __init__(self, done: list[str]) -> None:
        super().__init__("cp", (0,), 0, None, FlightRecorder())
        self.size, self.done = 2, done

    def batch_send_recv(self, messages: Sequence[P2PMessage], **_: object) -> list[AsyncWork]:
        self.done.append("send")
        there, back = messages
        back.tensor.copy_(there.tensor)
        return [AsyncWork(each.tensor) for each in messages]


def test_what_comes_next_is_on_its_way_before_a_turn_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    for name in ("partial_attention_forward", "partial_attention_backward"):
        compute = getattr(partial_attention, name)

        def noted(*given: Any, name: str = name, compute: Any = compute) -> Any:
            done.append(name.rpartition("_")[2])
            return compute(*given)

        monkeypatch.setattr(partial_attention, name, noted)
    q, k, v, _ = tensors()
    out = ring_attention(AttentionInputs(q, k, v, None), {}, Mirror(done), TokenPartition.zigzag(2))
    assert done == ["send", "forward", "forward"]
    done.clear()
    out.sum().backward()  # type: ignore[no-untyped-call]
    # Keys and values, then their gradients; the last ones go home.
    assert done == ["send", "backward", "send", "backward", "send"]


def test_a_window_leaves_out_the_turns_it_does_not_reach() -> None:
    order = TokenPartition.zigzag(4)
    rule = make_attention_rule(torch.empty(1, T // 4, 1, 8), T, {"window": 3})
    seen = [
        [len(list_ring_attention_parts(order, here, there, rule)) for there in range(4)]
        for here in range(4)
    ]
    # Tokens 9 to 11 begin where those of rank 2, 6 to 8, end; 0 to 2 lie beyond their window.
    assert seen[3] == [0, 0, 1, 1]
    far = list_ring_attention_parts(
        order, 3, 0, AttentionRule(True, None, 1.0, None, None, None, T)
    )
    assert [is_part_masked(part, rule) for part in far] == [True]


def test_documents_among_some_tokens_are_those_of_their_ids() -> None:
    spans = (IndexRange(4, 10), IndexRange(16, 24))
    whole = documents()
    found = select_documents_in_spans(whole, spans, T)
    ids = whole.ids(B, T)
    kept = torch.cat([ids[:, span.start : span.stop] for span in spans], 1)
    counts = torch.bincount(kept.flatten(), minlength=len(whole.cu_seqlens) - 1)
    assert torch.diff(found.cu_seqlens).tolist() == counts.tolist()
    assert found.max_length <= 14


@GPU
@pytest.mark.parametrize("way", [by_ring, by_gathering])
@pytest.mark.parametrize("values", [64, 128], ids=["narrow values", "wide values"])
@pytest.mark.parametrize("case", ["plain", "documents", "window", "window of documents", "chunk"])
def test_fused_parts_make_up_the_whole_on_a_gpu(way: Any, values: int, case: str) -> None:
    length, width, made = 768, 128, torch.Generator("cuda").manual_seed(3)
    asked: AttentionOptions = {}
    if "documents" in case:
        lengths = [(100, 300, 368), (1, 766, 1)]
        asked["documents"] = PackedSequences.from_lengths(lengths, device="cuda")
    if "window" in case:
        asked["window"] = 200
    if case == "chunk":
        asked["chunk"] = 160
    shapes = ((B, length, H, width), (B, length, K, width), (B, length, K, values), (H,))
    given = [
        torch.randn(shape, generator=made, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    ]
    exact = [tensor.detach().float().requires_grad_() for tensor in given]
    found = way(*given, asked)
    wanted = attention_reference(*exact[:3], sinks=exact[3], **options(asked))
    weights = torch.randn(wanted.shape, generator=made, device="cuda")
    errors = [_error(found, wanted)] + [
        _error(one, other)
        for one, other in zip(
            torch.autograd.grad((found.float() * weights).sum(), given),
            torch.autograd.grad((wanted * weights).sum(), exact),
            strict=True,
        )
    ]
    # bfloat16 keeps eight bits.
    assert max(errors) < 0.01, errors


def _error(found: Tensor, wanted: Tensor) -> float:
    return float(((found.float() - wanted).norm() / wanted.norm()).detach())
