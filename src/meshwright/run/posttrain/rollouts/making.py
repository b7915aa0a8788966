"""`Making`: a rollout in the making, from its prompt to its verdicts."""

import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import msgspec

from meshwright.run.posttrain.rollouts.drawing import Drawing
from meshwright.run.posttrain.rollouts.environment import Environment
from meshwright.run.posttrain.rollouts.record import Ending, Key, RewardPart, Rollout, Turn
from meshwright.run.posttrain.rollouts.seeds import seed_of
from meshwright.run.serve.asked import Ask, Finish, Piece, Sampling

FAILED: tuple[Finish, ...] = ("error", "cancelled")
"""How a turn ends that no environment hears."""


class Making:
    """Grows by turns until it has ended and is judged."""

    def __init__(
        self,
        key: Key,
        environment: Environment,
        began_s: float,
        version: int,
        known: Rollout | None = None,
    ) -> None:
        """Begin an episode; turns that are `known` of it are not drawn again."""
        self.key, self.episode = key, environment.reset(key.prompt)
        self.prompt = tuple(self.episode.prompt)
        self.ids = list(self.prompt)
        self.turns: list[Turn] = []
        self.rewards: list[RewardPart | Future[RewardPart]] = []
        self.ending: Ending | None = None
        self.error, self.seed = "", 0
        self.pieces: list[Piece] = []
        self.renewals: list[tuple[int, int]] = []
        self.version = version
        """Of the weights that began its turn."""
        self.asked_s = self._began_s = began_s
        self.answers: list[Any] = []
        """What the engine has of it; none between turns."""
        self.known: deque[Turn] = deque()
        """Turns that were drawn before and that its episode still has to hear."""
        if known is not None and known.prompt == self.prompt:
            self.known += [each for each in known.turns if each.finish not in FAILED]

    def begin_turn(self, version: int) -> None:
        """Begin the next turn, by weights of a version."""
        self.pieces, self.renewals, self.version = [], [], version
        self.asked_s = time.monotonic()

    def renew(self, version: int) -> None:
        """Let other weights draw the rest of the turn."""
        drawn = sum(len(piece.tokens) for piece in self.pieces)
        if drawn:
            self.renewals.append((drawn, version))
        else:
            self.version = version

    def ask(self, drawing: Drawing, room: int) -> Ask:
        """Ask for the turn, or for the rest of it."""
        drawn = [token for piece in self.pieces for token in piece.tokens]
        seed = seed_of(drawing.seed, self.key, len(self.turns), len(self.renewals))
        if not self.renewals:
            self.seed = seed
        sampling = Sampling(
            seed=seed,
            temperature=drawing.temperature,
            max_tokens=min(drawing.max_tokens, room) - len(drawn),
            stop_tokens=drawing.stop_tokens,
            logprobs=0,
        )
        return Ask(prompt=(*self.ids, *drawn), sampling=sampling, near=self.key.prompt)

    def turn(self) -> Turn:
        """Return the turn that the engine has ended."""
        finish = self.pieces[-1].finish
        assert finish is not None, "a turn that is read has ended"
        drawn = [told for piece in self.pieces for told in piece.logprobs]
        return Turn(
            tokens=tuple(token for piece in self.pieces for token in piece.tokens),
            logprobs=tuple(told.logprob for told in drawn),
            finish=finish,
            version=self.version,
            renewals=tuple(self.renewals),
            seed=self.seed,
            cached_tokens=self.pieces[0].cached_tokens,
            began_s=self.asked_s - self._began_s,
            took_s=time.monotonic() - self.asked_s,
        )

    def take(self, turn: Turn, observation: tuple[int, ...] = ()) -> None:
        """Go on by a turn and what was said to it."""
        if observation != turn.observation:
            self.known.clear()  # they answer something else
        self.turns.append(msgspec.structs.replace(turn, observation=observation))
        self.ids += [*turn.tokens, *observation]

    @property
    def unjudged(self) -> list[Future[RewardPart]]:
        """Verdicts that are still to come."""
        return [each for each in self.rewards if isinstance(each, Future) and not each.done()]

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
