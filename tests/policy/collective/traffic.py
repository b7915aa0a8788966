"""What a collective sends: counted from its moves, in shares of the message."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from meshwright.policy.collective import Collective

Edge = tuple[int, int]


def edges(collective: Collective) -> Counter[Edge]:
    """Return the chunks that go from place to place; what stays in a place is not counted."""
    sent: Counter[Edge] = Counter()
    for _, moves in collective.iterate_steps():
        for src, dst, _, _, count, *_ in moves.table.tolist():
            if src != dst:
                sent[src, dst] += count
    return sent


def sent_by(collective: Collective, counts: Callable[[Edge], bool] = bool) -> list[Fraction]:
    """Return how often each rank sends the whole message, over edges that count."""
    shares = [Fraction(0)] * collective.ranks
    for edge, chunks in edges(collective).items():
        if edge[0] < collective.ranks and counts(edge):
            shares[edge[0]] += Fraction(chunks, collective.chunks)
    return shares


def busy_steps(collective: Collective) -> int:
    """Return the steps in which anything leaves a place."""
    return sum(bool((moves.src != moves.dst).any()) for _, moves in collective.iterate_steps())
