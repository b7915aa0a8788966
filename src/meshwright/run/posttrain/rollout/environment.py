"""`Environment`: what a model is asked, and what is said to its answers, all of it in tokens.

An environment is reset for a prompt and gives an `Episode`, which hears each turn of the model and
says what follows: more tokens, or the end with a reward. Tokens of the model are handed on as the
engine drew them, and an episode only ever adds to them. So the next prompt extends the last one
exactly, and no text is turned into tokens twice.

Episodes that wait for something are stepped in threads beside the engine. What may hang, such as a
tool, belongs into a verifier's process: into `EnvironmentStep.verifier_jobs` where it only judges,
and through `VerifierPool.verify` inside `step` where the model is to hear of it.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.rollout.reward_component import RewardComponent
from meshwright.run.posttrain.rollout.rollout import RolloutTurn
from meshwright.run.posttrain.rollout.verifiers.verifier_job import VerifierJob

DatasetPart = Literal["train", "held-out"]
"""The prompts that are trained on, or those that only evaluate."""


class EnvironmentStep(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode says to a turn."""

    observation: tuple[int, ...] = ()
    """Tokens that the model reads next; it did not draw them, and is not trained on them."""
    done: bool = False
    rewards: tuple[RewardComponent, ...] = ()
    """Parts of the reward that are known already."""
    verifier_jobs: tuple[VerifierJob, ...] = ()
    """Parts that verifiers are to judge."""

    def __post_init__(self) -> None:
        if not self.done and not self.observation:
            what = "goes on, but says nothing that the model could answer"
            raise InputError([Problem("reply", what, "give an observation, or say done")])


class Episode(Protocol):
    """One conversation with a model; it is stepped by one thread at a time."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens that it begins with."""

    def step(self, turn: RolloutTurn, /) -> EnvironmentStep:
        """Hear what the model wrote, and say what follows."""


class Environment(Protocol):
    """Gives episodes; any thread may ask it for one."""

    @property
    def name(self) -> str:
        """What rollouts are recorded under."""

    @property
    def verifiers(self) -> Sequence[str]:
        """All that its checks may name."""

    @property
    def may_block(self) -> bool:
        """Whether a step may wait for something; if not, it is taken between two of the engine."""

    def reset(self, prompt: int, /) -> Episode:
        """Begin an episode for the prompt of a number: the same number always begins the same."""
