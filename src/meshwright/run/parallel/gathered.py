"""Attention over gathered keys and values: every rank has those of whole sequences at once.

Keys and values are few where heads share them, so gathering them may cost less than its waits
(Llama 3, arXiv 2407.21783 §3.3.2). They are gathered again in backward and not kept.

Shapes: B sequences, T tokens here, H query heads, K key and value heads, E key width, V value
width, W = E + V.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.run.nn.holding import Range
from meshwright.run.nn.recompute import dropped
from meshwright.run.parallel.attention_block import Asked, Given, Part, Rule, Spans, rule_of
from meshwright.run.parallel.flow import gather_in
from meshwright.run.parallel.group import Group
from meshwright.run.parallel.ring_attention import PartedAttention, attend
from meshwright.run.parallel.token_order import TokenOrder

TOKENS = 1
"""The axis of tokens."""


def gathered_attention(given: Given, asked: Asked, group: Group, order: TokenOrder) -> Tensor:
    """Return this rank's tokens of an attention over the whole sequences of a group."""
    rule = rule_of(given.q, given.q.shape[1] * group.size, asked)
    here = torch.cat((given.k, given.v), -1)
    kv_BTKW = order.join(gather_in(here, group, TOKENS), TOKENS)
    parts = tuple(gathered_parts(order.spans(group.index, rule.length), rule))
    kept = here.detach()
    with dropped((kv_BTKW, lambda: order.join(group.all_gather(kept, TOKENS), TOKENS))):
        return attend(given.q, kv_BTKW, given.sinks, PartedAttention(rule, (parts,)))


def gathered_parts(spans: Spans, rule: Rule) -> Iterator[Part]:
    """Yield what the queries of some runs of tokens have to do with all keys."""
    begin = 0
    for span in spans:
        queries = Range(begin, begin + span.size)
        begin += span.size
        if not rule.causal:
            everything = Range(0, rule.length)
            yield Part(queries, everything, (span,), (everything,), aligned=False)
        elif rule.documents is not None or rule.window is not None:
            # One part, as a kernel for these takes keys that end with the queries.
            first = 0 if rule.window is None else max(0, span.start - rule.window + 1)
            keys = Range(first, span.stop)
            yield Part(queries, keys, (span,), (keys,), aligned=True)
        else:
            yield Part(queries, span, (span,), (span,), aligned=True)
            if span.start:
                before = Range(0, span.start)
                yield Part(queries, before, (span,), (before,), aligned=False)
