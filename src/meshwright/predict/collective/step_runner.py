"""Carries out a collective step by step on a virtual clock.

A move begins when its source slot's value is there and its lane (sender, receiver, channel) has
sent what came before. It crosses its links (`link_contention`), arrives a latency later, and is
done when the slot it goes to may be written. Long regular sweeps are handed to `steady_sweep`.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.policy.collective.collective import ChunkMoves, Collective, Sweep
from meshwright.predict.collective import steady_sweep
from meshwright.predict.collective.link_contention import LinkClocks, LinkMoves
from meshwright.predict.collective.message_costs import MessageCosts
from meshwright.predict.collective.sim_network import Floats, Longs, SimNetwork
from meshwright.predict.collective.slot_times import SlotTimes

MAX_CONNECTIONS = 1 << 26
"""Lanes up to which each that could be has a number."""


class MoveTimes(NamedTuple):
    """The moves of one step with their times."""

    step: int
    moves: ChunkMoves
    start_s: Floats
    end_s: Floats


class MoveRoutes(NamedTuple):
    """What a set of moves needs, whatever the slots: its ways, lanes, latencies and limits."""

    link_moves: LinkMoves
    connection: Longs
    connection_s: Floats
    """Seconds that a lane's own limit asks for, all moves of the step on it together."""
    latency_s: Floats
    shares_connections: bool
    """Whether several moves use one lane."""


class CollectiveRun:
    """The state of a simulation."""

    def __init__(
        self,
        collective: Collective,
        network: SimNetwork,
        endpoints: Longs,
        *,
        chunk_bytes: float,
        costs: MessageCosts,
        move_times: list[MoveTimes] | None,
    ) -> None:
        self.collective, self.network, self.endpoints = collective, network, endpoints
        self.chunk_bytes, self.costs = chunk_bytes, costs
        self.link_clocks = LinkClocks(len(network.link_bytes_per_s))
        self.slot_times = SlotTimes(collective)
        self.connections = _Lanes(collective)
        self.connection_free_s = np.zeros(self.connections.many)
        self.finish_s = np.zeros(collective.num_endpoints)
        self.move_times = move_times

    def run(self) -> None:
        """Carry out every sweep."""
        step = 0
        for sweep in self.collective.sweeps:
            if not len(sweep.moves):
                continue
            if self.move_times is None and steady_sweep.is_regular(sweep, self.collective):
                steady_sweep.simulate_regular_sweep(self, sweep)
            else:
                self._sweep(sweep, step)
            step += sweep.steps

    def _sweep(self, sweep: Sweep, first_step: int) -> None:
        # Slots along an order do not follow each other, so `at` sends them one by one.
        rows = sweep.moves.split_by_slot() if sweep.shift.slot_order else sweep.moves
        whole = None if sweep.shift.dst else self.find_routes(rows)
        for index in range(sweep.steps):
            active = (index >= rows.phase) & (index < rows.phase + sweep.span)
            step = _Messages(sweep.get_moves(index))
            if whole is None:
                legs = self.find_routes(step.moves)
            else:
                legs = whole if active.all() else select_moves(whole, active)
            self._step(first_step + index, step, legs)

    def _step(self, number: int, step: "_Messages", legs: MoveRoutes) -> None:
        cells = self.slot_times
        ready = step.latest(cells.ready_s(step.source, step.source_slot))
        start, sent = self.send(legs, ready)
        free = step.latest(cells.free_s(step.target, step.target_slot))
        done = np.maximum(sent + legs.latency_s, free)
        cells.read(step.source, step.source_slot, step.each(sent))
        cells.write(step.target, step.target_slot, step.each(done))
        self.record_finish(step.moves, sent, done)
        if self.move_times is not None:
            self.move_times.append(MoveTimes(number, step.moves, start, done))

    def send(self, legs: MoveRoutes, ready_s: Floats) -> tuple[Floats, Floats]:
        """Send moves whose values are there; return when each begins and when it has left."""
        start = np.maximum(ready_s, self.connection_free_s[legs.connection])
        posted = start + self.costs.overhead_s
        sent = np.maximum(
            self.link_clocks.add_moves(legs.link_moves, posted), posted + legs.connection_s
        )
        self.occupy_connections(legs, sent)
        return start, sent

    def occupy_connections(self, legs: MoveRoutes, sent_s: Floats) -> None:
        """Keep lanes busy until the moves on them have left."""
        if legs.shares_connections:
            np.maximum.at(self.connection_free_s, legs.connection, sent_s)
        else:
            self.connection_free_s[legs.connection] = sent_s

    def record_finish(self, moves: ChunkMoves, sent_s: Floats, done_s: Floats) -> None:
        """Keep the last moment in which each place has something to do."""
        np.maximum.at(self.finish_s, moves.src, sent_s)
        np.maximum.at(self.finish_s, moves.dst, done_s)

    def find_routes(self, moves: ChunkMoves) -> MoveRoutes:
        """Return the ways, lanes and latencies of moves."""
        costs, network = self.costs, self.network
        source, target = self.endpoints[moves.src], self.endpoints[moves.dst]
        routes = network.find_routes(source, target)
        nbytes = moves.count.astype(np.float64) * self.chunk_bytes
        crosses = network.domains[source] != network.domains[target]
        latency = routes.sum_latency_s(network.latency_s)
        for hop_s, some in ((costs.intra_hop_s, ~crosses), (costs.inter_hop_s, crosses)):
            if hop_s is not None:
                latency = np.where(some & (source != target), hop_s, latency)
        lane = self.connections.of(moves)
        rate = np.where(crosses, costs.inter_channel_bytes_per_s, costs.intra_channel_bytes_per_s)
        shared = self.connections.shared(lane)
        lane_bytes = nbytes
        if shared and bool((rate < math.inf).any()):
            _, which = np.unique(lane, return_inverse=True)
            lane_bytes = np.bincount(which, weights=nbytes).astype(np.float64)[which]
        lane_s = np.where(source != target, lane_bytes / rate, 0.0)
        plan = LinkMoves(routes, nbytes, network.link_bytes_per_s)
        return MoveRoutes(plan, lane, lane_s, latency, shared)


