"""`RolloutGenerator`: groups of rollouts, sampled by the serving engine in an environment.

    with VerifierPool(task.verifiers) as pool:
        config = RolloutConfig(seed=0, max_tokens=8, group_size=4)
        generator = RolloutGenerator(llm.engine, task, pool, config)
        groups = generator.get_groups(step=0, prompts=range(8), version=0)

An episode goes on as soon as its own turn ended, whatever the others do: the engine takes its turns
while environments and verifiers work beside it. Every wait for one of them has a deadline, and who
lets it pass is named.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.rollout.active_rollout import FAILED, ActiveRollout
from meshwright.run.posttrain.rollout.environment import Environment
from meshwright.run.posttrain.rollout.environment_threads import EnvironmentThreadPool
from meshwright.run.posttrain.rollout.reward_component import RewardComponent
from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutEnd, RolloutKey
from meshwright.run.posttrain.rollout.rollout_config import RolloutConfig
from meshwright.run.posttrain.rollout.verifiers.verifier_job import VerifierJob
from meshwright.run.serve.request import OutputSink, Request, RequestOutput

RolloutGroup = tuple[Rollout, ...]
"""The samples of one prompt, in their order."""


class RolloutInference(Protocol):
    """What draws for a generator: an engine of this process, or several elsewhere as one."""

    max_model_len: int
    """Tokens of a prompt with its answer."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""

    def add_request(self, request: Request, sink: OutputSink, /) -> list[Any]:
        """Take an ask; returns what cancels it."""

    def abort(self, states: list[Any], /) -> None:
        """End answers; their last pieces say that they were cancelled, or end by themselves."""

    def step(self) -> bool:
        """Go on, or wait for a moment for others who do."""

    def take_outputs(self) -> list[tuple[OutputSink, RequestOutput]]:
        """Take the pieces that are ready, with where they go."""


class RewardProvider(Protocol):
    """Who judges for a generator: a `VerifierPool`, alone or with others."""

    fingerprints: dict[str, str]
    """What tells each judge from what it was before a change."""

    def submit(self, checks: Sequence[VerifierJob], /) -> "list[Future[RewardComponent]]":
        """Take checks; each verdict comes as a part of a reward, also where it fails."""


class RolloutGenerator:
    """Draws rollouts; used by the thread that takes the engine's turns."""

    def __init__(
        self,
        engine: RolloutInference,
        environment: Environment,
        reward_provider: RewardProvider,
        config: RolloutConfig,
    ) -> None:
        """Draw with an engine; who changes its weights says of which version they are."""
        self.engine, self.environment, self.reward_provider = engine, environment, reward_provider
        self.config = config

    def build_keys(self, step: int, prompts: Iterable[int]) -> list[RolloutKey]:
        """Return the keys of the groups of prompts, group after group."""
        return [
            RolloutKey(step, prompt, n) for prompt in prompts for n in range(self.config.group_size)
        ]

    def get_groups(self, step: int, prompts: Iterable[int], version: int) -> list[RolloutGroup]:
        """Draw a group for each prompt, by weights of a version."""
        keys = self.build_keys(step, prompts)
        return group_rollouts(keys, self.generate_rollouts(keys, version), self.config.group_size)

    def generate_rollouts(self, keys: Sequence[RolloutKey], version: int) -> Iterator[Rollout]:
        """Draw rollouts, and return each as soon as it has its verdicts, in no certain order."""
        if twice := len(keys) - len(set(keys)):
            what = f"{twice} of {len(keys)} stand there twice"
            raise InputError([Problem("keys", what, "draw each rollout once")])
        if not self.engine.is_idle:
            what = "it still answers others"
            raise InputError([Problem("engine", what, "let it end, or cancel them")])
        stream = RolloutStream(self)
        try:
            stream.submit(keys, version)
            while stream.is_busy:
                yield from stream.run_step()
        finally:
            stream.close()


def group_rollouts(
    keys: Sequence[RolloutKey], drawn: Iterable[Rollout], samples: int
) -> list[RolloutGroup]:
    """Put rollouts into the order of their keys, and into groups."""
    found = {rollout.key: rollout for rollout in drawn}
    return [
        tuple(found[key] for key in keys[place : place + samples])
        for place in range(0, len(keys), samples)
    ]


