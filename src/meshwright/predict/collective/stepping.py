"""Carries out a collective step by step on a virtual clock.

A move begins when its source slot's value is there and its lane (sender, receiver, channel) has
sent what came before. It crosses its links (`contention`), arrives a latency later, and is done
when the slot it goes to may be written. Long regular sweeps are handed to `repeating`.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.policy.collective.collective import Collective, Moves, Sweep
from meshwright.predict.collective import repeating
from meshwright.predict.collective.cells import Cells
from meshwright.predict.collective.contention import Clocks, Crossing
from meshwright.predict.collective.costs import Costs
from meshwright.predict.collective.network import Floats, Longs, Network

MOST_LANES = 1 << 26
"""Lanes up to which each that could be has a number."""


class Wave(NamedTuple):
    """The moves of one step with their times."""

    step: int
    moves: Moves
    start_s: Floats
    end_s: Floats


class Legs(NamedTuple):
    """What a set of moves needs, whatever the slots: its ways, lanes, latencies and limits."""

    plan: Crossing
    lane: Longs
    lane_s: Floats
    """Seconds that a lane's own limit asks for, all moves of the step on it together."""
    latency_s: Floats
    shared: bool
    """Whether several moves use one lane."""


class Run:
    """The state of a simulation."""

    def __init__(
        self,
        collective: Collective,
        network: Network,
        ends: Longs,
        *,
        chunk_bytes: float,
        costs: Costs,
        waves: list[Wave] | None,
    ) -> None:
        self.collective, self.network, self.ends = collective, network, ends
        self.chunk_bytes, self.costs = chunk_bytes, costs
        self.clocks = Clocks(len(network.link_bytes_per_s))
        self.cells = Cells(collective)
        self.lanes = _Lanes(collective)
        self.lane_free_s = np.zeros(self.lanes.many)
        self.finish_s = np.zeros(collective.places)
        self.waves = waves

    def go(self) -> None:
        """Carry out every sweep."""
        step = 0
        for sweep in self.collective.sweeps:
            if not len(sweep.moves):
                continue
            if self.waves is None and repeating.suits(sweep, self.collective):
                repeating.carry_out(self, sweep)
            else:
                self._sweep(sweep, step)
            step += sweep.steps

    def _sweep(self, sweep: Sweep, first_step: int) -> None:
        # Slots along an order do not follow each other, so `at` sends them one by one.
        rows = sweep.moves.one_slot_each() if sweep.shift.slot_order else sweep.moves
        whole = None if sweep.shift.dst else self.legs(rows)
        for index in range(sweep.steps):
            active = (index >= rows.phase) & (index < rows.phase + sweep.span)
            step = _Messages(sweep.at(index))
            if whole is None:
                legs = self.legs(step.moves)
            else:
                legs = whole if active.all() else some_legs(whole, active)
            self._step(first_step + index, step, legs)

    def _step(self, number: int, step: "_Messages", legs: Legs) -> None:
        cells = self.cells
        ready = step.latest(cells.ready_s(step.source, step.source_slot))
        start, sent = self.cross(legs, ready)
        free = step.latest(cells.free_s(step.target, step.target_slot))
        done = np.maximum(sent + legs.latency_s, free)
        cells.read(step.source, step.source_slot, step.each(sent))
        cells.write(step.target, step.target_slot, step.each(done))
        self.note(step.moves, sent, done)
        if self.waves is not None:
            self.waves.append(Wave(number, step.moves, start, done))

    def cross(self, legs: Legs, ready_s: Floats) -> tuple[Floats, Floats]:
        """Send moves whose values are there; return when each begins and when it has left."""
        start = np.maximum(ready_s, self.lane_free_s[legs.lane])
        posted = start + self.costs.overhead_s
        sent = np.maximum(self.clocks.cross(legs.plan, posted), posted + legs.lane_s)
        self.keep_lanes(legs, sent)
        return start, sent

    def keep_lanes(self, legs: Legs, sent_s: Floats) -> None:
        """Keep lanes busy until the moves on them have left."""
        if legs.shared:
            np.maximum.at(self.lane_free_s, legs.lane, sent_s)
        else:
            self.lane_free_s[legs.lane] = sent_s

    def note(self, moves: Moves, sent_s: Floats, done_s: Floats) -> None:
        """Keep the last moment in which each place has something to do."""
        np.maximum.at(self.finish_s, moves.src, sent_s)
        np.maximum.at(self.finish_s, moves.dst, done_s)

    def legs(self, moves: Moves) -> Legs:
        """Return the ways, lanes and latencies of moves."""
        costs, network = self.costs, self.network
        source, target = self.ends[moves.src], self.ends[moves.dst]
        routes = network.routes(source, target)
        nbytes = moves.count.astype(np.float64) * self.chunk_bytes
        crosses = network.units[source] != network.units[target]
        latency = routes.late_s(network.latency_s)
        for hop_s, some in ((costs.inside_hop_s, ~crosses), (costs.between_hop_s, crosses)):
            if hop_s is not None:
                latency = np.where(some & (source != target), hop_s, latency)
        lane = self.lanes.of(moves)
        rate = np.where(crosses, costs.between_lane_bytes_per_s, costs.inside_lane_bytes_per_s)
        shared = self.lanes.shared(lane)
        lane_bytes = nbytes
        if shared and bool((rate < math.inf).any()):
            _, which = np.unique(lane, return_inverse=True)
            lane_bytes = np.bincount(which, weights=nbytes).astype(np.float64)[which]
        lane_s = np.where(source != target, lane_bytes / rate, 0.0)
        plan = Crossing(routes, nbytes, network.link_bytes_per_s)
        return Legs(plan, lane, lane_s, latency, shared)


