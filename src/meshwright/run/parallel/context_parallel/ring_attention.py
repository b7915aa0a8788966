"""Ring attention: keys and values go round the ranks while each attends to those it has.

Each rank keeps its queries. In every turn it passes the keys and values it has to the next rank,
and computes with them while the next ones come (Liu et al., arXiv 2310.01889). Backward goes round
once more, and the gradients of keys and values follow them until they are home.

Ranks have an early and a late run of tokens each (see `TokenPartition.zigzag`), so that under a
causal mask every turn is the same work for all: half of the pairs of tokens, in one block without a
mask.

Shapes: B sequences, T tokens here, H query heads, K key and value heads, E key width, V value
width, W = E + V.
"""

# Autograd's own functions are untyped.
# mypy: allow-untyped-calls

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.run.nn.sharding.shard_spec import IndexRange
from meshwright.run.parallel.context_parallel import partial_attention
from meshwright.run.parallel.context_parallel.partial_attention import (
    AttentionInputs,
    AttentionOptions,
    AttentionPart,
    AttentionRule,
    MergedSoftmax,
    make_attention_rule,
)
from meshwright.run.parallel.context_parallel.token_partition import TokenPartition
from meshwright.run.parallel.group_coordinator import AsyncWork, GroupCoordinator, P2PMessage


@dataclass(frozen=True, eq=False)
class RingAttentionSchedule:
    """An attention in parts: which of them this rank computes, with whose keys and values."""

    attention_rule: AttentionRule
    ring_steps: tuple[tuple[AttentionPart, ...], ...]
    """What is done in each turn; the first has the keys and values that were given."""
    group: GroupCoordinator | None = None
    """The ring, of as many ranks as there are turns; None where all keys are here."""

    def __post_init__(self) -> None:
        assert len(self.ring_steps) == (1 if self.group is None else self.group.size)


def ring_attention(
    given: AttentionInputs, asked: AttentionOptions, group: GroupCoordinator, order: TokenPartition
) -> Tensor:
    """Return this rank's tokens of an attention over the whole sequences of a ring."""
    rule = make_attention_rule(given.q, given.q.shape[1] * group.size, asked)
    turns = [
        list_ring_attention_parts(order, group.index, (group.index - turn) % group.size, rule)
        for turn in range(group.size)
    ]
    kv_BTKW = torch.cat((given.k, given.v), -1)
    return attend_in_parts(
        given.q, kv_BTKW, given.sinks, RingAttentionSchedule(rule, tuple(turns), group)
    )


