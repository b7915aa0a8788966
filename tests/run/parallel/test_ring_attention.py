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

from meshwright.run.kernels.attention import Choice, plain_attention
from meshwright.run.kernels.attention_fused import Ask
from meshwright.run.kernels.documents import Documents
from meshwright.run.nn.holding import Range
from meshwright.run.parallel import attention_block
from meshwright.run.parallel.attention_block import (
    Asked,
    Given,
    Rule,
    rule_of,
    spans_documents,
)
from meshwright.run.parallel.gathered import gathered_parts
from meshwright.run.parallel.group import Group, Message, Pending
from meshwright.run.parallel.journal import Journal
from meshwright.run.parallel.ring_attention import (
    PartedAttention,
    attend,
    is_hidden,
    ring_attention,
    ring_parts,
)
from meshwright.run.parallel.token_order import TokenOrder

B, T, H, K, E = 2, 24, 4, 2, 8
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def documents() -> Documents:
    return Documents.of_lengths([(5, 12, 7), (1, 22, 1)])


def ask(case: str) -> Asked:
    made: dict[str, Asked] = {
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
        "written out": {"prefer": "plain"},
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


def options(asked: Asked) -> dict[str, Any]:
    """Return what attention written out takes of what is asked."""
    return {name: value for name, value in asked.items() if name != "prefer"}


def tensors(values: int = E) -> list[Tensor]:
    made = torch.Generator().manual_seed(3)
    shapes = ((B, T, H, E), (B, T, K, E), (B, T, K, values), (H,))
    return [torch.randn(shape, generator=made).requires_grad_() for shape in shapes]


def by_ring(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, asked: Asked) -> Tensor:
    """Compute the parts of every rank of a ring of three, in the order their keys come."""
    order, ranks, length = TokenOrder.zigzag(3), 3, q.shape[1]
    rule, size = rule_of(q, length, asked), length // ranks
    found = []
    for rank in range(ranks):
        turns = []
        for turn in range(ranks):
            source = (rank - turn) % ranks
            for part in ring_parts(order, rank, source, rule):
                start, stop = (at + source * size for at in part.keys)
                turns.append(part._replace(keys=Range(start, stop)))
        kv = order.part(torch.cat((k, v), -1))
        found.append(attend(order.take(q, rank), kv, sinks, PartedAttention(rule, (tuple(turns),))))
    return order.join(torch.cat(found, 1))


def by_gathering(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, asked: Asked) -> Tensor:
    """Compute each rank's queries against all keys."""
    length = q.shape[1]
    order, rule = TokenOrder.zigzag(3), rule_of(q, length, asked)
    kv = torch.cat((k, v), -1)
    found = []
    for rank in range(3):
        parts = tuple(gathered_parts(order.spans(rank, length), rule))
        found.append(attend(order.take(q, rank), kv, sinks, PartedAttention(rule, (parts,))))
    return order.join(torch.cat(found, 1))


@pytest.mark.parametrize("way", [by_ring, by_gathering])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_parts_make_up_the_whole_attention_and_its_gradients(
    way: Any, causal: bool, case: str
) -> None:
    # Values are narrower than keys where no fused kernel is tried.
    given, asked = tensors(E if case == "plain" else E - 2), ask(case)
    asked["causal"] = causal
    wanted = plain_attention(
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


def flash(q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
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
        bounds = list(pairwise(ask.documents.starts.tolist()))
        others = list(pairwise(keys.starts.tolist()))
        assert max(stop - start for start, stop in bounds) <= ask.documents.longest
        assert max(stop - start for start, stop in others) <= keys.longest
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
    block = "meshwright.run.parallel.attention_block"
    monkeypatch.setattr(f"{block}.fused_forward", flash)
    monkeypatch.setattr(f"{block}.choose", lambda *_: Choice("flash", "played by the test"))
    given, asked = tensors(E - 2), ask(case)
    asked["causal"] = causal
    wanted = plain_attention(*given[:3], sinks=given[3], **options(asked))
    torch.testing.assert_close(way(*given, asked), wanted, atol=1e-5, rtol=1e-5)


def test_scores_that_do_not_fit_at_once_are_made_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.run.parallel.attention_block.SCORE_BYTES", 1500)
    test_parts_make_up_the_whole_attention_and_its_gradients(by_ring, True, "everything")


def pairs(order: TokenOrder, ranks: int) -> Iterator[list[int]]:
    """Yield for every rank how many pairs of tokens it scores in each turn."""
    rule = rule_of(torch.empty(1, T // ranks, 1, 8), T, {})
    for rank in range(ranks):
        turns = []
        for turn in range(ranks):
            (part,) = ring_parts(order, rank, (rank - turn) % ranks, rule)
            whole = part.queries.size * part.keys.size
            turns.append(whole // 2 if part.aligned else whole)
        yield turns


def test_every_rank_of_a_causal_ring_has_the_same_work_in_every_turn() -> None:
    size = T // 4
    assert list(pairs(TokenOrder.zigzag(4), 4)) == [[size * size // 2] * 4] * 4


class Mirror(Group):
    """A rank of two whose neighbour has what it has; writes down what is done in which order."""

    def __init__(self, done: list[str]) -> None:
        super().__init__("cp", (0,), 0, None, Journal())
        self.size, self.done = 2, done

    def exchange(self, messages: Sequence[Message], **_: object) -> list[Pending]:
        self.done.append("send")
        there, back = messages
        back.tensor.copy_(there.tensor)
        return [Pending(each.tensor) for each in messages]


def test_what_comes_next_is_on_its_way_before_a_turn_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    for name in ("forward", "backward"):
        compute = getattr(attention_block, name)

        def noted(*given: Any, name: str = name, compute: Any = compute) -> Any:
            done.append(name)
            return compute(*given)

        monkeypatch.setattr(attention_block, name, noted)
    q, k, v, _ = tensors()
    out = ring_attention(Given(q, k, v, None), {}, Mirror(done), TokenOrder.zigzag(2))
    assert done == ["send", "forward", "forward"]
    done.clear()
    out.sum().backward()  # type: ignore[no-untyped-call]
    # Keys and values, then their gradients; the last ones go home.
    assert done == ["send", "backward", "send", "backward", "send"]


def test_a_window_leaves_out_the_turns_it_does_not_reach() -> None:
    order = TokenOrder.zigzag(4)
    rule = rule_of(torch.empty(1, T // 4, 1, 8), T, {"window": 3})
    seen = [[len(ring_parts(order, here, there, rule)) for there in range(4)] for here in range(4)]
    # Tokens 9 to 11 begin where those of rank 2, 6 to 8, end; 0 to 2 lie beyond their window.
    assert seen[3] == [0, 0, 1, 1]
    far = ring_parts(order, 3, 0, Rule(True, None, 1.0, None, None, None, T))
    assert [is_hidden(part, rule) for part in far] == [True]


def test_documents_among_some_tokens_are_those_of_their_ids() -> None:
    spans = (Range(4, 10), Range(16, 24))
    whole = documents()
    found = spans_documents(whole, spans, T)
    ids = whole.ids(B, T)
    kept = torch.cat([ids[:, span.start : span.stop] for span in spans], 1)
    counts = torch.bincount(kept.flatten(), minlength=len(whole.starts) - 1)
    assert torch.diff(found.starts).tolist() == counts.tolist()
    assert found.longest <= 14


@GPU
@pytest.mark.parametrize("way", [by_ring, by_gathering])
@pytest.mark.parametrize("values", [64, 128], ids=["narrow values", "wide values"])
@pytest.mark.parametrize("case", ["plain", "documents", "window", "window of documents", "chunk"])
def test_fused_parts_make_up_the_whole_on_a_gpu(way: Any, values: int, case: str) -> None:
    length, width, made = 768, 128, torch.Generator("cuda").manual_seed(3)
    asked: Asked = {}
    if "documents" in case:
        lengths = [(100, 300, 368), (1, 766, 1)]
        asked["documents"] = Documents.of_lengths(lengths, device="cuda")
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
    wanted = plain_attention(*exact[:3], sinks=exact[3], **options(asked))
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
