"""`simulate_rl`: the controller of rollouts driven by a virtual clock, one event after another."""

from heapq import heappop, heappush
from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import (
    DropAction,
    GenerateAction,
    IdleReason,
    MemoryPhaseAction,
    RolloutController,
    SyncAction,
    TrainAction,
)
from meshwright.predict.rl.rl_setup import GroupLengths, RLSetup
from meshwright.predict.rl.rollout_engines import RolloutEngines, require_kv_room
from meshwright.predict.rl.trainer_costs import TrainerCosts, build_trainer_costs
from meshwright.predict.serving.sim.serving_fleet import build_engines
from meshwright.predict.serving.sim.simulated_engine import EngineSetup, SimulatedEngine, StepRuns


class RLSpan(NamedTuple):
    """Something that a side did, or waited for."""

    actor: str
    name: str
    start_s: float
    end_s: float


class RLStep(NamedTuple):
    """One training step."""

    start_s: float
    end_s: float
    tokens: int
    staleness: tuple[int, ...]
    """Of each of its groups."""


class SimulatedRL(NamedTuple):
    """What happened."""

    setup: RLSetup
    trainer_costs: TrainerCosts
    steps: tuple[RLStep, ...]
    trainer_spans: tuple[RLSpan, ...]
    """Of the trainer: training, syncs, memory phases."""
    wait_spans: tuple[RLSpan, ...]
    """Of either side, by name."""
    engine_runs: tuple[StepRuns, ...]
    dropped_at_s: tuple[float, ...]
    """When groups were let go as too old."""


class _Release(NamedTuple):
    """An engine that has computed anew what it had."""

    engine: SimulatedEngine


_SPARE = 2
"""Blocks for each that requests at work may have: as many again keep prefixes of others."""
_Event = tuple[
    float,
    int,
    SimulatedEngine | _Release | GenerateAction | TrainAction | SyncAction | MemoryPhaseAction,
]


def simulate_rl(setup: RLSetup, *, must_fit: bool = True) -> SimulatedRL:
    """Return how a setup fares; `must_fit` refuses a trainer without the memory."""
    run = _Run(setup, must_fit)
    run.go()
    return SimulatedRL(
        setup=setup,
        trainer_costs=run.prices,
        steps=tuple(run.steps),
        trainer_spans=tuple(run.doings),
        wait_spans=tuple(run.waits),
        engine_runs=tuple(each.get_step_runs() for each in run.engines.engines),
        dropped_at_s=tuple(run.dropped),
    )


def _no_larger(station: EngineSetup, setup: RLSetup) -> EngineSetup:
    """Return an engine without blocks that no request would ever have.

    Small models leave room for millions of them, each of which is kept count of.
    """
    prompt = setup.rollout_batch.prompt_lengths.quantile(1.0)
    longest = -(
        -(prompt + setup.rollout_batch.max_response_tokens) // station.scheduler_config.block_size
    )
    most = _SPARE * station.scheduler_config.max_num_seqs * (1 + longest)
    return station._replace(kv_blocks=min(station.kv_blocks, most))


