"""Supervised steps on right answers, before the first rollout.

A policy that is never right learns nothing from a reward of 0 or 1.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.labels import IGNORED
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.loop.settings import WarmUpSettings
from meshwright.run.posttrain.rollouts.environment import Environment
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.spec.layout import Layout

FIRST = 1 << 40
"""The number of the first prompt that is shown: rollouts have others."""
Shown = tuple[tuple[int, ...], tuple[int, ...]]


class Shows(Protocol):
    """A task that knows right answers."""

    def shown(self, prompts: Sequence[int], /) -> Iterator[Shown]:
        """Return prompts with their right answers."""


def warm_up(
    decoder: Decoder, layout: Layout, environment: Environment, settings: WarmUpSettings
) -> list[float]:
    """Train on right answers; return the mean loss of each step, in nats for a token."""
    task, device = shows(environment), decoder.embedding.weight.device
    rule = rule_of(settings)
    optimizer = make_optimizer(decoder.named_parameters(), layout, rule, total_steps=settings.steps)
    losses = []
    for step in range(settings.steps):
        tokens, labels = padded_rows(pairs_of(task, step, settings), device)
        loss = decoder.loss(tokens, labels)
        mean = loss.total / loss.count
        mean.backward()  # type: ignore[no-untyped-call]
        optimizer.step(settings.lr)
        optimizer.zero_grad()
        losses.append(mean.detach())
    return torch.stack(losses).tolist() if losses else []


def shows(environment: Environment) -> Shows:
    """Return an environment that knows right answers; another is refused."""
    if not hasattr(environment, "shown"):
        what = f"{environment.name} shows no right answers"
        raise InputError([Problem("warm_up.steps", what, "use 0, or begin from trained weights")])
    return cast(Shows, environment)


def rule_of(settings: WarmUpSettings) -> OptimizerSettings:
    """Return how weights are updated by these steps."""
    return OptimizerSettings(lr=settings.lr, schedule="constant", warmup_steps=0, decay=0.0)


def pairs_of(task: Shows, step: int, settings: WarmUpSettings) -> list[Shown]:
    """Return what one step is trained on."""
    first = FIRST + step * settings.answers
    return list(task.shown(range(first, first + settings.answers)))


def padded_rows(pairs: Sequence[Shown], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, and for each the one that follows where that belongs to an answer."""
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs) - 1
    tokens = torch.zeros(len(pairs), longest, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        ids = torch.tensor([*prompt, *answer])
        tokens[row, : len(ids) - 1] = ids[:-1]
        labels[row, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    return tokens.to(device), labels.to(device)
