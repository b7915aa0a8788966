"""`Generator`: groups of rollouts, drawn by the serving engine in episodes of an environment.

    with VerifierPool(task.verifiers) as pool:
        generator = Generator(llm.engine, task, pool, Drawing(seed=0, max_tokens=8, samples=4))
        groups = generator.groups(step=0, prompts=range(8), version=0)

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
from meshwright.run.posttrain.rollouts.drawing import Drawing
from meshwright.run.posttrain.rollouts.environment import Environment
from meshwright.run.posttrain.rollouts.making import FAILED, Making
from meshwright.run.posttrain.rollouts.record import Ending, Key, RewardPart, Rollout
from meshwright.run.posttrain.rollouts.stepping import Stepping
from meshwright.run.posttrain.rollouts.verifiers.check import Check
from meshwright.run.serve.asked import Ask, Piece, Sink

Group = tuple[Rollout, ...]
"""The samples of one prompt, in their order."""


class Answers(Protocol):
    """What draws for a generator: an engine of this process, or several elsewhere as one."""

    max_length: int
    """Tokens of a prompt with its answer."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""

    def add(self, ask: Ask, sink: Sink, /) -> list[Any]:
        """Take an ask; returns what cancels it."""

    def cancel(self, answers: list[Any], /) -> None:
        """End answers; their last pieces say that they were cancelled, or end by themselves."""

    def turn(self) -> bool:
        """Go on, or wait for a moment for others who do."""

    def outbox(self) -> list[tuple[Sink, Piece]]:
        """Take the pieces that are ready, with where they go."""


class Judging(Protocol):
    """Who judges for a generator: a `VerifierPool`, alone or with others."""

    fingerprints: dict[str, str]
    """What tells each judge from what it was before a change."""

    def submit(self, checks: Sequence[Check], /) -> "list[Future[RewardPart]]":
        """Take checks; each verdict comes as a part of a reward, also where it fails."""


class Generator:
    """Draws rollouts; used by the thread that takes the engine's turns."""

    def __init__(
        self, engine: Answers, environment: Environment, pool: Judging, drawing: Drawing
    ) -> None:
        """Draw with an engine; who changes its weights says of which version they are."""
        self.engine, self.environment, self.pool = engine, environment, pool
        self.drawing = drawing

    def keys(self, step: int, prompts: Iterable[int]) -> list[Key]:
        """Return the keys of the groups of prompts, group after group."""
        return [Key(step, prompt, n) for prompt in prompts for n in range(self.drawing.samples)]

    def groups(self, step: int, prompts: Iterable[int], version: int) -> list[Group]:
        """Draw a group for each prompt, by weights of a version."""
        keys = self.keys(step, prompts)
        return grouped(keys, self.rollouts(keys, version), self.drawing.samples)

    def rollouts(self, keys: Sequence[Key], version: int) -> Iterator[Rollout]:
        """Draw rollouts, and return each as soon as it has its verdicts, in no certain order."""
        if twice := len(keys) - len(set(keys)):
            what = f"{twice} of {len(keys)} stand there twice"
            raise InputError([Problem("keys", what, "draw each rollout once")])
        if not self.engine.is_idle:
            what = "it still answers others"
            raise InputError([Problem("engine", what, "let it end, or cancel them")])
        stream = Stream(self)
        try:
            stream.begin(keys, version)
            while stream.busy:
                yield from stream.turn()
        finally:
            stream.close()


def grouped(keys: Sequence[Key], drawn: Iterable[Rollout], samples: int) -> list[Group]:
    """Put rollouts into the order of their keys, and into groups."""
    found = {rollout.key: rollout for rollout in drawn}
    return [
        tuple(found[key] for key in keys[place : place + samples])
        for place in range(0, len(keys), samples)
    ]