class _Run:
    """The state of a simulation."""

    def __init__(self, setup: RLSetup, must_fit: bool) -> None:
        self.setup, self.prices = setup, build_trainer_costs(setup, must_fit=must_fit)
        self.controller = RolloutController(setup.rollout_policy)
        engines = self.prices.rollout_pool
        stations = build_engines(engines, require_kv_room(engines, setup.rollout_batch))
        self.room = stations[0].kv_blocks * stations[0].scheduler_config.block_size
        few = [_no_larger(one, setup) for one in stations]
        self.engines = RolloutEngines(few, self._expect, setup.framework.sample_assignment)
        self.steps: list[RLStep] = []
        self.doings: list[RLSpan] = []
        self.waits: list[RLSpan] = []
        self.dropped: list[float] = []
        self.drawn: dict[int, GroupLengths] = {}
        self.waiting: dict[IdleReason, float] = {}
        """Who waits for what, and since when."""
        self.began_s = 0.0
        self.events: list[_Event] = []
        self.tickets = 0

    def go(self) -> None:
        """Let everything happen."""
        self._begin(0.0)
        while not self.controller.is_done:
            now, _, what = heappop(self.events)
            if isinstance(what, SimulatedEngine):
                # One that was cut short ends at another time than it was to.
                if what.ends_s != now:
                    continue
                done = self.engines.collect_finished(what, now)
                for asked in done:
                    self.controller.complete_action(asked)
                if done:
                    self._begin(now)
            elif isinstance(what, _Release):
                self.engines.resume(what.engine, now)
            else:
                self._ended(what, now)
                self._begin(now)
        self._wait((), self.steps[-1].end_s)

    def _begin(self, now: float) -> None:
        for action in self.controller.start_actions():
            if isinstance(action, GenerateAction):
                self._generate(action, now)
                continue
            if isinstance(action, DropAction):
                self.dropped.append(now)
                self.engines.abort(action, now)
                continue
            self.began_s = now
            if isinstance(action, TrainAction):
                lasts = self.prices.training_s([self.drawn[group] for group in action.groups])
            elif isinstance(action, SyncAction):
                lasts = self.prices.sync.seconds
                self.engines.pause(now)
            else:
                lasts = self.prices.get_phase_s(action)
            self._push(now + lasts, action)
        # Of groups that a wait is for, only the name counts here.
        self._wait(self.controller.idle_reasons, now)

    def _generate(self, asked: GenerateAction, now: float) -> None:
        drawn = self.setup.rollout_batch.sample_group(asked.group)
        if drawn.prompt_tokens + max(drawn.response_tokens) > self.room:
            longest = drawn.prompt_tokens + max(drawn.response_tokens)
            what = f"a sample of {longest:,} tokens is longer than an engine's cache, {self.room:,}"
            fix = "use engines of more GPUs, or cut answers with `max_response_tokens`"
            raise InputError([Problem("response_lengths", what, fix)])
        self.drawn[asked.group] = drawn
        self.engines.submit(asked, drawn, now)

    def _ended(
        self, action: GenerateAction | TrainAction | SyncAction | MemoryPhaseAction, now: float
    ) -> None:
        assert not isinstance(action, GenerateAction), "groups end with their engine's steps"
        self.controller.complete_action(action)
        match action:
            case TrainAction():
                name = "train"
            case SyncAction():
                name = "sync"
            case _:
                name = action.phase
        self.doings.append(RLSpan("trainer", name, self.began_s, now))
        if isinstance(action, TrainAction):
            tokens = sum(self.drawn.pop(group).tokens for group in action.groups)
            staleness = tuple(action.step - version for version in action.versions)
            self.steps.append(RLStep(self.began_s, now, tokens, staleness))
        elif isinstance(action, SyncAction):
            anew = self.setup.framework.recomputes_kv_cache
            for engine in self.engines.engines:
                late = self.engines.recompute_s(engine) if anew else 0.0
                self._push(now + late, _Release(engine))

    def _wait(self, waits: tuple[IdleReason, ...], now: float) -> None:
        names = {IdleReason(one.side, one.cause) for one in waits}
        for one, since in list(self.waiting.items()):
            if one not in names:
                del self.waiting[one]
                if now > since:
                    self.waits.append(RLSpan(one.side, one.cause, since, now))
        for one in names:
            self.waiting.setdefault(one, now)

    def _expect(self, at_s: float, engine: SimulatedEngine) -> None:
        if at_s < float("inf"):
            self._push(at_s, engine)

    def _push(
        self,
        at_s: float,
        what: SimulatedEngine | _Release | TrainAction | SyncAction | MemoryPhaseAction,
    ) -> None:
        self.tickets += 1
        heappush(self.events, (at_s, self.tickets, what))