class RolloutStream:
    """Rollouts that are begun at any time, and returned as they get their verdicts.

    It is used by the thread that takes the engine's turns, and takes them itself.
    """

    def __init__(self, generator: RolloutGenerator) -> None:
        self._engine, self._pool = generator.engine, generator.reward_provider
        self._environment, self._drawing = generator.environment, generator.config
        self._began_s, self._version = time.monotonic(), 0
        self._renewing = False
        self._running: dict[RolloutKey, ActiveRollout] = {}
        self._ended: list[ActiveRollout] = []
        drawing = generator.config
        self._stepping = EnvironmentThreadPool(
            self._environment.name,
            threads=drawing.threads if self._environment.may_block else 0,
            step_s=drawing.environment_timeout_s,
        )

    @property
    def is_busy(self) -> bool:
        """Whether any rollout is under way."""
        return bool(self._running)

    def submit(
        self,
        keys: Sequence[RolloutKey],
        version: int,
        known: Mapping[RolloutKey, Rollout] | None = None,
    ) -> None:
        """Begin rollouts, by weights of a version.

        Those that are `known` keep their tokens, and are judged again: environments hear the same
        turns once more. What an engine failed at, or an environment answers otherwise, is drawn.
        """
        self._version, known = version, known or {}
        for key in keys:
            if key in self._running:
                raise InputError([Problem("keys", f"{key} is under way", "draw each once")])
            before = known.get(key)
            running = ActiveRollout(key, self._environment, self._began_s, version, before)
            self._running[key] = running
            self._ask(running)

    def run_step(self) -> list[Rollout]:
        """Take a turn of the engine, and return the rollouts that are complete.

        Where the engine has nothing to do it waits for an environment or a verifier.
        """
        if not self._engine.is_idle:
            self._engine.step()
            self._deliver()
        self._hear()
        if self._ended and self._engine.is_idle and not self._stepping.is_busy:
            # Only for the first: by then most of the others have theirs as well.
            wait(self._ended[0].pending_rewards)
        return self._ready()

    def update_weights(self, version: int, write: Callable[[], object]) -> None:
        """Let `write` change the weights; what is under way goes on with them.

        Tokens stay as they were drawn, with the log-probabilities that the engine told; keys and
        values of all of them are computed anew.
        """
        self._deliver()
        self._stop()
        # What came too late to be stopped counts, as far as it came.
        self._renewing = True
        self._deliver()
        self._renewing = False
        going = [each for each in self._running.values() if each.request_handles]
        write()
        self._version = version
        for running in going:
            running.request_handles = []
            running.update_weights(version)
            self._put(running)

    def close(self) -> None:
        """Leave the engine idle, also where an error or the caller broke this off."""
        self._stepping.close()
        self._empty()

    def _ask(self, running: ActiveRollout) -> None:
        if running.recorded_rollout:
            self._stepping.submit(running.key, running.episode, running.recorded_rollout.popleft())
            return
        running.begin_turn(self._version)
        self._put(running)

    def _put(self, running: ActiveRollout) -> None:
        most = self._engine.max_model_len
        room = most - len(running.token_ids)
        if room <= 0 and not running.turns:
            running.error = (
                f"its prompt has {len(running.token_ids)} tokens, and the context holds {most}"
            )
            self._end(running, "error")
            return
        if room <= 0:
            self._end(running, "length")
            return
        ask = running.build_request(self._drawing, room)
        running.request_handles = self._engine.add_request(ask, partial(self._take, running))

    def _deliver(self) -> None:
        for sink, piece in self._engine.take_outputs():
            sink(piece)

    def _take(self, running: ActiveRollout, output: RequestOutput) -> None:
        """Take a piece of a turn; its last one goes to the environment."""
        if self._renewing and output.finish_reason == "abort":
            if output.token_ids:
                running.outputs.append(msgspec.structs.replace(output, finish_reason=None))
            return
        running.outputs.append(output)
        if output.finish_reason is None:
            return
        turn, running.request_handles = running.finish_turn(), []
        if turn.finish in FAILED:
            running.error = output.error or f"the answer was {turn.finish}"
            running.add_turn(turn)
            self._end(running, "error")
            return
        self._stepping.submit(running.key, running.episode, turn)

    def _hear(self) -> None:
        """Take what environments said; wait for one where there is nothing else to do."""
        wanted: list[tuple[ActiveRollout, VerifierJob]] = []
        while said := self._stepping.next_result(wait=self._engine.is_idle and not wanted):
            running, reply = self._running[said.key], said.reply
            running.rewards += reply.rewards
            wanted += [(running, check) for check in reply.verifier_jobs]
            last = reply.done or len(running.turns) + 1 >= self._drawing.max_turns
            told = () if last else reply.observation
            length = len(running.token_ids) + len(said.turn.tokens) + len(told)
            # What leaves no room for a further turn would lie beyond the model's context.
            full = not last and length >= self._engine.max_model_len
            running.add_turn(said.turn, () if full else told)
            if full:
                self._end(running, "length")
            elif not last:
                self._ask(running)
            elif said.turn.finish == "length":
                self._end(running, "length")
            else:
                self._end(running, "finished" if reply.done else "max_turns")
        # All at once: a message for each would cost more than most judgements.
        verdicts = self._pool.submit([check for _, check in wanted])
        for (running, _), verdict in zip(wanted, verdicts, strict=True):
            running.rewards.append(verdict)

    def _end(self, running: ActiveRollout, ending: RolloutEnd) -> None:
        running.end_reason = ending
        self._ended.append(running)

    def _ready(self) -> list[Rollout]:
        ended, self._ended = self._ended, []
        found = []
        for running in ended:
            if running.pending_rewards:
                self._ended.append(running)
            else:
                del self._running[running.key]
                found.append(running.to_rollout())
        return found

    def _empty(self) -> None:
        """Take everything out of the engine."""
        self._stop()
        for running in self._running.values():
            running.request_handles = []
        self._engine.take_outputs()

    def _stop(self) -> None:
        """Cancel what the engine has, and let it come to rest."""
        for running in self._running.values():
            self._engine.abort(running.request_handles)
        while not self._engine.is_idle:
            self._engine.step()
