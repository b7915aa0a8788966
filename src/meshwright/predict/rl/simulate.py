"""`simulate`: the controller of rollouts driven by a virtual clock, one event after another."""

from heapq import heappop, heappush
from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import Controller, Drop, Generate, Phase, Sync, Train, Wait
from meshwright.predict.rl.engines import Engines, require_room
from meshwright.predict.rl.prices import Prices, prices_of
from meshwright.predict.rl.setup import Drawn, Setup
from meshwright.predict.serving.clocked import Clocked, Station, Stretches
from meshwright.predict.serving.fleet import stations_of


class Span(NamedTuple):
    """Something that a side did, or waited for."""

    who: str
    name: str
    start_s: float
    end_s: float


class Step(NamedTuple):
    """One training step."""

    start_s: float
    end_s: float
    tokens: int
    staleness: tuple[int, ...]
    """Of each of its groups."""


class Simulated(NamedTuple):
    """What happened."""

    setup: Setup
    prices: Prices
    steps: tuple[Step, ...]
    doings: tuple[Span, ...]
    """Of the trainer: training, syncs, memory phases."""
    waits: tuple[Span, ...]
    """Of either side, by name."""
    engines: tuple[Stretches, ...]
    dropped: tuple[float, ...]
    """When groups were let go as too old."""


class _Release(NamedTuple):
    """An engine that has computed anew what it had."""

    engine: Clocked


_SPARE = 2
"""Blocks for each that requests at work may have: as many again keep prefixes of others."""
_Event = tuple[float, int, Clocked | _Release | Generate | Train | Sync | Phase]


def simulate(setup: Setup, *, must_fit: bool = True) -> Simulated:
    """Return how a setup fares; `must_fit` refuses a trainer without the memory."""
    run = _Run(setup, must_fit)
    run.go()
    return Simulated(
        setup=setup,
        prices=run.prices,
        steps=tuple(run.steps),
        doings=tuple(run.doings),
        waits=tuple(run.waits),
        engines=tuple(each.stretches() for each in run.engines.engines),
        dropped=tuple(run.dropped),
    )


def _no_larger(station: Station, setup: Setup) -> Station:
    """Return an engine without blocks that no request would ever have.

    Small models leave room for millions of them, each of which is kept count of.
    """
    prompt = setup.rounds.prompt.quantile(1.0)
    longest = -(-(prompt + setup.rounds.longest) // station.limits.block_tokens)
    most = _SPARE * station.limits.batch_requests * (1 + longest)
    return station._replace(blocks=min(station.blocks, most))


class _Run:
    """The state of a simulation."""

    def __init__(self, setup: Setup, must_fit: bool) -> None:
        self.setup, self.prices = setup, prices_of(setup, must_fit=must_fit)
        self.controller = Controller(setup.arrangement)
        engines = self.prices.engines
        stations = stations_of(engines, require_room(engines, setup.rounds))
        self.room = stations[0].blocks * stations[0].limits.block_tokens
        few = [_no_larger(one, setup) for one in stations]
        self.engines = Engines(few, self._expect, setup.framework.deals)
        self.steps: list[Step] = []
        self.doings: list[Span] = []
        self.waits: list[Span] = []
        self.dropped: list[float] = []
        self.drawn: dict[int, Drawn] = {}
        self.waiting: dict[Wait, float] = {}
        """Who waits for what, and since when."""
        self.began_s = 0.0
        self.events: list[_Event] = []
        self.tickets = 0

    def go(self) -> None:
        """Let everything happen."""
        self._begin(0.0)
        while not self.controller.is_done:
            now, _, what = heappop(self.events)
            if isinstance(what, Clocked):
                # One that was cut short ends at another time than it was to.
                if what.ends_s != now:
                    continue
                done = self.engines.stepped(what, now)
                for asked in done:
                    self.controller.end(asked)
                if done:
                    self._begin(now)
            elif isinstance(what, _Release):
                self.engines.release(what.engine, now)
            else:
                self._ended(what, now)
                self._begin(now)
        self._wait((), self.steps[-1].end_s)

    def _begin(self, now: float) -> None:
        for action in self.controller.begin():
            if isinstance(action, Generate):
                self._generate(action, now)
                continue
            if isinstance(action, Drop):
                self.dropped.append(now)
                self.engines.drop(action, now)
                continue
            self.began_s = now
            if isinstance(action, Train):
                lasts = self.prices.training_s([self.drawn[group] for group in action.groups])
            elif isinstance(action, Sync):
                lasts = self.prices.sync.seconds
                self.engines.hold(now)
            else:
                lasts = self.prices.seconds(action)
            self._push(now + lasts, action)
        # Of groups that a wait is for, only the name counts here.
        self._wait(self.controller.waits, now)

    def _generate(self, asked: Generate, now: float) -> None:
        drawn = self.setup.rounds.drawn(asked.group)
        if drawn.prompt + max(drawn.answers) > self.room:
            longest = drawn.prompt + max(drawn.answers)
            what = f"a sample of {longest:,} tokens is longer than an engine's cache, {self.room:,}"
            fix = "use engines of more GPUs, or cut answers with `longest`"
            raise InputError([Problem("output", what, fix)])
        self.drawn[asked.group] = drawn
        self.engines.submit(asked, drawn, now)

    def _ended(self, action: Generate | Train | Sync | Phase, now: float) -> None:
        assert not isinstance(action, Generate), "groups end with their engine's steps"
        self.controller.end(action)
        name = action.name if isinstance(action, Phase) else type(action).__name__.lower()
        self.doings.append(Span("trainer", name, self.began_s, now))
        if isinstance(action, Train):
            tokens = sum(self.drawn.pop(group).tokens for group in action.groups)
            staleness = tuple(action.step - version for version in action.versions)
            self.steps.append(Step(self.began_s, now, tokens, staleness))
        elif isinstance(action, Sync):
            anew = self.setup.framework.recomputes
            for engine in self.engines.engines:
                late = self.engines.recompute_s(engine) if anew else 0.0
                self._push(now + late, _Release(engine))

    def _wait(self, waits: tuple[Wait, ...], now: float) -> None:
        names = {Wait(one.who, one.name) for one in waits}
        for one, since in list(self.waiting.items()):
            if one not in names:
                del self.waiting[one]
                if now > since:
                    self.waits.append(Span(one.who, one.name, since, now))
        for one in names:
            self.waiting.setdefault(one, now)

    def _expect(self, at_s: float, engine: Clocked) -> None:
        if at_s < float("inf"):
            self._push(at_s, engine)

    def _push(self, at_s: float, what: Clocked | _Release | Train | Sync | Phase) -> None:
        self.tickets += 1
        heappush(self.events, (at_s, self.tickets, what))