class _Messages:
    """The moves of one step, each one message, and the slots that they touch one by one."""

    def __init__(self, moves: Moves) -> None:
        self.moves, slots = moves, moves.one_slot_each()
        self._count = moves.count
        self._first = np.cumsum(self._count) - self._count
        self._single = len(slots) == len(self.moves)
        self.source, self.source_slot = _long(slots.src), _long(slots.src_slot)
        self.target, self.target_slot = _long(slots.dst), _long(slots.dst_slot)

    def latest(self, times: Floats) -> Floats:
        """Return the latest time over the slots of each move."""
        return times if self._single else np.maximum.reduceat(times, self._first)

    def each(self, times: Floats) -> Floats:
        """Return the times of moves for each of their slots."""
        return times if self._single else np.repeat(times, self._count)


def _long(column: NDArray[np.int32]) -> Longs:
    return column.astype(np.int64)


def some_legs(legs: Legs, active: np.ndarray) -> Legs:
    """Return the legs of some of the moves.

    A lane's limit still counts all moves of the sweep that share it, which is a little late where
    some of them have not begun.
    """
    return Legs(
        legs.plan.only(active),
        legs.lane[active],
        legs.lane_s[active],
        legs.latency_s[active],
        legs.shared,
    )


class _Lanes:
    """Numbers of the lanes (sender, receiver, channel) of a collective.

    Where there is room, every lane that could be has one. Memory that is not touched costs
    nothing, and looking lanes up in a list of those in use costs more than all else.
    """

    def __init__(self, collective: Collective) -> None:
        self.places, self.channels = collective.places, collective.channels
        self.many = self.places * self.places * self.channels
        self._used: Longs | None = None
        if self.many > MOST_LANES:
            keys = []
            for sweep in collective.sweeps:
                steps = range(sweep.steps) if sweep.shift.dst else (-1,)
                keys += [self._keys(sweep.moves if at < 0 else sweep.at(at)) for at in steps]
            self._used = np.unique(np.concatenate(keys))
            self.many = len(self._used)
        self._last = np.zeros(self.many, dtype=np.int32)

    def of(self, moves: Moves) -> Longs:
        """Return the lanes of moves."""
        keys = self._keys(moves)
        return keys if self._used is None else np.searchsorted(self._used, keys)

    def shared(self, lane: Longs) -> bool:
        """Say whether several of the moves use one lane."""
        rows = np.arange(len(lane), dtype=np.int32)
        self._last[lane] = rows
        return bool((self._last[lane] != rows).any())

    def _keys(self, moves: Moves) -> Longs:
        return (_long(moves.src) * self.places + moves.dst) * self.channels + moves.channel
