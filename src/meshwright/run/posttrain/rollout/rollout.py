"""`Rollout`: one sampled answer with all that training needs of it, and where its reward came from.

Tokens and log-probabilities are those the engine drew: nothing here turns text into tokens, so a
rollout that is read again is the one that was sampled. What an environment said in between stands
beside the turns, and is left out of the loss.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.rollout.reward_component import RewardComponent
from meshwright.run.posttrain.rollout.verifiers.verifier_outcome import MAX_REWARD
from meshwright.run.serve.request import FinishReason

RolloutEnd = Literal["finished", "length", "max_turns", "error"]
"""The environment said so; no room for more tokens; no turns left; the engine failed."""

_ROUNDING = 1e-3  # a token of probability one may come out this far above 0 in small formats


class RolloutTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model wrote at one go, and what the environment said to it."""

    tokens: tuple[int, ...]
    """Drawn by the engine, with the token that ended the turn."""
    logprobs: tuple[float, ...]
    """Of each token, as the engine knew it when it drew."""
    finish: FinishReason
    version: int
    """The weights that drew these tokens, or the first of them."""
    seed: int
    weight_updates: tuple[tuple[int, int], ...] = ()
    """Where newer weights took over: places among the tokens, and the versions."""
    observation: tuple[int, ...] = ()
    """Tokens that follow and were not drawn."""
    cached_tokens: int = 0
    """Tokens before the turn that were not computed anew."""
    start_s: float = 0.0
    """Seconds since the generation began, when the turn was asked for."""
    duration_s: float = 0.0


class RolloutKey(msgspec.Struct, frozen=True, order=True):
    """Which rollout it is: one key is drawn once; all of its numbers count from 0."""

    step: int
    prompt: int
    sample: int

    def __str__(self) -> str:
        # People count steps from 1: so do the rows of a run, and all it says.
        return f"step {self.step + 1}, prompt {self.prompt}, sample {self.sample}"

    @property
    def label(self) -> str:
        """As it stands in a file of rollouts, where somebody may look for it."""
        return msgspec.json.encode(self).decode()


class Rollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer, from its prompt to its reward."""

    key: RolloutKey
    prompt: tuple[int, ...]
    turns: tuple[RolloutTurn, ...]
    rewards: tuple[RewardComponent, ...]
    ending: RolloutEnd
    error: str = ""
    """What the engine said, where the ending is an error."""

    def __post_init__(self) -> None:
        problems = list(_faults(self))
        if problems:
            raise InputError(problems)

    @property
    def reward(self) -> float:
        """The sum of the parts by their weights."""
        return math.fsum(part.weight * part.value for part in self.rewards)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens in their order: the prompt, then each turn and what was said to it."""
        parts = (token for turn in self.turns for token in (*turn.tokens, *turn.observation))
        return (*self.prompt, *parts)

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """For each of `tokens`, whether the model drew it."""
        drawn = [False] * len(self.prompt)
        for turn in self.turns:
            drawn += [True] * len(turn.tokens) + [False] * len(turn.observation)
        return tuple(drawn)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """For each of `tokens` the sampler's log-probability; 0 where it drew none."""
        told = [0.0] * len(self.prompt)
        for turn in self.turns:
            told += [*turn.logprobs, *[0.0] * len(turn.observation)]
        return tuple(told)

    @property
    def sampled_token_count(self) -> int:
        """Tokens that the model drew."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def versions(self) -> tuple[int, ...]:
        """The oldest and the newest weights that took part; none where there is no turn."""
        versions = sorted(
            version
            for turn in self.turns
            for version in (turn.version, *(newer for _, newer in turn.weight_updates))
        )
        return (versions[0], versions[-1]) if versions else ()

    @property
    def has_reward(self) -> bool:
        """Whether every verifier gave a score, so that the reward means something."""
        return self.ending != "error" and all(part.has_reward for part in self.rewards)


def average_reward_components(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each part of rewards by its name, where there are several parts.

    Weights are left out, and so are rollouts that nobody judged.
    """
    values: dict[str, list[float]] = {}
    for each in rollouts:
        for part in each.rewards if each.has_reward else ():
            values.setdefault(part.name, []).append(part.value)
    if len(values) < 2:
        return {}
    return {f"reward_{name}_mean": sum(found) / len(found) for name, found in values.items()}


def _faults(rollout: Rollout) -> Iterator[Problem]:
    where = f"rollout ({rollout.key})"
    if not rollout.prompt:
        yield Problem(f"{where}: prompt", "holds no token", "give at least one")
    for place, turn in enumerate(rollout.turns):
        at = f"{where}: turns[{place}]"
        if len(turn.tokens) != len(turn.logprobs):
            what = f"{len(turn.logprobs)} log-probabilities for {len(turn.tokens)} tokens"
            yield Problem(at, what, "record what the engine told of each token it drew")
        if not all(math.isfinite(value) and value <= _ROUNDING for value in turn.logprobs):
            what = "has log-probabilities that are no finite numbers up to 0"
            yield Problem(at, what, "look for NaN or infinite logits in the model")
    # A NaN would pass through means and advantages into every weight.
    wrong = [part for part in rollout.rewards if not _counts(part.weight * part.value)]
    for part in wrong:
        what = f"{part.value} × {part.weight} is no finite number of 32 bits"
        yield Problem(f"{where}: reward {part.name}", what, "mend the verifier")
    if not wrong and not _counts(rollout.reward):
        what = f"its parts add up to {rollout.reward:g}, which is no finite number of 32 bits"
        yield Problem(f"{where}: rewards", what, "mend the verifiers, or give them lower weights")


def _counts(reward: float) -> bool:
    """Tell whether a reward is a number that training can count with."""
    return abs(reward) <= MAX_REWARD
