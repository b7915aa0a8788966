"""`list_subnetworks`: networks with less in them, on which trees collide less.

The network decides which way a transfer takes. Trees that were planned over other ways meet on
links where they were not expected. Networks from which such ways are missing allow less on paper
and often more in truth; whoever plans tries them in turn.
"""

from collections.abc import Iterator
from itertools import permutations

from meshwright.policy.collective.synthesis.capacity_network import CapacityNetwork
from meshwright.spec.cluster.link_graph import DisjointSets
from meshwright.spec.cluster.routing_table import Arc


def list_subnetworks(whole: CapacityNetwork) -> Iterator[CapacityNetwork]:
    """Yield what is left without the worst ways between GPUs, the least that holds first.

    Ways are ranked as transfers rank them (`spec.cluster.routing_table`). Those through other GPUs
    count for nothing: their legs are ways of their own. Each network comes with its switches
    tangled (data may turn any way in them) and untangled; what lies between two vertices only is
    left out.
    """
    ways = whole.routing_table
    classes: dict[tuple[float, ...], set[Arc]] = {}
    for a, b in permutations(range(whole.gpus), 2):
        way = ways.find_direct_path(a, b)
        if way is not None:
            classes.setdefault(way.sort_key, set()).add((a, b))
    ordered = [classes[key] for key in sorted(classes)]
    every: set[Arc] = set().union(*ordered)
    kept: set[Arc] = set()
    tried: list[set[Arc]] = []
    for pairs in ordered:
        kept = kept | pairs
        for choice in (kept, _needed(ordered, whole.gpus)):
            if choice in tried:
                continue
            tried.append(choice)
            part = whole if choice == every else CapacityNetwork.from_pairs(ways, choice)
            if part.find_disconnected_side():
                continue
            even, plain = _evened(part), _untangled(part)
            if not even.find_disconnected_side():
                yield _joined_up(even)
            if plain.names != part.names and not plain.find_disconnected_side():
                yield _joined_up(plain)


def _needed(ordered: list[set[Arc]], gpus: int) -> set[Arc]:
    """Return the best pairs, and for each GPU the best ones that lead out of where those end.

    A GPU whose rail is down keeps its way over its neighbour's card; those neighbours do not need
    the like.
    """
    islands = DisjointSets(str(gpu) for gpu in range(gpus))
    for a, b in ordered[0]:
        islands.union(str(a), str(b))
    kept = set(ordered[0])
    out: set[int] = set()
    into: set[int] = set()
    for pairs in ordered:
        across = {(a, b) for a, b in pairs if islands.find(str(a)) != islands.find(str(b))}
        new = {(a, b) for a, b in across if a not in out or b not in into}
        kept |= new
        out |= {a for a, _ in new}
        into |= {b for _, b in new}
    return kept


def _evened(network: CapacityNetwork) -> CapacityNetwork:
    """Cut what comes into a switch and cannot leave it, or the reverse."""
    rates = _even(network.capacity, network.gpus)
    uses = {arc: pairs for arc, pairs in network.list_pairs_by_arc().items() if arc in rates}
    return CapacityNetwork(network.routing_table, list(network.names), rates, uses)


def _untangled(network: CapacityNetwork) -> CapacityNetwork:
    """Make one switch into several where what comes in on some links never leaves on others.

    The parts then have more in than out or the reverse, and the larger side is cut to the smaller
    in proportion.
    """
    uses = network.list_pairs_by_arc()
    names = list(network.names[: network.gpus])
    end: dict[tuple[Arc, int], int] = {}
    for w in range(network.gpus, network.size):
        arcs = [arc for arc in network.capacity if w in arc]
        turns = DisjointSets(str(arc) for arc in arcs)
        for one in arcs:
            for other in arcs:
                if one[1] == w == other[0] and uses[one] & uses[other]:
                    turns.union(str(one), str(other))
        groups = turns.list_sets()
        for index, group in enumerate(groups):
            name = network.names[w]
            names.append(name if len(groups) == 1 else f"{name}/{index}")
            end.update({(arc, w): len(names) - 1 for arc in arcs if str(arc) in group})
    renamed = {
        (u, t): (end.get(((u, t), u), u), end.get(((u, t), t), t)) for u, t in network.capacity
    }
    capacity = {renamed[arc]: rate for arc, rate in network.capacity.items()}
    rates = _even(capacity, network.gpus)
    untangled = {renamed[arc]: pairs for arc, pairs in uses.items() if renamed[arc] in rates}
    returns = {renamed[u, t]: renamed[t, u] for u, t in renamed if (t, u) in renamed}
    return CapacityNetwork(network.routing_table, names, rates, untangled, returns)


def _joined_up(network: CapacityNetwork) -> CapacityNetwork:
    """Leave out what only passes data on between two others, such as network cards."""
    capacity, uses = dict(network.capacity), dict(network.list_pairs_by_arc())
    returns = {arc: network.reverse_arc(arc) for arc in capacity}
    for w in range(network.gpus, network.size):
        senders = [u for u, t in capacity if t == w]
        receivers = [t for u, t in capacity if u == w]
        if len({*senders, *receivers}) > 2:
            continue
        new = [(u, t) for u in senders for t in receivers if u != t]
        for u, t in new:
            rate = min(capacity[u, w], capacity[w, t])
            capacity[u, t] = capacity.get((u, t), 0.0) + rate
            uses[u, t] = uses.get((u, t), 0) | uses[u, w] & uses[w, t]
            returns[u, t] = returns[w, t][0], returns[u, w][1]
        for arc in [arc for arc in capacity if w in arc]:
            del capacity[arc], uses[arc], returns[arc]
    kept = sorted({*range(network.gpus), *(end for arc in capacity for end in arc)})
    place = {old: new for new, old in enumerate(kept)}

    def moved(arc: Arc) -> Arc:
        return place[arc[0]], place[arc[1]]

    return CapacityNetwork(
        network.routing_table,
        [network.names[old] for old in kept],
        {moved(arc): rate for arc, rate in capacity.items()},
        {moved(arc): pairs for arc, pairs in uses.items()},
        {moved(arc): moved(back) for arc, back in returns.items() if back in capacity},
    )


def _even(capacity: dict[Arc, float], gpus: int) -> dict[Arc, float]:
    """Cut links in proportion until every switch has as much in as out, the worst one first."""
    rates = dict(capacity)
    sides: dict[int, tuple[list[Arc], list[Arc]]] = {}
    for u, t in rates:
        for end, side in ((t, 0), (u, 1)):
            if end >= gpus:
                sides.setdefault(end, ([], []))[side].append((u, t))
    uneven = {w: _unevenness(rates, both) for w, both in sorted(sides.items())}
    for _ in range(100 * len(sides)):
        worst = min(uneven, key=lambda w: uneven[w][0])
        ratio, larger = uneven[worst]
        if ratio > 1 - 1e-9:
            break
        for arc in sides[worst][larger]:
            rates[arc] *= ratio
        for w in {end for arc in sides[worst][larger] for end in arc if end >= gpus}:
            uneven[w] = _unevenness(rates, sides[w])
    return {arc: rate for arc, rate in rates.items() if rate > 1e-6 * capacity[arc]}


def _unevenness(rates: dict[Arc, float], sides: tuple[list[Arc], list[Arc]]) -> tuple[float, int]:
    """Return the smaller side of a switch over the larger, and which one that is."""
    into, out = (sum(rates[arc] for arc in side) for side in sides)
    larger = max(into, out)
    return (min(into, out) / larger if larger else 1.0), int(out >= into)
