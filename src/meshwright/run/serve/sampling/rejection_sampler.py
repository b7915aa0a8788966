"""Several tokens a step: some are proposed cheaply, the model checks all of them in one pass.

What comes out has exactly the distribution that drawing token by token has, for any proposals.
There are two ways to check, and a row takes the one that fits it:

same noise: the model's own token is drawn at each place as always, and a proposal is taken where it
    is that token. So a request gets the very tokens it would get without proposals, which is what a
    seed promises, and what greedy means. Where proposals are not drawn by chance (looked up, say)
    none are lost by it. A draft model that draws with the same noise often draws the same tokens
    (Daliri, Musco, Suresh 2024, "Coupling without communication and drafter-invariant speculative
    decoding").
rejection: a proposal of probability q is taken with probability min(1, p / q), else a token is
    drawn from what p has more than q (Leviathan, Kalman, Matias 2023; Chen et al. 2023). It takes
    the most proposals that any way can, and needs the draft's whole distribution.

A step: the row's lines of logits follow its last token and then each proposal, so it has one line
more than proposals:

    drafts = propose_with_model(draft, sampler, lines, last_R, 4)    or those of `NgramProposer`
    lines = sampler.build_metadata(rows, widths=[5] * len(rows))
    verified = verify_draft_tokens(sampler, logits_LV, lines, inputs_L)     counts accepted ones

Penalties, biases, `min_tokens` and grammars hold at every line; none of them is dropped.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from meshwright.run.kernels.sampling.gumbel_noise import (
    REPLACED,
    TAKEN,
    derive_noise_keys_reference,
    gumbel_noise_reference,
    uniform_noise_reference,
)
from meshwright.run.kernels.sampling.row_params import LogitRows
from meshwright.run.serve.sampling.sampled_logprobs import (
    SampledLogprobs,
    copy_raw_logits,
    gather_logprobs,
)
from meshwright.run.serve.sampling.sampler import TokenSampler
from meshwright.run.serve.sampling.sampling_metadata import SamplingMetadata


class DraftTokens(NamedTuple):
    """Tokens proposed for rows, and how they were drawn."""

    token_ids: torch.Tensor
    """Of shape (rows, proposals)."""
    draft_probs: torch.Tensor | None
    """The distributions they were drawn from; None where only the same noise will be used."""


class VerifiedTokens(NamedTuple):
    """What a step of proposals came to."""

    token_ids: torch.Tensor
    """A token for each line; those that are kept are the row's next ones, in order."""
    is_accepted: torch.Tensor
    """True for the first lines of each row, one at least."""
    logprobs: SampledLogprobs | None


def verify_draft_tokens(
    sampler: TokenSampler,
    logits_LV: torch.Tensor,
    lines: SamplingMetadata,
    inputs_L: torch.Tensor,
    *,
    chances_LV: torch.Tensor | None = None,
    mask_LW: torch.Tensor | None = None,
) -> VerifiedTokens:
    """Draw the tokens of a step with proposals, and count those that are kept.

    Args:
        sampler: Of the engine.
        logits_LV: Of the model, at the lines that `sampler.build_metadata` was given.
        lines: From `sampler.build_metadata`.
        inputs_L: The tokens fed at these lines: a row's last token, then its proposals.
        chances_LV: At each line that a proposal follows, the distribution that the proposal was
            drawn from. Without it the same noise decides for all; with it, for rows with a seed.
        mask_LW: What grammars allow at each line.
    """
    follows_L = torch.roll(lines.logit_rows.offsets, -1) > 0
    proposed_L = torch.roll(inputs_L.to(torch.int64), -1).where(follows_L, -1)
    raw_TV = copy_raw_logits(logits_LV, lines)
    changed_LV = sampler.process_logits(logits_LV, lines, inputs_L=inputs_L, mask_LW=mask_LW)
    tokens_L = sampler.pick_tokens(changed_LV, lines)
    taken_L = tokens_L == proposed_L
    if chances_LV is not None:
        rows_L, settings = lines.logit_rows.rows, sampler.row_params
        by_chance_L = (
            follows_L & (settings.has_seed[rows_L] == 0) & (settings.temperature[rows_L] > 0)
        )
        by_chance_L &= tokens_L >= 0
        replaced_L, luck_L = _rejected(sampler, changed_LV, lines, proposed_L, chances_LV)
        taken_L = torch.where(by_chance_L, luck_L, taken_L)
        tokens_L = torch.where(by_chance_L, proposed_L.where(luck_L, replaced_L), tokens_L)
    # Lost proposals before a line, over all rows; the same as at its row's first line: none of it.
    lost_L = (~taken_L).to(torch.int64)
    before_L = lost_L.cumsum(0) - lost_L
    first_L = torch.arange(len(lost_L), device=lost_L.device) - lines.logit_rows.offsets
    kept_L = before_L == before_L[first_L]
    sampler.count_accepted(lines, tokens_L, kept_L)
    return VerifiedTokens(tokens_L, kept_L, gather_logprobs(raw_TV, lines, tokens_L))


