"""Ulysses: ranks trade tokens of all heads for all tokens of some heads, and back.

Between the two exchanges each rank has whole sequences, so any kernel serves (Jacobs et al., arXiv
2309.14509). Query heads divide over the ranks; key and value heads that do not are repeated until
they do.

Shapes: B sequences, T tokens here, H query heads, K key and value heads, E key width, V value
width; u ranks, so that S = u·T, h = H / u.
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.run.parallel.autograd_collectives import all_to_all
from meshwright.run.parallel.context_parallel.partial_attention import (
    AttentionInputs,
    AttentionOptions,
)
from meshwright.run.parallel.context_parallel.token_partition import TokenPartition
from meshwright.run.parallel.group_coordinator import GroupCoordinator

InnerAttention = Callable[[AttentionInputs, AttentionOptions], Tensor]
"""An attention with some of the heads."""


def ulysses_attention(
    given: AttentionInputs,
    asked: AttentionOptions,
    group: GroupCoordinator,
    order: TokenPartition,
    inner: InnerAttention,
) -> Tensor:
    """Return this rank's tokens of an attention that each rank computes for some heads.

    `order` says how the ranks' tokens make up what `inner` is given.
    """
    q_BTHE, k_BTKE, v_BTKV, sinks = given
    ranks, heads = group.size, q_BTHE.shape[2]
    assert heads % ranks == 0, "layouts whose heads do not divide are refused"
    more = math.lcm(k_BTKE.shape[2], ranks) // k_BTKE.shape[2]
    if more > 1:
        k_BTKE, v_BTKV = k_BTKE.repeat_interleave(more, 2), v_BTKV.repeat_interleave(more, 2)
    each = [tensor.unflatten(2, (ranks, -1)) for tensor in (q_BTHE, k_BTKE, v_BTKV)]
    # One exchange: all that goes to a rank lies in its columns.
    sent_BTuC = torch.cat([tensor.flatten(3) for tensor in each], -1)
    got_uBTC = all_to_all(sent_BTuC.movedim(2, 0), group)
    whole_BSC = order.to_full_sequence(got_uBTC.movedim(0, 1).flatten(1, 2))
    columns = whole_BSC.split([tensor.shape[3] * tensor.shape[4] for tensor in each], -1)
    q, k, v = (
        column.unflatten(-1, tensor.shape[3:]) for column, tensor in zip(columns, each, strict=True)
    )
    mine = slice(group.index * heads // ranks, (group.index + 1) * heads // ranks)
    slopes = asked.get("alibi")
    if slopes is not None:
        asked = {**asked, "alibi": slopes[mine]}
    some = AttentionInputs(q, k, v, None if sinks is None else sinks[mine])
    out_BShV = inner(some, asked)
    parts_uBTC = order.to_rank_order(out_BShV.flatten(2)).unflatten(1, (ranks, -1)).movedim(1, 0)
    back_uBTC = all_to_all(parts_uBTC, group)
    mixed: Tensor = back_uBTC.unflatten(-1, out_BShV.shape[2:]).permute(1, 2, 0, 3, 4)
    return mixed.flatten(2, 3)
