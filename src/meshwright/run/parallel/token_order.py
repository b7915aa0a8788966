"""`TokenOrder`: which tokens of a sequence each context-parallel rank has.

A sequence is cut into equal pieces. Where tokens see only what came before them, later pieces are
more work, so each rank gets an early and a late one (zig-zag), and every rank has the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.run.nn.holding import Range


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """The numbers of the pieces that each rank has, ascending."""

    pieces: tuple[tuple[int, ...], ...]

    @staticmethod
    def in_a_row(ranks: int) -> "TokenOrder":
        """Give each rank one run of tokens."""
        return TokenOrder(tuple((rank,) for rank in range(ranks)))

    @staticmethod
    def zigzag(ranks: int, within: int = 1) -> "TokenOrder":
        """Give each place of a ring an early and a late run of tokens.

        Each place is that of `within` neighbouring ranks, which share its tokens evenly, in order.
        """
        found = []
        for place in range(ranks):
            early, late = place * within, (2 * ranks - 1 - place) * within
            both = (*range(early, early + within), *range(late, late + within))
            found += [both[2 * one : 2 * one + 2] for one in range(within)]
        return TokenOrder(tuple(found))

    @property
    def count(self) -> int:
        """How many pieces a sequence is cut into."""
        return sum(map(len, self.pieces))

    def spans(self, rank: int, length: int) -> tuple[Range, ...]:
        """Return the runs of a sequence's tokens that a rank has."""
        size, found = length // self.count, list[Range]()
        for piece in self.pieces[rank]:
            start = piece * size
            if found and found[-1].stop == start:
                found[-1] = Range(found[-1].start, start + size)
            else:
                found.append(Range(start, start + size))
        return tuple(found)

    def take(self, whole: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return a rank's tokens of whole sequences."""
        spans = self.spans(rank, whole.shape[dim])
        parts = [whole.narrow(dim, span.start, span.size) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, gathered: Tensor, dim: int = 1) -> Tensor:
        """Return whole sequences of the ranks' tokens, which lie one rank behind the other."""
        lying = self._lying()
        if lying == sorted(lying):
            return gathered
        parts = gathered.chunk(self.count, dim)
        return torch.cat([parts[lying.index(piece)] for piece in range(self.count)], dim)

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return whole sequences with their tokens one rank behind the other."""
        lying = self._lying()
        if lying == sorted(lying):
            return whole
        parts = whole.chunk(self.count, dim)
        return torch.cat([parts[piece] for piece in lying], dim)

    def _lying(self) -> list[int]:
        return [piece for pieces in self.pieces for piece in pieces]
