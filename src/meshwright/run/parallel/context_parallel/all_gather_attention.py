"""Attention over gathered keys and values: every rank has those of whole sequences at once.

Keys and values are few where heads share them, so gathering them may cost less than its waits
(Llama 3, arXiv 2407.21783 §3.3.2). They are gathered again in backward and not kept.

Shapes: B sequences, T tokens here, H query heads, K key and value heads, E key width, V value
width, W = E + V.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.run.nn.recompute import drop_saved_tensors
from meshwright.run.nn.sharding.shard_spec import IndexRange
from meshwright.run.parallel.autograd_collectives import gather_from_sequence_region
from meshwright.run.parallel.context_parallel.partial_attention import (
    AttentionInputs,
    AttentionOptions,
    AttentionPart,
    AttentionRule,
    TokenSpans,
    make_attention_rule,
)
from meshwright.run.parallel.context_parallel.ring_attention import (
    RingAttentionSchedule,
    attend_in_parts,
)
from meshwright.run.parallel.context_parallel.token_partition import TokenPartition
from meshwright.run.parallel.group_coordinator import GroupCoordinator

SEQUENCE_DIM = 1
"""The axis of tokens."""


def all_gather_attention(
    given: AttentionInputs, asked: AttentionOptions, group: GroupCoordinator, order: TokenPartition
) -> Tensor:
    """Return this rank's tokens of an attention over the whole sequences of a group."""
    rule = make_attention_rule(given.q, given.q.shape[1] * group.size, asked)
    here = torch.cat((given.k, given.v), -1)
    kv_BTKW = order.to_full_sequence(
        gather_from_sequence_region(here, group, SEQUENCE_DIM), SEQUENCE_DIM
    )
    parts = tuple(
        iter_all_gather_parts(order.get_rank_spans(group.index, rule.sequence_length), rule)
    )
    kept = here.detach()
    with drop_saved_tensors(
        (
            kv_BTKW,
            lambda: order.to_full_sequence(group.all_gather(kept, SEQUENCE_DIM), SEQUENCE_DIM),
        )
    ):
        return attend_in_parts(given.q, kv_BTKW, given.sinks, RingAttentionSchedule(rule, (parts,)))


def iter_all_gather_parts(spans: TokenSpans, rule: AttentionRule) -> Iterator[AttentionPart]:
    """Yield what the queries of some runs of tokens have to do with all keys."""
    begin = 0
    for span in spans:
        queries = IndexRange(begin, begin + span.size)
        begin += span.size
        if not rule.causal:
            everything = IndexRange(0, rule.sequence_length)
            yield AttentionPart(queries, everything, (span,), (everything,), is_aligned=False)
        elif rule.documents is not None or rule.window is not None:
            # One part, as a kernel for these takes keys that end with the queries.
            first = 0 if rule.window is None else max(0, span.start - rule.window + 1)
            keys = IndexRange(first, span.stop)
            yield AttentionPart(queries, keys, (span,), (keys,), is_aligned=True)
        else:
            yield AttentionPart(queries, span, (span,), (span,), is_aligned=True)
            if span.start:
                before = IndexRange(0, span.start)
                yield AttentionPart(queries, before, (span,), (before,), is_aligned=False)
