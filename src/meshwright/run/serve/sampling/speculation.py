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

    proposals = by_model(draft, sampler, lines, last_R, 4)       or `lookup.PromptLookup`
    lines = sampler.plan(rows, widths=[5] * len(rows))
    checked = check(sampler, logits_LV, lines, inputs_L)         counts what was kept, too

Penalties, biases, `min_tokens` and grammars hold at every line; none of them is dropped.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from meshwright.run.serve.sampling.chance import (
    REPLACED,
    TAKEN,
    plain_draw_keys,
    plain_gumbel,
    plain_uniform,
)
from meshwright.run.serve.sampling.lines import Lines
from meshwright.run.serve.sampling.rows import Places
from meshwright.run.serve.sampling.sampler import Sampler
from meshwright.run.serve.sampling.telling import Told, raw_of, tell


class Proposals(NamedTuple):
    """Tokens proposed for rows, and how they were drawn."""

    tokens: torch.Tensor
    """Of shape (rows, proposals)."""
    chances: torch.Tensor | None
    """The distributions they were drawn from; None where only the same noise will be used."""


class Checked(NamedTuple):
    """What a step of proposals came to."""

    tokens: torch.Tensor
    """A token for each line; those that are kept are the row's next ones, in order."""
    kept: torch.Tensor
    """True for the first lines of each row, one at least."""
    told: Told | None


def check(
    sampler: Sampler,
    logits_LV: torch.Tensor,
    lines: Lines,
    inputs_L: torch.Tensor,
    *,
    chances_LV: torch.Tensor | None = None,
    mask_LW: torch.Tensor | None = None,
) -> Checked:
    """Draw the tokens of a step with proposals, and count those that are kept.

    Args:
        sampler: Of the engine.
        logits_LV: Of the model, at the lines that `sampler.plan` was told of.
        lines: From `sampler.plan`.
        inputs_L: The tokens fed at these lines: a row's last token, then its proposals.
        chances_LV: At each line that a proposal follows, the distribution that the proposal was
            drawn from. Without it the same noise decides for all; with it, for rows with a seed.
        mask_LW: What grammars allow at each line.
    """
    follows_L = torch.roll(lines.places.offsets, -1) > 0
    proposed_L = torch.roll(inputs_L.to(torch.int64), -1).where(follows_L, -1)
    raw_TV = raw_of(logits_LV, lines)
    changed_LV = sampler.changed(logits_LV, lines, inputs_L=inputs_L, mask_LW=mask_LW)
    tokens_L = sampler.chosen(changed_LV, lines)
    taken_L = tokens_L == proposed_L
    if chances_LV is not None:
        rows_L, settings = lines.places.rows, sampler.settings
        by_chance_L = (
            follows_L & (settings.seeded[rows_L] == 0) & (settings.temperature[rows_L] > 0)
        )
        by_chance_L &= tokens_L >= 0
        replaced_L, luck_L = _rejected(sampler, changed_LV, lines, proposed_L, chances_LV)
        taken_L = torch.where(by_chance_L, luck_L, taken_L)
        tokens_L = torch.where(by_chance_L, proposed_L.where(luck_L, replaced_L), tokens_L)
    # Lost proposals before a line, over all rows; the same as at its row's first line: none of it.
    lost_L = (~taken_L).to(torch.int64)
    before_L = lost_L.cumsum(0) - lost_L
    first_L = torch.arange(len(lost_L), device=lost_L.device) - lines.places.offsets
    kept_L = before_L == before_L[first_L]
    sampler.commit(lines, tokens_L, kept_L)
    return Checked(tokens_L, kept_L, tell(raw_TV, lines, tokens_L))


def _rejected(
    sampler: Sampler,
    changed_LV: torch.Tensor,
    lines: Lines,
    proposed_L: torch.Tensor,
    chances_LV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token that replaces each proposal, and whether the proposal is taken."""
    settings, places = sampler.settings, lines.places
    wanted_LV = sampler.probabilities(changed_LV, lines)
    index_L1 = proposed_L.clamp(min=0)[:, None]
    p_L, q_L = (each.gather(1, index_L1).squeeze(1) for each in (wanted_LV, chances_LV))
    position_L = settings.drawn[places.rows] + places.offsets
    seed_L = settings.seed[places.rows]
    uniform_L = plain_uniform(
        plain_draw_keys(seed_L, position_L, TAKEN), torch.zeros_like(position_L)
    )
    left_LV = (wanted_LV - chances_LV).clamp(min=0)
    # Where both are the same nothing is left, and a proposal is lost to rounding at most.
    left_LV = torch.where(left_LV.sum(1, keepdim=True) > 0, left_LV, wanted_LV)
    first_L, second_L = plain_draw_keys(seed_L, position_L, REPLACED)
    tokens_V = torch.arange(left_LV.shape[1], device=left_LV.device)
    noise_LV = plain_gumbel((first_L[:, None], second_L[:, None]), tokens_V)
    return (left_LV.log() + noise_LV).argmax(1), uniform_L * q_L < p_L


def by_model(
    next_logits: Callable[[torch.Tensor, int], torch.Tensor],
    sampler: Sampler,
    lines: Lines,
    last_R: torch.Tensor,
    most: int,
    *,
    chances: bool = False,
) -> Proposals:
    """Let a draft model propose `most` tokens for each row, one after the other.

    Args:
        next_logits: Feeds a token to each row of the draft model and returns what it says follows;
            also told how many proposals came before.
        sampler: Of the engine; it draws with the noise of the tokens to come.
        lines: From `sampler.plan` of these rows, one line each.
        last_R: The last token of each row.
        most: How many to propose.
        chances: Keep the distributions: needed for rejection, rows · most · vocabulary numbers.
    """
    tokens, drawn_from, token_R = [], [], last_R
    for ahead in range(most):
        # Any distribution will do for proposals, so penalties and the like are left out.
        places = Places(lines.places.rows, lines.places.offsets + ahead)
        bare = lines._replace(places=places, touched=None, penalised=None)
        logits_RV = next_logits(token_R, ahead)
        token_R = sampler.chosen(logits_RV, bare).clamp(min=0)
        tokens.append(token_R)
        if chances:
            drawn_from.append(sampler.probabilities(logits_RV, bare))
    return Proposals(torch.stack(tokens, 1), torch.stack(drawn_from, 1) if chances else None)
