"""Messages whose result is known: small whole numbers, so that any order of adding is exact."""

import torch

from meshwright.policy.collective.collective import Collective
from meshwright.run.parallel.collective.chunk_layout import ChunkLayout

_EXACT = 256
"""Whole numbers up to this are exact in every type, bfloat16 included (8 bits of mantissa)."""


def make_full_message(
    collective: Collective, rank: int, elements: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the whole message of a rank, of which it gives all or a part."""
    values = max(2, min(7, _EXACT // collective.ranks))
    return ((torch.arange(elements) + 3 * rank) % values).to(dtype)


def make_input_data(
    collective: Collective, rank: int, cuts: ChunkLayout, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return what a rank gives; None where it gives nothing."""
    elements = cuts.get_tensor_sizes(rank).input_elements
    if elements is None:
        return None
    if collective.op == "all_to_all_v":
        return make_full_message(collective, rank, elements, dtype)
    whole = make_full_message(collective, rank, cuts.elements, dtype)
    return whole if elements == cuts.elements else _part(whole, rank, collective.ranks)


def make_expected_output(
    collective: Collective, rank: int, cuts: ChunkLayout, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the sum, copy or exchange that a rank must get; None where it gets nothing."""
    ranks, root = collective.ranks, collective.root

    def of(other: int) -> torch.Tensor:
        return make_full_message(collective, other, cuts.elements, dtype)

    if cuts.get_tensor_sizes(rank).output_elements is None:
        return None
    match collective.op:
        case "all_reduce" | "reduce" | "reduce_scatter":
            total = torch.stack([of(other).long() for other in range(ranks)]).sum(dim=0).to(dtype)
            return _part(total, rank, ranks) if collective.op == "reduce_scatter" else total
        case "broadcast":
            return of(root)
        case "scatter":
            return _part(of(root), rank, ranks)
        case "all_gather" | "gather":
            return torch.cat([_part(of(other), other, ranks) for other in range(ranks)])
        case "all_to_all":
            return torch.cat([_part(of(other), rank, ranks) for other in range(ranks)])
        case "all_to_all_v":
            return _uneven(collective, rank, cuts, dtype)
        case "send_recv":
            source = collective.peers.index(rank) if rank in collective.peers else None
            return None if source is None else of(source)


def _part(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    size = whole.numel() // ranks
    return whole[rank * size : (rank + 1) * size]


def _uneven(
    collective: Collective, rank: int, cuts: ChunkLayout, dtype: torch.dtype
) -> torch.Tensor:
    parts = []
    for source, row in enumerate(collective.counts):
        sent = make_full_message(collective, source, sum(row) * cuts.elements, dtype)
        first = sum(row[:rank]) * cuts.elements
        parts.append(sent[first : first + row[rank] * cuts.elements])
    return torch.cat(parts)
