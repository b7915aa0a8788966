"""What the lines of a step's logits need, and which asks are refused."""

from typing import NamedTuple

import torch

from meshwright.errors import Problem
from meshwright.run.serve.asked import Sampling
from meshwright.run.serve.sampling.rows import Places

# A temperature this low is 0 to float32 logits, and would divide by next to nothing.
COLD = 1e-5


class Touched(NamedTuple):
    """Single logits that a step changes: those with a bias, or banned until enough was said."""

    lines: torch.Tensor
    tokens: torch.Tensor
    bias: torch.Tensor | None
    """None where tokens are only banned."""
    until: torch.Tensor
    """The position up to which the token is banned."""


class Penalised(NamedTuple):
    """Lines of rows that have penalties."""

    lines: torch.Tensor
    slots: torch.Tensor
    proposed: tuple[torch.Tensor, torch.Tensor] | None
    """Pairs (index into `lines`, line whose input token came before it), for proposed tokens."""


class Lines(NamedTuple):
    """What the lines of a step's logits need; made by `Sampler.plan`."""

    places: Places
    ends: tuple[int, ...]
    """Where the lines of each row end."""
    cut: bool
    """Some line has a top-k, top-p or min-p."""
    touched: Touched | None
    penalised: Penalised | None
    told: tuple[int, ...]
    """Lines whose log-probabilities are asked for."""
    told_index: torch.Tensor | None
    """The same on the device."""
    top: int
    """The most alternatives that one of them asks for."""


def problems_of(sampling: Sampling, vocab: int) -> list[Problem]:
    """Say what of a request's settings cannot be done for a model of so many tokens."""
    problems = []
    for name, tokens in (
        ("logit_bias", sampling.logit_bias),
        ("stop_tokens", sampling.stop_tokens),
    ):
        wrong = [token for token in tokens if not 0 <= token < vocab]
        if wrong:
            fix = f"use ids from 0 to {vocab - 1}"
            problems.append(Problem(name, f"{wrong[0]} is no token of this model", fix))
    if sampling.grammar is not None and sampling.min_tokens:
        what = "min_tokens and a grammar: what the grammar ends cannot go on"
        problems.append(Problem("min_tokens", what, "leave one of the two out"))
    return problems


def is_cut(sampling: Sampling) -> bool:
    """Say whether some tokens are left out of the draw."""
    cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return cut and sampling.temperature > COLD


def is_penalised(sampling: Sampling) -> bool:
    """Say whether tokens have to be counted."""
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
