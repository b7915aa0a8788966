"""`Generator`: groups of rollouts, drawn by the serving engine in episodes of an environment.

    with VerifierPool(task.verifiers) as pool:
        generator = Generator(llm.engine, task, pool, Drawing(seed=0, max_tokens=8, samples=4))
        groups = generator.groups(step=0, prompts=range(8), version=0)

An episode goes on as soon as its own turn ended, whatever the others do: the engine takes its turns
while environments and verifiers work beside it. Every wait for one of them has a deadline, and who
lets it pass is named.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.rollouts.environment import Environment
from meshwright.run.posttrain.rollouts.record import Ending, Key, RewardPart, Rollout, Turn
from meshwright.run.posttrain.rollouts.seeds import seed_of
from meshwright.run.posttrain.rollouts.stepping import Stepping
from meshwright.run.posttrain.rollouts.verifiers.check import Check
from meshwright.run.posttrain.rollouts.verifiers.pool import VerifierPool
from meshwright.run.serve.asked import Ask, Piece, Sampling
from meshwright.spec.bounds import Bounds

if TYPE_CHECKING:
    from meshwright.run.serve.engine.answer import Answer
    from meshwright.run.serve.engine.engine import Engine

Group = tuple[Rollout, ...]
"""The samples of one prompt, in their order."""


class Drawing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rollouts are drawn."""

    seed: int = 0
    samples: int = 8
    """Rollouts of each prompt."""
    max_tokens: int = 256
    """Drawn in one turn."""
    max_turns: int = 1
    temperature: float = 1.0
    """1, or 0 for evaluation. Log-probabilities that the engine tells are the model's own: at any
    other temperature tokens would be drawn by chances that nobody told of."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end a turn besides the model's own."""
    step_s: float = 60.0
    """The deadline of one step of an environment."""
    threads: int = 4
    """In which environments that wait take their steps."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(
            samples=self.samples,
            max_tokens=self.max_tokens,
            max_turns=self.max_turns,
            threads=self.threads,
        )
        bounds.positive(step_s=self.step_s)
        if self.temperature not in (0.0, 1.0):
            what = f"{self.temperature:g} draws by other chances than the engine tells"
            bounds.add("temperature", what, "use 1 for training, 0 for evaluation")
        bounds.require()


class _Running:
    """A rollout in the making."""

    def __init__(self, key: Key, environment: Environment, began_s: float) -> None:
        self.key, self.episode = key, environment.reset(key.prompt)
        self.prompt = tuple(self.episode.prompt)
        self.ids = list(self.prompt)
        self.turns: list[Turn] = []
        self.rewards: list[RewardPart | Future[RewardPart]] = []
        self.ending: Ending | None = None
        self.error, self.seed = "", 0
        self.pieces: list[Piece] = []
        self.asked_s = self._began_s = began_s
        self.answers: list[Answer] = []

    def ask(self, drawing: Drawing, room: int) -> Ask:
        """Ask for the next turn."""
        self.pieces, self.asked_s = [], time.monotonic()
        self.seed = seed_of(drawing.seed, self.key, len(self.turns))
        sampling = Sampling(
            seed=self.seed,
            temperature=drawing.temperature,
            max_tokens=min(drawing.max_tokens, room),
            stop_tokens=drawing.stop_tokens,
            logprobs=0,
        )
        return Ask(prompt=tuple(self.ids), sampling=sampling)

    def turn(self, version: int) -> Turn:
        """Return the turn that the engine has ended."""
        finish = self.pieces[-1].finish
        assert finish is not None, "a turn that is read has ended"
        drawn = [told for piece in self.pieces for told in piece.logprobs]
        return Turn(
            tokens=tuple(token for piece in self.pieces for token in piece.tokens),
            logprobs=tuple(told.logprob for told in drawn),
            finish=finish,
            version=version,
            seed=self.seed,
            cached_tokens=self.pieces[0].cached_tokens,
            began_s=self.asked_s - self._began_s,
            took_s=time.monotonic() - self.asked_s,
        )

    def take(self, turn: Turn, observation: tuple[int, ...] = ()) -> None:
        """Go on by a turn and what was said to it."""
        self.turns.append(msgspec.structs.replace(turn, observation=observation))
        self.ids += [*turn.tokens, *observation]

    def rollout(self) -> Rollout:
        """Return what it came to; waits for verdicts, each of which has its own deadline."""
        assert self.ending is not None, "a rollout that is read has ended"
        parts = (
            each if isinstance(each, RewardPart) else each.result() for each in self.rewards
        )  # fmt: skip
        return Rollout(
            key=self.key,
            prompt=self.prompt,
            turns=tuple(self.turns),
            rewards=tuple(parts),
            ending=self.ending,
            error=self.error,
        )


class Generator:
    """Draws rollouts; used by the thread that takes the engine's turns."""

    def __init__(
        self, engine: "Engine", environment: Environment, pool: VerifierPool, drawing: Drawing
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
        yield from _Round(self, version).run(keys)


def grouped(keys: Sequence[Key], drawn: Iterable[Rollout], samples: int) -> list[Group]:
    """Put rollouts into the order of their keys, and into groups."""
    found = {rollout.key: rollout for rollout in drawn}
    return [
        tuple(found[key] for key in keys[place : place + samples])
        for place in range(0, len(keys), samples)
    ]


class _Round:
    """One call of `rollouts`."""

    def __init__(self, generator: Generator, version: int) -> None:
        self._engine, self._pool = generator.engine, generator.pool
        self._environment, self._drawing = generator.environment, generator.drawing
        self._version, self._running = version, dict[Key, _Running]()
        self._ended: list[_Running] = []
        drawing = generator.drawing
        self._stepping = Stepping(
            self._environment.name,
            threads=drawing.threads if self._environment.waits else 0,
            step_s=drawing.step_s,
        )

    def run(self, keys: Sequence[Key]) -> Iterator[Rollout]:
        """Draw all of them."""
        began_s = time.monotonic()
        try:
            for key in keys:
                self._running[key] = _Running(key, self._environment, began_s)
                self._ask(self._running[key])
            while not self._engine.is_idle or self._stepping.busy:
                self._engine.turn()
                for sink, piece in self._engine.outbox():
                    sink(piece)
                self._hear()
                yield from self._ready(wait=False)
            yield from self._ready(wait=True)
        finally:
            self._stepping.close()
            self._cancel()

    def _ask(self, running: _Running) -> None:
        room = self._engine.max_length - len(running.ids)
        if room <= 0:
            self._end(running, "length")
            return
        ask = running.ask(self._drawing, room)
        running.answers = self._engine.add(ask, partial(self._take, running))

    def _take(self, running: _Running, piece: Piece) -> None:
        """Take a piece of a turn; its last one goes to the environment."""
        running.pieces.append(piece)
        if piece.finish is None:
            return
        turn = running.turn(self._version)
        if turn.finish in ("error", "cancelled"):
            running.error = piece.error or f"the answer was {turn.finish}"
            running.take(turn)
            self._end(running, "error")
            return
        self._stepping.submit(running.key, running.episode, turn)

    def _hear(self) -> None:
        """Take what environments said; wait for one where there is nothing else to do."""
        wanted: list[tuple[_Running, Check]] = []
        while said := self._stepping.next(wait=self._engine.is_idle and not wanted):
            running, reply = self._running[said.key], said.reply
            running.rewards += reply.rewards
            wanted += [(running, check) for check in reply.checks]
            last = reply.done or len(running.turns) + 1 >= self._drawing.max_turns
            running.take(said.turn, () if last else reply.observation)
            if not last:
                self._ask(running)
            elif said.turn.finish == "length":
                self._end(running, "length")
            else:
                self._end(running, "done" if reply.done else "turns")
        # All at once: a message for each would cost more than most judgements.
        verdicts = self._pool.submit([check for _, check in wanted])
        for (running, _), verdict in zip(wanted, verdicts, strict=True):
            running.rewards.append(verdict)

    def _end(self, running: _Running, ending: Ending) -> None:
        running.ending = ending
        self._ended.append(running)

    def _ready(self, *, wait: bool) -> Iterator[Rollout]:
        ended, self._ended = self._ended, []
        for running in ended:
            pending = (each for each in running.rewards if isinstance(each, Future))
            if wait or all(each.done() for each in pending):
                yield running.rollout()
            else:
                self._ended.append(running)

    def _cancel(self) -> None:
        """Leave the engine idle, also where an error or the caller broke this off."""
        for running in self._running.values():
            self._engine.cancel(running.answers)
        while not self._engine.is_idle:
            self._engine.turn()
        self._engine.outbox()
