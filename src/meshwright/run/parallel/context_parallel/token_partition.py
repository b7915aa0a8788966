"""`TokenPartition`: which tokens of a sequence each context-parallel rank has.

A sequence is cut into equal pieces. Where tokens see only what came before them, later pieces are
more work, so each rank gets an early and a late one (zig-zag), and every rank has the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.run.nn.sharding.shard_spec import IndexRange


@dataclass(frozen=True, slots=True)
class TokenPartition:
    """The numbers of the pieces that each rank has, ascending."""

    pieces: tuple[tuple[int, ...], ...]

    @staticmethod
    def contiguous(ranks: int) -> "TokenPartition":
        """Give each rank one run of tokens."""
        return TokenPartition(tuple((rank,) for rank in range(ranks)))

    @staticmethod
    def zigzag(ranks: int, within: int = 1) -> "TokenPartition":
        """Give each place of a ring an early and a late run of tokens.

        Each place is that of `within` neighbouring ranks, which share its tokens evenly, in order.
        """
        found = []
        for place in range(ranks):
            early, late = place * within, (2 * ranks - 1 - place) * within
            both = (*range(early, early + within), *range(late, late + within))
            found += [both[2 * one : 2 * one + 2] for one in range(within)]
        return TokenPartition(tuple(found))

    @property
    def num_pieces(self) -> int:
        """How many pieces a sequence is cut into."""
        return sum(map(len, self.pieces))

    def get_rank_spans(self, rank: int, length: int) -> tuple[IndexRange, ...]:
        """Return the runs of a sequence's tokens that a rank has."""
        size, found = length // self.num_pieces, list[IndexRange]()
        for piece in self.pieces[rank]:
            start = piece * size
            if found and found[-1].stop == start:
                found[-1] = IndexRange(found[-1].start, start + size)
            else:
                found.append(IndexRange(start, start + size))
        return tuple(found)

    def select_local_tokens(self, whole: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return a rank's tokens of whole sequences."""
        spans = self.get_rank_spans(rank, whole.shape[dim])
        parts = [whole.narrow(dim, span.start, span.size) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def to_full_sequence(self, gathered: Tensor, dim: int = 1) -> Tensor:
        """Return whole sequences of the ranks' tokens, which lie one rank behind the other."""
        lying = self._lying()
        if lying == sorted(lying):
            return gathered
        parts = gathered.chunk(self.num_pieces, dim)
        return torch.cat([parts[lying.index(piece)] for piece in range(self.num_pieces)], dim)

    def to_rank_order(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return whole sequences with their tokens one rank behind the other."""
        lying = self._lying()
        if lying == sorted(lying):
            return whole
        parts = whole.chunk(self.num_pieces, dim)
        return torch.cat([parts[piece] for piece in lying], dim)

    def _lying(self) -> list[int]:
        return [piece for pieces in self.pieces for piece in pieces]
