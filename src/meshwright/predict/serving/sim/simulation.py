"""`simulate_serving`: requests pass through engines on virtual clocks, in one event loop.

Requests arrive at their times, or one after another's end where so many are kept in flight. A
router sends each to an engine. Where prompts are computed apart, one engine makes the first token,
and the keys and values travel to another that decodes (`SimulatedKVTransfer`).
"""

from collections import deque
from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from math import inf

import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.policy.serving.router import RequestRouter, RoutingPolicy
from meshwright.policy.serving.scheduler import Sequence as ServingSequence
from meshwright.predict.serving.sim.prefix_keys import PrefixBlockKeys
from meshwright.predict.serving.sim.served_requests import ServedRequests, TokenGap, to_column
from meshwright.predict.serving.sim.simulated_engine import EngineSetup, SimulatedEngine
from meshwright.predict.serving.sim.simulated_kv_transfer import (
    KVTransferTime,
    PromptKV,
    SimulatedKVTransfer,
)
from meshwright.spec.workload import WorkloadRequest

ROUTER_BLOCK_FACTOR = 8
"""Blocks of the KV cache that the router counts as one."""


def simulate_serving(
    requests: Sequence[WorkloadRequest],
    stations: Sequence[EngineSetup],
    *,
    in_flight: int | None = None,
    routing: RoutingPolicy = "least-loaded",
    prefill: Sequence[EngineSetup] = (),
    transfer: KVTransferTime | None = None,
) -> ServedRequests:
    """Return how requests fare; they are in order of arrival.

    `in_flight` keeps so many open and ignores arrival times. With `prefill`, these engines
    compute prompts and `stations` decode; `transfer` says how long what is handed over takes.
    """
    if not requests:
        raise InputError([Problem("requests", "there are none", "give at least one")])
    run = _Run(requests, stations, routing, prefill, transfer)
    run.go(in_flight)
    return run.served()


