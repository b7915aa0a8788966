"""Supervised steps on right answers, before the first rollout.

A policy that is never right learns nothing from a reward of 0 or 1.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.rl.config.rl_config import WarmupConfig
from meshwright.run.posttrain.rollout.environment import Environment
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.layout import Layout

WARMUP_PROMPT_OFFSET = 1 << 40
"""The number of the first prompt that is shown: rollouts have others."""
Demonstrations = tuple[tuple[int, ...], tuple[int, ...]]


class DemonstrationSource(Protocol):
    """A task that knows right answers."""

    def demonstrations(self, prompts: Sequence[int], /) -> Iterator[Demonstrations]:
        """Return prompts with their right answers."""


def run_warmup(
    decoder: Decoder, layout: Layout, environment: Environment, settings: WarmupConfig
) -> list[float]:
    """Train on right answers; return the mean loss of each step, in nats for a token."""
    task, device = require_demonstrations(environment), decoder.embedding.weight.device
    rule = build_warmup_optimizer(settings)
    optimizer = make_optimizer(decoder.named_parameters(), layout, rule, total_steps=settings.steps)
    losses = []
    for step in range(settings.steps):
        tokens, labels = pad_pairs(build_warmup_pairs(task, step, settings), device)
        loss = decoder.loss(tokens, labels)
        mean = loss.total / loss.count
        mean.backward()  # type: ignore[no-untyped-call]
        optimizer.step(settings.lr)
        optimizer.zero_grad()
        losses.append(mean.detach())
    return torch.stack(losses).tolist() if losses else []


def require_demonstrations(environment: Environment) -> DemonstrationSource:
    """Return an environment that knows right answers; another is refused."""
    if not hasattr(environment, "demonstrations"):
        what = f"{environment.name} shows no right answers"
        raise InputError([Problem("warm_up.steps", what, "use 0, or begin from trained weights")])
    return cast(DemonstrationSource, environment)


def build_warmup_optimizer(settings: WarmupConfig) -> OptimizerConfig:
    """Return how weights are updated by these steps."""
    return OptimizerConfig(lr=settings.lr, schedule="constant", warmup_steps=0, weight_decay=0.0)


def build_warmup_pairs(
    task: DemonstrationSource, step: int, settings: WarmupConfig
) -> list[Demonstrations]:
    """Return what one step is trained on."""
    first = WARMUP_PROMPT_OFFSET + step * settings.answers
    return list(task.demonstrations(range(first, first + settings.answers)))


def pad_pairs(
    pairs: Sequence[Demonstrations], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, and for each the one that follows where that belongs to an answer."""
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs) - 1
    tokens = torch.zeros(len(pairs), longest, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    for row, (prompt, answer) in enumerate(pairs):
        ids = torch.tensor([*prompt, *answer])
        tokens[row, : len(ids) - 1] = ids[:-1]
        labels[row, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    return tokens.to(device), labels.to(device)