def list_ring_attention_parts(
    order: TokenPartition, here: int, source: int, rule: AttentionRule
) -> tuple[AttentionPart, ...]:
    """Return what queries of one rank have to do with keys of another; both have two runs."""
    queries, keys = (
        order.get_rank_spans(here, rule.sequence_length),
        order.get_rank_spans(source, rule.sequence_length),
    )
    size = sum(span.size for span in queries)
    first, last = IndexRange(0, size // 2), IndexRange(size // 2, size)
    whole = IndexRange(0, size)
    if not rule.causal:
        part = AttentionPart(whole, whole, queries, keys, is_aligned=False)
    elif here == source:
        part = AttentionPart(whole, whole, queries, keys, is_aligned=True)
    elif source < here:
        part = AttentionPart(whole, first, queries, _cut(keys, first), is_aligned=False)
    else:
        part = AttentionPart(last, whole, _cut(queries, last), keys, is_aligned=False)
    return () if is_part_masked(part, rule) else (part,)


def is_part_masked(part: AttentionPart, rule: AttentionRule) -> bool:
    """Say whether a window leaves nothing of a part to be seen."""
    if rule.window is None or not rule.causal:
        return False
    return part.query_spans[0].start - part.key_spans[-1].stop + 1 >= rule.window


def _cut(spans: tuple[IndexRange, ...], part: IndexRange) -> tuple[IndexRange, ...]:
    """Return the tokens that lie in a part of those of some spans."""
    found, before = [], 0
    for span in spans:
        start = span.start + min(max(part.start - before, 0), span.size)
        stop = span.start + min(max(part.stop - before, 0), span.size)
        if start < stop:
            found.append(IndexRange(start, stop))
        before += span.size
    return tuple(found)


def attend_in_parts(
    q_BTHE: Tensor, kv_BTKW: Tensor, sinks: Tensor | None, parted: RingAttentionSchedule
) -> Tensor:
    """Compute an attention part by part; keys and values lie side by side in `kv_BTKW`."""
    out: Tensor = _Attend.apply(q_BTHE, kv_BTKW, sinks, parted)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, parted: RingAttentionSchedule
    ) -> Tensor:
        width, kind = q.shape[-1], torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:3], kv.shape[-1] - width), dtype=kind)
        lse = q.new_full(q.shape[:3], -math.inf, dtype=kind)
        ring = _Ring(parted.group, kv)
        ctx.found = []
        for parts in parted.ring_steps:
            at_hand = ring.pass_on()
            for part in parts:
                tensors = _of_part(q, at_hand, part)
                made, own, found = partial_attention.partial_attention_forward(
                    *tensors, part, parted.attention_rule
                )
                _merge(_rows(out, part), _rows(lse, part), made, own)
                ctx.found.append(found)
        total = lse if sinks is None else torch.logaddexp(lse, sinks.to(kind))
        if sinks is not None:
            out *= (lse - total).exp()[..., None]
        result = out.to(q.dtype)
        ctx.parted = parted
        ctx.save_for_backward(q, kv, sinks, result, total)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), parted = grads, ctx.parted
        q, kv, sinks, out, total = ctx.saved_tensors
        grad, found = grad.contiguous(), iter(ctx.found)
        dq, width = torch.zeros_like(q, dtype=total.dtype), q.shape[-1]
        ring, home = _Ring(parted.group, kv), _Ring(parted.group, None)
        for parts in parted.ring_steps:
            at_hand = ring.pass_on()
            dkv = torch.zeros_like(at_hand, dtype=total.dtype)
            for part in parts:
                there = MergedSoftmax(_rows(grad, part), _rows(out, part), _rows(total, part))
                tensors = _of_part(q, at_hand, part)
                some = partial_attention.partial_attention_backward(
                    tensors, there, part, parted.attention_rule, next(found)
                )
                _rows(dq, part).add_(some[0])
                keys = dkv[:, part.keys.start : part.keys.stop]
                keys[..., :width].add_(some[1])
                keys[..., width:].add_(some[2])
            # What others found for these keys and values came while this was computed.
            home.follow(dkv)
        dsinks = None
        if sinks is not None:
            dots_BTH = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)
            taken = (sinks.to(total.dtype) - total).exp()
            dsinks = -(taken * dots_BTH).sum((0, 1)).to(sinks.dtype)
        return dq.to(q.dtype), home.arrived().to(kv.dtype), dsinks, None


class _Ring:
    """A tensor on its way round the ranks, one further at every turn."""

    def __init__(self, group: GroupCoordinator | None, first: Tensor | None) -> None:
        self.group, self.next = group, first
        self.left = 1 if group is None else group.size
        self.coming: AsyncWork | None = None
        self.going: AsyncWork | None = None

    def pass_on(self) -> Tensor:
        """Return the tensor of this turn, after beginning to send it and to receive the next."""
        current = self._wait()
        self.left -= 1
        if self.left:
            self._send(current)
        return current

    def follow(self, added: Tensor) -> None:
        """Add to what came from the rank before, and begin to send the sum on."""
        total = added if self.coming is None else added.add_(self._wait())
        if self.group is None:
            self.next = total
        else:
            self._send(total)

    def arrived(self) -> Tensor:
        """Return what has gone all the way round."""
        return self._wait()

    def _send(self, tensor: Tensor) -> None:
        assert self.group is not None, "alone there is nobody to send to"
        ranks, index = self.group.size, self.group.index
        there = P2PMessage(tensor, (index + 1) % ranks, is_send=True)
        back = P2PMessage(torch.empty_like(tensor), (index - 1) % ranks, is_send=False)
        self.going, self.coming = self.group.batch_send_recv([there, back])

    def _wait(self) -> Tensor:
        if self.coming is not None and self.going is not None:
            self.going.wait()
            self.next, self.coming, self.going = self.coming.wait(), None, None
        assert self.next is not None, "something was given or sent"
        return self.next


def _rows(tensor: Tensor, part: AttentionPart) -> Tensor:
    return tensor[:, part.queries.start : part.queries.stop]


def _of_part(q: Tensor, kv: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor, Tensor]:
    width = q.shape[-1]
    keys = kv[:, part.keys.start : part.keys.stop]
    return _rows(q, part), keys[..., :width], keys[..., width:]


def _merge(out: Tensor, lse_BTH: Tensor, made: Tensor, own_BTH: Tensor) -> None:
    """Take a part into the output and normaliser so far, in place."""
    both = torch.logaddexp(lse_BTH, own_BTH.to(lse_BTH.dtype))
    # Where neither has seen anything yet the weights are nought, not 0/0.
    safe = both.masked_fill(both == -math.inf, 0.0)
    out.mul_((lse_BTH - safe).exp()[..., None])
    out.add_(made * (own_BTH - safe).exp()[..., None])
    lse_BTH.copy_(both)