class _Messages:
    """The moves of one step, each one message, and the slots that they touch one by one."""

    def __init__(self, moves: ChunkMoves) -> None:
        self.moves, slots = moves, moves.split_by_slot()
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


def select_moves(legs: MoveRoutes, active: np.ndarray) -> MoveRoutes:
    """Return the legs of some of the moves.

    A lane's limit still counts all moves of the sweep that share it, which is a little late where
    some of them have not begun.
    """
    return MoveRoutes(
        legs.link_moves.select(active),
        legs.connection[active],
        legs.connection_s[active],
        legs.latency_s[active],
        legs.shares_connections,
    )


class _Lanes:
    """Numbers of the lanes (sender, receiver, channel) of a collective.

    Where there is room, every lane that could be has one. Memory that is not touched costs
    nothing, and looking lanes up in a list of those in use costs more than all else.
    """

    def __init__(self, collective: Collective) -> None:
        self.places, self.channels = collective.num_endpoints, collective.channels
        self.many = self.places * self.places * self.channels
        self._used: Longs | None = None
        if self.many > MAX_CONNECTIONS:
            keys = []
            for sweep in collective.sweeps:
                steps = range(sweep.steps) if sweep.shift.dst else (-1,)
                keys += [self._keys(sweep.moves if at < 0 else sweep.get_moves(at)) for at in steps]
            self._used = np.unique(np.concatenate(keys))
            self.many = len(self._used)
        self._last = np.zeros(self.many, dtype=np.int32)

    def of(self, moves: ChunkMoves) -> Longs:
        """Return the lanes of moves."""
        keys = self._keys(moves)
        return keys if self._used is None else np.searchsorted(self._used, keys)

    def shared(self, lane: Longs) -> bool:
        """Say whether several of the moves use one lane."""
        rows = np.arange(len(lane), dtype=np.int32)
        self._last[lane] = rows
        return bool((self._last[lane] != rows).any())

    def _keys(self, moves: ChunkMoves) -> Longs:
        return (_long(moves.src) * self.places + moves.dst) * self.channels + moves.channel