class _Run:
    """The state of a simulation."""

    def __init__(
        self,
        requests: Sequence[WorkloadRequest],
        stations: Sequence[EngineSetup],
        routing: RoutingPolicy,
        prefill: Sequence[EngineSetup],
        transfer: KVTransferTime | None,
    ) -> None:
        fronts = prefill or stations
        self.requests = requests
        self.station, limits = fronts[0], fronts[0].scheduler_config
        self.block_size = limits.block_size
        self.fronts = [SimulatedEngine(each, number) for number, each in enumerate(fronts)]
        self.over_to: SimulatedKVTransfer | None = None
        if prefill:
            others = [SimulatedEngine(each, len(fronts) + at) for at, each in enumerate(stations)]
            self.over_to = SimulatedKVTransfer(
                self.fronts, others, transfer or (lambda _: 0.0), self
            )
        self.engines = self.fronts + (self.over_to.decode_engines if self.over_to else [])
        # Engines for prompts alone hold no answers.
        backs = self.over_to.decode_engines if self.over_to else self.fronts
        self.most = self.block_size * min(each.scheduler.block_pool.size for each in backs)
        self.most_prompt = self.block_size * min(
            each.scheduler.block_pool.size for each in self.fronts
        )
        """Tokens of a request, and of its prompt, that every engine has room for."""
        self.router: RequestRouter | None = None
        if len(fronts) > 1:
            self.router = RequestRouter(
                len(fronts), routing, block_tokens=self.block_size * ROUTER_BLOCK_FACTOR,
                kept_blocks=max(1, fronts[0].kv_blocks // ROUTER_BLOCK_FACTOR),
            )  # fmt: skip
        shared = limits.enable_prefix_caching and any(one.prefix_blocks for one in requests)
        self.keys = PrefixBlockKeys(self.block_size) if shared else None
        count = len(requests)
        self.sent_s = [one.arrival_s for one in requests]
        self.first_s, self.end_s = [-1.0] * count, [-1.0] * count
        self.cached, self.preempted, self.engine = [0] * count, [0] * count, [-1] * count
        self.delay_s = [self.station.delay_s] * count
        """What lies around the engine of each."""
        self.left_s: dict[int, float] = {}
        """When those who made room, or moved, got their last token."""
        self.gaps: list[TokenGap] = []
        self.ready: deque[float] | None = None
        """When the next may be sent, where so many are kept in flight."""
        self.events: list[tuple[float, int, SimulatedEngine | PromptKV]] = []
        self.tickets = 0

    def go(self, in_flight: int | None) -> None:
        """Let everything happen."""
        sent = self.sent_s
        if in_flight is None:
            for number, at_s in enumerate(sent):
                self._happen(at_s)
                self._arrive(number, at_s)
        else:
            ready = self.ready = deque([0.0] * min(in_flight, len(sent)))
            for number in range(len(sent)):
                self._happen(inf, ready)
                self._happen(ready[0])
                sent[number] = at_s = ready.popleft()
                self._arrive(number, at_s)
        self._happen(inf)

    def _happen(self, before_s: float, or_until: Collection[float] = ()) -> None:
        """Let what is due before a time happen, or as much of it until there is something."""
        events, over_to = self.events, self.over_to
        while events and events[0][0] < before_s and not or_until:
            now, _, what = heappop(events)
            if isinstance(what, SimulatedEngine):
                # One that was cut short ends at another time than it was to.
                if what.ends_s == now:
                    if not what.is_waking:
                        self._stepped(what, now)
                    ends_s = what.start_step(now)
                    if ends_s < inf:
                        self.tickets += 1
                        heappush(events, (ends_s, self.tickets, what))
                    if over_to is not None:
                        over_to.admit_waiting(what, now)
            elif over_to is not None:
                over_to.start_decoding(what, now)

    def schedule_event(self, what: SimulatedEngine | PromptKV, at_s: float) -> None:
        """Write down when something ends."""
        if at_s < inf:
            self.tickets += 1
            heappush(self.events, (at_s, self.tickets, what))

    def enqueue(self, engine: SimulatedEngine, sequence: ServingSequence, now: float) -> None:
        """Let a sequence wait at an engine, which looks at it when its step is done."""
        if engine.is_leaping:
            self.schedule_event(engine, engine.truncate_steps(now))
        engine.add_sequence(sequence, now)
        if engine.ends_s == inf:
            self.schedule_event(engine, engine.wake_up(now))

    def served(self) -> ServedRequests:
        """Return the columns."""
        asked, delay_s = self.requests, np.array(self.delay_s)
        return ServedRequests(
            arrival_s=np.array(self.sent_s),
            first_s=to_column(self.first_s) + delay_s,
            end_s=to_column(self.end_s) + delay_s,
            prompt_tokens=np.array([one.prompt_tokens for one in asked]),
            output_tokens=np.array([one.output_tokens or 1 for one in asked]),
            cached_tokens=np.array(self.cached),
            preemptions=np.array(self.preempted),
            engine=np.array(self.engine),
            engines=tuple(each.get_step_runs() for each in self.engines),
            prefill_engines=len(self.fronts) if self.over_to else 0,
            kv_blocks=tuple(each.scheduler.block_pool.size for each in self.engines),
            gaps=tuple(self.gaps),
            delay_s=delay_s,
        )

    def _arrive(self, number: int, now: float) -> None:
        request = self.requests[number]
        prompt, output = request.prompt_tokens, request.output_tokens or 1
        if prompt + output - 1 > self.most or prompt > self.most_prompt:
            self._over(number, now)
            return
        keys = None if self.keys is None else self.keys.get_keys(request)
        sequence = ServingSequence(
            prompt, 1 if self.over_to else output, state=number, block_hashes=keys
        )
        place = 0
        if self.router is not None:
            # A block's key tells all before it, so that every so many-th is enough to know.
            place = self.router.assign(
                prompt, keys[ROUTER_BLOCK_FACTOR - 1 :: ROUTER_BLOCK_FACTOR] if keys else None
            )
        self.engine[number] = place
        self.enqueue(self.fronts[place], sequence, now)

    def _stepped(self, engine: SimulatedEngine, now: float) -> None:
        """Write down what a step brought."""
        engine.finish_step()
        first = self.first_s
        for sequence in engine.began:
            number = sequence.state
            if number in self.left_s:
                came = sequence in engine.list_sampled()
                self.gaps.append(
                    TokenGap(number, self.left_s.pop(number), now, came, engine.number)
                )
            elif first[number] < 0:
                first[number] = now
                self.cached[number] = sequence.num_cached_tokens or 0
                self.add_frontend_delay(engine, sequence)
        for sequence in engine.preempted:
            self.preempted[sequence.state] += 1
            if first[sequence.state] >= 0:
                self.left_s.setdefault(sequence.state, engine.start_s)
        over_to = self.over_to
        for sequence in engine.finished:
            number = sequence.state
            if over_to is not None and engine.number < len(self.fronts):
                if over_to.start_transfer(engine, sequence, now):
                    continue
            elif over_to is not None:
                over_to.record_finished(engine, sequence)
            elif self.router is not None:
                self.router.release(engine.number, sequence.num_prompt_tokens)
            self.end_s[number] = now
            self._over(number, now)

    def add_frontend_delay(self, engine: SimulatedEngine, sequence: ServingSequence) -> None:
        """Count what lies around an engine in steps of the batch that a sequence joins.

        Its own steps would do worse: prompts of others and waiting for room lie between them.
        """
        steps = self.station.delay_steps
        if steps:
            late_s = self.station.delay_s + steps * engine.decode_s(sequence.num_prompt_tokens)
            self.delay_s[sequence.state] = late_s

    def _over(self, number: int, now: float) -> None:
        """Let the next request be sent when the client has the end of one."""
        if self.ready is not None:
            self.ready.append(now + self.delay_s[number])
