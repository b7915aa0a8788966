"""`split_off_switches`: a network without switches that carries as many trees as one with them.

A switch w is taken out by splitting off: some of what goes u to w and w to t becomes a link u to t.
That keeps every GPU fed unless a cut was already tight, so each split is as large as the flows to
all GPUs allow. For switches with as much in as out something can always be split off until none is
left (Bang-Jensen, Frank and Jackson 1995; used by ForestColl, arXiv 2402.06787).
"""

from collections import Counter
from itertools import product

from meshwright.policy.collective.synthesis.max_flow import ResidualGraph
from meshwright.policy.collective.synthesis.tree_scaling import (
    IntMatrix,
    TreeCapacity,
    find_root_flows,
)
from meshwright.spec.cluster.routing_table import Arc


def split_off_switches(scaled: TreeCapacity, gpus: int, uses: dict[Arc, int]) -> IntMatrix | None:
    """Return what goes from GPU to GPU in whole trees; None where a switch cannot be split off.

    `uses` names the pairs of GPUs whose best way each link is on. Links are joined along best ways
    as long as that is enough, so that a transfer takes the way that the network gives it.
    """
    fed = find_root_flows(scaled.capacity, scaled.trees_by_root, gpus)
    if fed is None:
        return None
    splitter = _Splitter(scaled.capacity, fed, uses, gpus)
    left = set(range(gpus, len(scaled.capacity)))
    while left:
        relay = min(left, key=lambda w: (splitter.degree(w), w))
        if not splitter.remove(relay):
            return None
        left.discard(relay)
    splitter.straighten()
    return [row[:gpus] for row in splitter.capacity[:gpus]]


class _Splitter:
    """The capacities as they stand, and the flow to each GPU that they allow."""

    def __init__(
        self, capacity: IntMatrix, fed: list[ResidualGraph], uses: dict[Arc, int], gpus: int
    ) -> None:
        self.capacity = [row[:] for row in capacity]
        self.fed = fed
        self.uses = dict(uses)
        self.gpus = gpus
        self.astray: Counter[Arc] = Counter()
        """How much of a link was joined along ways that the network would not give it."""

    def degree(self, w: int) -> int:
        return len(self._senders(w)) + len(self._receivers(w))

    def remove(self, w: int) -> bool:
        """Split off everything that goes through a vertex."""
        senders, receivers = self._senders(w), self._receivers(w)
        # Rotations of the ports: each sender meets each receiver once before any meets one twice.
        pairs = [
            (u, receivers[(index + turn) % len(receivers)])
            for turn in range(len(receivers))
            for index, u in enumerate(senders)
        ]
        apart = [(u, t) for u, t in pairs if u != t]
        best = [(u, t) for u, t in apart if self._used(u, w) & self._used(w, t)]
        # Even shares first: many short trees rather than one long chain.
        partners = Counter(t for _, t in best)
        share = {t: -(-self.capacity[w][t] // count) for t, count in partners.items()}
        for u, t in best:
            self.split(u, w, t, share[t])
        for u, t in (*best, *apart, *product(senders, receivers)):
            self.split(u, w, t, self.capacity[w][t])
        if self._senders(w) and self._receivers(w):
            return False
        # Rounding to whole trees can leave a little more in than out: no flow ends there.
        for u in self._senders(w):
            self._drop(u, w)
        for t in self._receivers(w):
            self._drop(w, t)
        return True

    def split(self, u: int, w: int, t: int, most: int) -> None:
        """Join up to `most` of what goes u to w and w to t into a link u to t."""
        amount = min(most, self.capacity[u][w], self.capacity[w][t])
        while amount > 0:
            trial = [fed.copy() for fed in self.fed]
            lack = max(_rerouted(fed, self.capacity, (u, w, t), amount) for fed in trial)
            if not lack:
                self._commit(u, w, t, amount)
                self.fed = trial
                return
            amount -= lack

    def _drop(self, u: int, t: int) -> None:
        for fed in self.fed:
            _withdrawn(fed, u, t, self.capacity[u][t])
        self.capacity[u][t] = 0

    def straighten(self) -> None:
        """Give up what is astray and not needed."""
        for (u, t), astray in self.astray.items():
            amount = min(astray, self.capacity[u][t])
            while amount > 0 and u < self.gpus and t < self.gpus:
                trial = [fed.copy() for fed in self.fed]
                lack = max(_withdrawn(fed, u, t, amount) for fed in trial)
                if not lack:
                    self.capacity[u][t] -= amount
                    self.fed = trial
                    break
                amount -= lack

    def _commit(self, u: int, w: int, t: int, amount: int) -> None:
        shared = self._used(u, w) & self._used(w, t)
        if u < self.gpus and t < self.gpus:
            shared &= 1 << u * self.gpus + t
        before, after = self.astray[u, w], self.astray[w, t]
        self.capacity[u][w] -= amount
        self.capacity[w][t] -= amount
        self.astray[u, w] = min(before, self.capacity[u][w])
        self.astray[w, t] = min(after, self.capacity[w][t])
        if u != t:
            self.capacity[u][t] += amount
            self.uses[u, t] = self._used(u, t) | shared
            self.astray[u, t] += min(amount, before + after) if shared else amount

    def _used(self, u: int, t: int) -> int:
        return self.uses.get((u, t), 0)

    def _senders(self, w: int) -> list[int]:
        return [u for u, row in enumerate(self.capacity) if row[w]]

    def _receivers(self, w: int) -> list[int]:
        return [t for t, held in enumerate(self.capacity[w]) if held]


def _rerouted(
    fed: ResidualGraph, capacity: IntMatrix, way: tuple[int, int, int], amount: int
) -> int:
    """Split one flow off along with the capacity; return how much of it found no other way."""
    u, w, t = way
    if u != t:
        through = int(
            min(
                amount,
                capacity[u][w] - fed.residual_capacity[u][w],
                capacity[w][t] - fed.residual_capacity[w][t],
            )
        )
        if through > 0:
            fed.push(w, u, through)
            fed.push(t, w, through)
            fed.push(u, t, through)
        fed.adjust_capacity(u, t, amount)
    return max(_withdrawn(fed, u, w, amount), _withdrawn(fed, w, t, amount))


def _withdrawn(fed: ResidualGraph, u: int, t: int, amount: int) -> int:
    """Take capacity away; return how much of the flow over it found no other way."""
    fed.adjust_capacity(u, t, -amount)
    excess = -fed.residual_capacity[u][t]
    if excess <= 0:
        return 0
    fed.push(t, u, excess)
    return int(excess - fed.send_flow(u, t, excess))