class Stream:
    """Rollouts that are begun at any time, and returned as they get their verdicts.

    It is used by the thread that takes the engine's turns, and takes them itself.
    """

    def __init__(self, generator: Generator) -> None:
        self._engine, self._pool = generator.engine, generator.pool
        self._environment, self._drawing = generator.environment, generator.drawing
        self._began_s, self._version = time.monotonic(), 0
        self._renewing = False
        self._running: dict[Key, Making] = {}
        self._ended: list[Making] = []
        drawing = generator.drawing
        self._stepping = Stepping(
            self._environment.name,
            threads=drawing.threads if self._environment.waits else 0,
            step_s=drawing.step_s,
        )

    @property
    def busy(self) -> bool:
        """Whether any rollout is under way."""
        return bool(self._running)

    def begin(
        self, keys: Sequence[Key], version: int, known: Mapping[Key, Rollout] | None = None
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
            running = Making(key, self._environment, self._began_s, version, before)
            self._running[key] = running
            self._ask(running)

    def turn(self) -> list[Rollout]:
        """Take a turn of the engine, and return the rollouts that are complete.

        Where the engine has nothing to do it waits for an environment or a verifier.
        """
        if not self._engine.is_idle:
            self._engine.turn()
            self._deliver()
        self._hear()
        if self._ended and self._engine.is_idle and not self._stepping.busy:
            # Only for the first: by then most of the others have theirs as well.
            wait(self._ended[0].unjudged)
        return self._ready()

    def renew(self, version: int, write: Callable[[], object]) -> None:
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
        going = [each for each in self._running.values() if each.answers]
        write()
        self._version = version
        for running in going:
            running.answers = []
            running.renew(version)
            self._put(running)

    def close(self) -> None:
        """Leave the engine idle, also where an error or the caller broke this off."""
        self._stepping.close()
        self._empty()

    def _ask(self, running: Making) -> None:
        if running.known:
            self._stepping.submit(running.key, running.episode, running.known.popleft())
            return
        running.begin_turn(self._version)
        self._put(running)

    def _put(self, running: Making) -> None:
        most = self._engine.max_length
        room = most - len(running.ids)
        if room <= 0 and not running.turns:
            running.error = (
                f"its prompt has {len(running.ids)} tokens, and the context holds {most}"
            )
            self._end(running, "error")
            return
        if room <= 0:
            self._end(running, "length")
            return
        ask = running.ask(self._drawing, room)
        running.answers = self._engine.add(ask, partial(self._take, running))

    def _deliver(self) -> None:
        for sink, piece in self._engine.outbox():
            sink(piece)

    def _take(self, running: Making, piece: Piece) -> None:
        """Take a piece of a turn; its last one goes to the environment."""
        if self._renewing and piece.finish == "cancelled":
            if piece.tokens:
                running.pieces.append(msgspec.structs.replace(piece, finish=None))
            return
        running.pieces.append(piece)
        if piece.finish is None:
            return
        turn, running.answers = running.turn(), []
        if turn.finish in FAILED:
            running.error = piece.error or f"the answer was {turn.finish}"
            running.take(turn)
            self._end(running, "error")
            return
        self._stepping.submit(running.key, running.episode, turn)

    def _hear(self) -> None:
        """Take what environments said; wait for one where there is nothing else to do."""
        wanted: list[tuple[Making, Check]] = []
        while said := self._stepping.next(wait=self._engine.is_idle and not wanted):
            running, reply = self._running[said.key], said.reply
            running.rewards += reply.rewards
            wanted += [(running, check) for check in reply.checks]
            last = reply.done or len(running.turns) + 1 >= self._drawing.max_turns
            told = () if last else reply.observation
            length = len(running.ids) + len(said.turn.tokens) + len(told)
            # What leaves no room for a further turn would lie beyond the model's context.
            full = not last and length >= self._engine.max_length
            running.take(said.turn, () if full else told)
            if full:
                self._end(running, "length")
            elif not last:
                self._ask(running)
            elif said.turn.finish == "length":
                self._end(running, "length")
            else:
                self._end(running, "done" if reply.done else "turns")
        # All at once: a message for each would cost more than most judgements.
        verdicts = self._pool.submit([check for _, check in wanted])
        for (running, _), verdict in zip(wanted, verdicts, strict=True):
            running.rewards.append(verdict)

    def _end(self, running: Making, ending: Ending) -> None:
        running.ending = ending
        self._ended.append(running)

    def _ready(self) -> list[Rollout]:
        ended, self._ended = self._ended, []
        found = []
        for running in ended:
            if running.unjudged:
                self._ended.append(running)
            else:
                del self._running[running.key]
                found.append(running.rollout())
        return found

    def _empty(self) -> None:
        """Take everything out of the engine."""
        self._stop()
        for running in self._running.values():
            running.answers = []
        self._engine.outbox()

    def _stop(self) -> None:
        """Cancel what the engine has, and let it come to rest."""
        for running in self._running.values():
            self._engine.cancel(running.answers)
        while not self._engine.is_idle:
            self._engine.turn()
