"""Who waits for whom on a link: the moves of one step share it, steps follow each other on it.

A `LinkMoves` is the moves of one step sorted by link. `LinkClocks` knows until when every link is
busy and how much of that time it had nothing to do. A move may begin before earlier steps are
through with a link as far as the link was idle since: steps are logical order, not a queue.
"""

import numpy as np

from meshwright.predict.collective.sim_network import NO_LINK, Floats, Longs, RouteTable


class LinkMoves:
    """The moves of one step, by the links they cross."""

    def __init__(self, routes: RouteTable, nbytes: Floats, rates: Floats) -> None:
        self.moves, self.columns = routes.links.shape
        move, column = np.nonzero(routes.links != NO_LINK)
        link = routes.links[move, column]
        order = np.argsort(link, kind="stable")
        self.move, self.link = move[order], link[order]
        self.flat_index = self.move * self.columns + column[order]
        part = 1.0 if routes.shares is None else routes.shares[self.move, column[order]]
        self.carried_bytes = nbytes[self.move] * part
        """Bytes that each move puts on each of its links."""
        self.busy_s = self.carried_bytes / rates[self.link]
        """Seconds that each move keeps each of its links busy."""
        self._sum()

    def _sum(self) -> None:
        changes = np.flatnonzero(np.diff(self.link)) + 1
        self.first = np.concatenate(([0], changes)) if len(self.link) else changes
        self.links = self.link[self.first]
        self.group = np.repeat(
            np.arange(len(self.first)), np.diff(np.append(self.first, len(self.link)))
        )
        empty = not len(self.first)
        self.work = np.zeros(0) if empty else np.add.reduceat(self.busy_s, self.first)
        self.load = np.zeros(0) if empty else np.add.reduceat(self.carried_bytes, self.first)

    def select(self, active: np.ndarray) -> "LinkMoves":
        """Return the crossing of some of the moves."""
        some = object.__new__(LinkMoves)
        number = np.cumsum(active) - 1
        keep = active[self.move]
        old = self.move[keep]
        some.moves, some.columns = int(active.sum()), self.columns
        some.move, some.link = number[old], self.link[keep]
        some.carried_bytes, some.busy_s = self.carried_bytes[keep], self.busy_s[keep]
        some.flat_index = self.flat_index[keep] - (old - some.move) * self.columns
        some._sum()
        return some


class LinkClocks:
    """Until when each link is busy, and for how long it worked until then."""

    def __init__(self, links: int) -> None:
        self.until_s = np.zeros(links)
        self.since_s = np.zeros(links)
        """When each link began what it has been doing without a pause."""
        self.busy_s = np.zeros(links)
        self.carried_bytes = np.zeros(links)

    def add_moves(self, plan: LinkMoves, start_s: Floats) -> Floats:
        """Let the moves of one step cross; return when the last byte of each has left its links.

        Moves that meet on a link share it, and one that comes when the others are through has it
        to itself.
        """
        if not len(plan.links):
            return start_s.copy()
        links = plan.links
        until = self.until_s[links]
        left, ends, run = _shared(plan, self._queued(plan, start_s[plan.move]))
        paused = run > until
        self.since_s[links[paused]] = run[paused]
        self.until_s[links] = np.maximum(until, ends)
        self.busy_s[links] += plan.work
        self.carried_bytes[links] += plan.load
        table = np.full(plan.moves * plan.columns, -np.inf)
        table[plan.flat_index] = left
        by_move: Floats = table.reshape(plan.moves, plan.columns).max(axis=1)
        return np.maximum(by_move, start_s)

    def _queued(self, plan: LinkMoves, begins: Floats) -> Floats:
        """Return when moves begin behind those of earlier steps, move and link by move and link.

        What comes after the last pause of a link queues behind what it is doing. What comes before
        takes of the time that the link was idle; what does not fit in there queues as well.
        """
        links, group = plan.links, plan.group
        until, since = self.until_s[links], self.since_s[links]
        early = begins < since[group]
        if not early.any():
            return np.maximum(begins, until[group])
        early_work = np.add.reduceat(np.where(early, plan.busy_s, 0.0), plan.first)
        first = np.minimum.reduceat(np.where(early, begins, np.inf), plan.first)
        idle = np.minimum(until - self.busy_s[links], np.maximum(since - first, 0.0))
        idle = np.maximum(idle, 0.0)
        rest = np.maximum(early_work - idle, 0.0)
        fits = np.where(rest > 0, until - np.minimum(idle, early_work), -np.inf)
        return np.maximum(begins, np.where(early, fits[group], (until + rest)[group]))

    def advance_repeats(self, plan: LinkMoves, times: int, left_s: Floats) -> None:
        """Note that the same moves crossed so many times, the last ones until `left_s`."""
        links = plan.links
        if len(links):
            ends = np.maximum.reduceat(left_s[plan.move], plan.first)
            self.since_s[links] = np.maximum(self.since_s[links], ends - plan.work)
            self.until_s[links] = np.maximum(self.until_s[links], ends)
            self.busy_s[links] += times * plan.work
            self.carried_bytes[links] += times * plan.load


def _shared(plan: LinkMoves, begins: Floats) -> tuple[Floats, Floats, Floats]:
    """Return when each move has left each of its links, and when each link ends its last run.

    The third is when it began that run.
    """
    first = np.minimum.reduceat(begins, plan.first)
    last = np.maximum.reduceat(begins, plan.first)
    ends, since = first + plan.work, first
    left = ends[plan.group]
    # Where all begin together, all end together. The others are sorted.
    apart = last - first > 1e-12 * last
    if apart.any():
        some = np.flatnonzero(apart[plan.group])
        times = _staggered(plan.group[some], begins[some], plan.busy_s[some])
        left[some], ends[apart], since[apart] = times
    return left, ends, since


def _staggered(group: Longs, begins: Floats, spent: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the same for moves that begin at different times; groups are sorted.

    A link works through a run of moves without a pause; a move that finds it idle begins the next
    run. Inside a run a move ends with the run, or once it has shared with all of it.
    """
    order = np.lexsort((begins, group))
    group, start, own = group[order], begins[order], spent[order]
    heads = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1])))
    many = np.diff(np.append(heads, len(group)))
    total = np.cumsum(own)
    before = total - own
    before = before - np.repeat(before[heads], many)
    # When the link is through with a move: max over those up to it of begin + all work since.
    slack = start - before
    # Little more than needed: what is added here is lost in precision.
    room = 1.001 * float(slack.max() - slack.min()) + 1e-12
    lift = np.repeat(np.arange(len(heads)) * room, many)
    busiest = np.maximum.accumulate(slack + lift) - lift
    through = busiest + before + own
    fresh = np.concatenate(([True], start[1:] >= through[:-1] - 1e-15))
    fresh[heads] = True
    runs = np.flatnonzero(fresh)
    sizes = np.diff(np.append(runs, len(group)))
    run_work = np.repeat(np.add.reduceat(own, runs), sizes)
    run_end = np.repeat(through[runs + sizes - 1], sizes)
    left = np.empty(len(group))
    left[order] = np.minimum(run_end, start + run_work)
    last = heads + many - 1
    began = np.repeat(start[runs], sizes)
    return left, through[last], began[last]
