"""A second opinion on collectives: it carries them out slot by slot, with Python's `Counter`.

It shares nothing with `verify_collective` but the meaning of an operation, and is only fit for a
few ranks.
"""

from collections import Counter

from meshwright.policy.collective import Collective

Cell = tuple[int, int]
"""A place and a slot; or, as a contribution, a rank and the index of its input."""
Held = dict[Cell, Counter[Cell]]


def sound(collective: Collective) -> bool:
    """Return whether a collective does what its operation promises, by counting."""
    held = inputs(collective)
    for _, moves in collective.iterate_steps():
        if not _carry_out(collective, held, moves.table.tolist()):
            return False
    return all(held.get(cell) == value for cell, value in promised(collective).items())


def inputs(collective: Collective) -> Held:
    """Return what every rank starts with: contributions are (rank, index)."""
    n, chunks = collective.ranks, collective.chunks
    share = chunks // n
    held: Held = {}
    for rank in range(n):
        slots = range(chunks)
        if collective.op in ("all_gather", "gather"):
            slots = range(rank * share, (rank + 1) * share)
        elif collective.op in ("broadcast", "scatter"):
            slots = range(chunks if rank == collective.root else 0)
        elif collective.op == "all_to_all_v":
            slots = range(sum(collective.counts[rank]))
        for slot in slots:
            held[rank, slot] = Counter({(rank, slot): 1})
    return held


def promised(collective: Collective) -> Held:
    """Return what must lie where at the end."""
    n, chunks = collective.ranks, collective.chunks
    if collective.op == "all_to_all_v":
        return _promised_unevenly(collective)
    ends: Held = {}
    for rank in range(n):
        for c in range(chunks):
            sources = _sources(collective, rank, c)
            if sources:
                apart = collective.op in ("all_to_all", "send_recv")
                ends[rank, chunks + c if apart else c] = Counter(sources)
    return ends


def _sources(collective: Collective, rank: int, c: int) -> list[tuple[int, int]]:
    """Return the inputs that make up chunk c of a rank's output."""
    n, op, root = collective.ranks, collective.op, collective.root
    share = max(1, collective.chunks // n)
    mine, is_root = c // share == rank, rank == root
    everybody, owner = [(source, c) for source in range(n)], [(c // share, c)]
    wanted = {
        "all_reduce": everybody,
        "reduce": everybody if is_root else [],
        "reduce_scatter": everybody if mine else [],
        "broadcast": [(root, c)],
        "scatter": [(root, c)] if mine else [],
        "all_gather": owner,
        "gather": owner if is_root else [],
        "all_to_all": [(c // share, rank * share + c % share)],
        "send_recv": [(source, c) for source, to in enumerate(collective.peers) if to == rank],
    }
    return wanted[op]


def _promised_unevenly(collective: Collective) -> Held:
    ends: Held = {}
    for rank in range(collective.ranks):
        slot = max(sum(row) for row in collective.counts)
        for source, row in enumerate(collective.counts):
            for index in range(row[rank]):
                ends[rank, slot] = Counter({(source, sum(row[:rank]) + index): 1})
                slot += 1
    return ends


def _carry_out(collective: Collective, held: Held, rows: list[list[int]]) -> bool:
    """Carry out a step; return whether it is allowed."""
    slots, places, ranks = collective.slots, collective.num_endpoints, collective.ranks
    read: set[Cell] = set()
    written: dict[Cell, int] = {}
    arrives = []
    for src, dst, src_slot, dst_slot, count, adds, _, _ in rows:
        if count < 1:
            return False
        for offset in range(count):
            source, target = (src, src_slot + offset), (dst, dst_slot + offset)
            inside = all(0 <= p < places and 0 <= s < slots for p, s in (source, target))
            if not inside or source not in held:
                return False
            # Only additions may meet in a cell, and only in a switch.
            if target in written and not (adds and written[target] and dst >= ranks):
                return False
            read.add(source)
            written[target] = adds
            arrives.append((target, held[source], adds))
    if read & written.keys():
        return False
    return all(_arrive(held, target, value, adds, ranks) for target, value, adds in arrives)


def _arrive(held: Held, target: Cell, value: Counter[Cell], adds: int, ranks: int) -> bool:
    """Put a value into a cell, or add it; return whether that is allowed."""
    if adds and target in held:
        if {index for _, index in held[target]} != {index for _, index in value}:
            return False
        held[target] = held[target] + value
        return True
    held[target] = value
    return not adds or target[0] >= ranks
