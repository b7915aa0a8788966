"""An exact, slow reference: every move is a flow, and flows share links max-min fairly.

Rates change whenever a flow begins or ends. Nothing is ordered but by data and lanes; on a link,
moves of an earlier step may go first (`in_order`) or share with all. It has no code in common with
the simulation it checks, except for the ways of the network.
"""

from collections import defaultdict

import numpy as np

from meshwright.policy.collective.collective import Collective
from meshwright.predict.collective.sim_network import NO_LINK, SimNetwork


class _Flow:
    def __init__(self, step: int, nbytes: float, links: dict[int, float], latency_s: float):
        self.step, self.left = step, nbytes
        self.links, self.latency_s = links, latency_s
        self.waits: set[int] = set()
        """Moves whose result it sends, and the move before it on its lane."""
        self.lane_before: int | None = None
        self.slot_waits: set[int] = set()
        """Moves that must be through before its slot may be written."""
        self.reads: set[int] = set()
        self.sent: float | None = None
        self.done: float | None = None


def fluid_seconds(
    collective: Collective, network: SimNetwork, nbytes: float, *, in_order: bool = True
) -> float:
    """Return the time of a collective whose ranks are the network's first GPUs."""
    flows = _flows(collective, network, nbytes / collective.chunks)
    now, running = 0.0, set[int]()
    waiting = set(range(len(flows)))
    while waiting or running:
        for index in [one for one in sorted(waiting) if _may_begin(flows, one, now)]:
            waiting.discard(index)
            running.add(index)
        rates = _rates(flows, running, network, in_order)
        ends = [now + flows[one].left / rates[one] for one in running if rates[one]]
        later = [_ready_at(flows, one) for one in waiting]
        then = min([*ends, *(time for time in later if time is not None and time > now)])
        for index in sorted(running):
            flow = flows[index]
            flow.left -= rates[index] * (then - now)
            if flow.left <= 1e-9 * max(1.0, nbytes) or rates[index] == float("inf"):
                running.discard(index)
                flow.sent = then
        now = then
        _complete(flows)
    return max((flow.done or 0.0 for flow in flows), default=0.0)


def _flows(collective: Collective, network: SimNetwork, chunk_bytes: float) -> list[_Flow]:
    ends = network.get_endpoints(None, collective.ranks, collective.switches)
    flows: list[_Flow] = []
    writers: dict[tuple[int, int], set[int]] = defaultdict(set)
    readers: dict[tuple[int, int], set[int]] = defaultdict(set)
    lanes: dict[tuple[int, int, int], int] = {}
    for number, moves in collective.iterate_steps():
        step = []
        for row in moves.table.tolist():
            src, dst, src_slot, dst_slot, count, _, channel, _ = row
            route = network.find_routes(ends[[src]], ends[[dst]])
            shares = np.ones(route.links.shape) if route.shares is None else route.shares
            links = {
                int(link): float(share)
                for link, share in zip(route.links[0], shares[0], strict=True)
                if link != NO_LINK
            }
            latency = sum(share * float(network.latency_s[link]) for link, share in links.items())
            flow = _Flow(number, count * chunk_bytes, links, latency)
            for offset in range(count):
                flow.waits |= writers[src, src_slot + offset]
                flow.slot_waits |= writers[dst, dst_slot + offset]
                flow.reads |= readers[dst, dst_slot + offset]
            flow.lane_before = lanes.get((src, dst, channel))
            step.append((len(flows), row))
            flows.append(flow)
        for index, (src, dst, src_slot, dst_slot, count, _, channel, _) in step:
            for offset in range(count):
                readers[src, src_slot + offset].add(index)
                # Earlier writers are waited for through this one, except in a switch.
                if dst < collective.ranks:
                    writers[dst, dst_slot + offset] = {index}
                else:
                    writers[dst, dst_slot + offset].add(index)
            lanes[src, dst, channel] = index
    return flows


def _ready_at(flows: list[_Flow], index: int) -> float | None:
    flow = flows[index]
    times = [flows[one].done for one in flow.waits]
    if flow.lane_before is not None:
        times.append(flows[flow.lane_before].sent)
    if any(time is None for time in times):
        return None
    return max((time for time in times if time is not None), default=0.0)


def _may_begin(flows: list[_Flow], index: int, now: float) -> bool:
    ready = _ready_at(flows, index)
    return ready is not None and ready <= now + 1e-15


def _complete(flows: list[_Flow]) -> None:
    """Settle what has left its links and finds its slot free."""
    changed = True
    while changed:
        changed = False
        for flow in flows:
            if flow.sent is None or flow.done is not None:
                continue
            before = [flows[one].done for one in flow.slot_waits]
            before += [flows[one].sent for one in flow.reads]
            if all(time is not None for time in before):
                arrived = flow.sent + flow.latency_s
                flow.done = max([arrived, *(time for time in before if time is not None)])
                changed = True


def _rates(
    flows: list[_Flow], running: set[int], network: SimNetwork, in_order: bool
) -> dict[int, float]:
    """Return max-min fair rates, of earlier steps first where they go in order."""
    rates = {one: float("inf") for one in running if not flows[one].links or not flows[one].left}
    room = {
        link: float(network.link_bytes_per_s[link]) for one in running for link in flows[one].links
    }
    open_ = set(running) - set(rates)
    turns = sorted({flows[one].step for one in open_}) if in_order else [None]
    for turn in turns:
        some = {one for one in open_ if turn is None or flows[one].step == turn}
        rates |= _fair(flows, some, room)
    return rates


def _fair(flows: list[_Flow], some: set[int], room: dict[int, float]) -> dict[int, float]:
    """Fill up links progressively; take what the flows get from the room that is left."""
    rates: dict[int, float] = {}
    while some:
        users: dict[int, float] = defaultdict(float)
        for one in some:
            for link, part in flows[one].links.items():
                users[link] += part
        tightest = min(users, key=lambda link: room[link] / users[link])
        share = room[tightest] / users[tightest]
        for one in [one for one in some if tightest in flows[one].links]:
            rates[one] = share
            some.discard(one)
            for link, part in flows[one].links.items():
                left = room[link] - share * part
                # What is left after rounding is nothing.
                room[link] = left if left > 1e-9 * share else 0.0
    return rates
