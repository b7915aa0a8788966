"""`ActiveRollout`: a rollout in the making, from its prompt to its verdicts."""

import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import msgspec

from meshwright.run.posttrain.rollout.environment import Environment
from meshwright.run.posttrain.rollout.reward_component import RewardComponent
from meshwright.run.posttrain.rollout.rollout import (
    Rollout,
    RolloutEnd,
    RolloutKey,
    RolloutTurn,
)
from meshwright.run.posttrain.rollout.rollout_config import RolloutConfig
from meshwright.run.posttrain.rollout.seeds import derive_turn_seed
from meshwright.run.serve.request import FinishReason, Request, RequestOutput
from meshwright.run.serve.sampling_params import SamplingParams

FAILED: tuple[FinishReason, ...] = ("error", "abort")
"""How a turn ends that no environment hears."""


class ActiveRollout:
    """Grows by turns until it has ended and is judged."""

    def __init__(
        self,
        key: RolloutKey,
        environment: Environment,
        began_s: float,
        version: int,
        recorded_rollout: Rollout | None = None,
    ) -> None:
        """Begin an episode; turns that are `recorded_rollout` of it are not drawn again."""
        self.key, self.episode = key, environment.reset(key.prompt)
        self.prompt = tuple(self.episode.prompt)
        self.token_ids = list(self.prompt)
        self.turns: list[RolloutTurn] = []
        self.rewards: list[RewardComponent | Future[RewardComponent]] = []
        self.end_reason: RolloutEnd | None = None
        self.error, self.seed = "", 0
        self.outputs: list[RequestOutput] = []
        self.weight_updates: list[tuple[int, int]] = []
        self.version = version
        """Of the weights that began its turn."""
        self.submitted_s = self._began_s = began_s
        self.request_handles: list[Any] = []
        """What the engine has of it; none between turns."""
        self.recorded_rollout: deque[RolloutTurn] = deque()
        """Turns that were drawn before and that its episode still has to hear."""
        if recorded_rollout is not None and recorded_rollout.prompt == self.prompt:
            self.recorded_rollout += [
                each for each in recorded_rollout.turns if each.finish not in FAILED
            ]

    def begin_turn(self, version: int) -> None:
        """Begin the next turn, by weights of a version."""
        self.outputs, self.weight_updates, self.version = [], [], version
        self.submitted_s = time.monotonic()

    def update_weights(self, version: int) -> None:
        """Let other weights draw the rest of the turn."""
        drawn = sum(len(piece.token_ids) for piece in self.outputs)
        if drawn:
            self.weight_updates.append((drawn, version))
        else:
            self.version = version

    def build_request(self, drawing: RolloutConfig, room: int) -> Request:
        """Ask for the turn, or for the rest of it."""
        drawn = [token for piece in self.outputs for token in piece.token_ids]
        seed = derive_turn_seed(drawing.seed, self.key, len(self.turns), len(self.weight_updates))
        if not self.weight_updates:
            self.seed = seed
        sampling = SamplingParams(
            seed=seed,
            temperature=drawing.temperature,
            max_tokens=min(drawing.max_tokens, room) - len(drawn),
            stop_token_ids=drawing.stop_token_ids,
            logprobs=0,
        )
        return Request(
            prompt_token_ids=(*self.token_ids, *drawn),
            sampling_params=sampling,
            routing_group=self.key.prompt,
        )

    def finish_turn(self) -> RolloutTurn:
        """Return the turn that the engine has ended."""
        finish = self.outputs[-1].finish_reason
        assert finish is not None, "a turn that is read has ended"
        drawn = [told for piece in self.outputs for told in piece.logprobs]
        return RolloutTurn(
            tokens=tuple(token for piece in self.outputs for token in piece.token_ids),
            logprobs=tuple(told.logprob for told in drawn),
            finish=finish,
            version=self.version,
            weight_updates=tuple(self.weight_updates),
            seed=self.seed,
            cached_tokens=self.outputs[0].cached_tokens,
            start_s=self.submitted_s - self._began_s,
            duration_s=time.monotonic() - self.submitted_s,
        )

    def add_turn(self, turn: RolloutTurn, observation: tuple[int, ...] = ()) -> None:
        """Go on by a turn and what was said to it."""
        if observation != turn.observation:
            self.recorded_rollout.clear()  # they answer something else
        self.turns.append(msgspec.structs.replace(turn, observation=observation))
        self.token_ids += [*turn.tokens, *observation]

    @property
    def pending_rewards(self) -> list[Future[RewardComponent]]:
        """Verdicts that are still to come."""
        return [each for each in self.rewards if isinstance(each, Future) and not each.done()]

    def to_rollout(self) -> Rollout:
        """Return what it came to; waits for verdicts, each of which has its own deadline."""
        assert self.end_reason is not None, "a rollout that is read has ended"
        parts = (
            each if isinstance(each, RewardComponent) else each.result() for each in self.rewards
        )  # fmt: skip
        return Rollout(
            key=self.key,
            prompt=self.prompt,
            turns=tuple(self.turns),
            rewards=tuple(parts),
            ending=self.end_reason,
            error=self.error,
        )