def _rejected(
    sampler: TokenSampler,
    changed_LV: torch.Tensor,
    lines: SamplingMetadata,
    proposed_L: torch.Tensor,
    chances_LV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token that replaces each proposal, and whether the proposal is taken."""
    settings, places = sampler.row_params, lines.logit_rows
    wanted_LV = sampler.compute_probs(changed_LV, lines)
    index_L1 = proposed_L.clamp(min=0)[:, None]
    p_L, q_L = (each.gather(1, index_L1).squeeze(1) for each in (wanted_LV, chances_LV))
    position_L = settings.num_sampled[places.rows] + places.offsets
    seed_L = settings.seed[places.rows]
    uniform_L = uniform_noise_reference(
        derive_noise_keys_reference(seed_L, position_L, TAKEN), torch.zeros_like(position_L)
    )
    left_LV = (wanted_LV - chances_LV).clamp(min=0)
    # Where both are the same nothing is left, and a proposal is lost to rounding at most.
    left_LV = torch.where(left_LV.sum(1, keepdim=True) > 0, left_LV, wanted_LV)
    first_L, second_L = derive_noise_keys_reference(seed_L, position_L, REPLACED)
    tokens_V = torch.arange(left_LV.shape[1], device=left_LV.device)
    noise_LV = gumbel_noise_reference((first_L[:, None], second_L[:, None]), tokens_V)
    return (left_LV.log() + noise_LV).argmax(1), uniform_L * q_L < p_L


def propose_with_model(
    next_logits: Callable[[torch.Tensor, int], torch.Tensor],
    sampler: TokenSampler,
    lines: SamplingMetadata,
    last_R: torch.Tensor,
    most: int,
    *,
    chances: bool = False,
) -> DraftTokens:
    """Let a draft model propose `most` tokens for each row, one after the other.

    Args:
        next_logits: Feeds a token to each row of the draft model and returns what it says follows;
            also told how many proposals came before.
        sampler: Of the engine; it draws with the noise of the tokens to come.
        lines: From `sampler.build_metadata` of these rows, one line each.
        last_R: The last token of each row.
        most: How many to propose.
        chances: Keep the distributions: needed for rejection, rows · most · vocabulary numbers.
    """
    tokens, drawn_from, token_R = [], [], last_R
    for ahead in range(most):
        # Any distribution will do for proposals, so penalties and the like are left out.
        places = LogitRows(lines.logit_rows.rows, lines.logit_rows.offsets + ahead)
        bare = lines._replace(logit_rows=places, logit_edits=None, penalty_rows=None)
        logits_RV = next_logits(token_R, ahead)
        token_R = sampler.pick_tokens(logits_RV, bare).clamp(min=0)
        tokens.append(token_R)
        if chances:
            drawn_from.append(sampler.compute_probs(logits_RV, bare))
    return DraftTokens(torch.stack(tokens, 1), torch.stack(drawn_from, 1) if chances else None)
