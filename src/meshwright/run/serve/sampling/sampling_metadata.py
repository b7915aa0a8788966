"""What the lines of a step's logits need, and which asks are refused."""

from typing import NamedTuple

import torch

from meshwright.errors import Problem
from meshwright.run.kernels.sampling.row_params import LogitRows
from meshwright.run.serve.sampling_params import SamplingParams

# A temperature this low is 0 to float32 logits, and would divide by next to nothing.
MIN_TEMPERATURE = 1e-5


class LogitEdits(NamedTuple):
    """Single logits that a step changes: those with a bias, or banned until enough was said."""

    logit_rows: torch.Tensor
    token_ids: torch.Tensor
    bias: torch.Tensor | None
    """None where tokens are only banned."""
    until_position: torch.Tensor
    """The position up to which the token is banned."""


class PenaltyRows(NamedTuple):
    """Lines of rows that have penalties."""

    logit_rows: torch.Tensor
    count_slots: torch.Tensor
    draft_pairs: tuple[torch.Tensor, torch.Tensor] | None
    """Pairs (index into `logit_rows`, line whose input token came before it), for proposed
    tokens."""


class SamplingMetadata(NamedTuple):
    """What the lines of a step's logits need; made by `TokenSampler.build_metadata`."""

    logit_rows: LogitRows
    row_ends: tuple[int, ...]
    """Where the lines of each row end."""
    truncates: bool
    """Some line has a top-k, top-p or min-p."""
    logit_edits: LogitEdits | None
    penalty_rows: PenaltyRows | None
    logprob_rows: tuple[int, ...]
    """Lines whose log-probabilities are asked for."""
    logprob_rows_index: torch.Tensor | None
    """The same on the device."""
    max_top_logprobs: int
    """The most alternatives that one of them asks for."""


def find_sampling_problems(sampling: SamplingParams, vocab: int) -> list[Problem]:
    """Say what of a request's settings cannot be done for a model of so many tokens."""
    problems = []
    for name, tokens in (
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        wrong = [token for token in tokens if not 0 <= token < vocab]
        if wrong:
            fix = f"use ids from 0 to {vocab - 1}"
            problems.append(Problem(name, f"{wrong[0]} is no token of this model", fix))
    if sampling.structured_outputs is not None and sampling.min_tokens:
        what = "min_tokens and a grammar: what the grammar ends cannot go on"
        problems.append(Problem("min_tokens", what, "leave one of the two out"))
    return problems


def truncates_distribution(sampling: SamplingParams) -> bool:
    """Say whether some tokens are left out of the draw."""
    cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return cut and sampling.temperature > MIN_TEMPERATURE


def uses_penalties(sampling: SamplingParams) -> bool:
    """Say whether tokens have to be counted."""
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
