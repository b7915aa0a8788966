"""Proposals change how fast tokens come, and never which ones or how likely they are."""

import pytest

pytest.importorskip("torch", reason="sampling works on torch tensors")

import torch

from meshwright.run.serve.sampling.rejection_sampler import propose_with_model, verify_draft_tokens
from meshwright.run.serve.sampling.sampler import TokenSampler
from meshwright.run.serve.sampling_params import GREEDY, SamplingParams
from tests.run.serve.sampling.goodness import LIMIT, deviation

VOCAB = 6


def follows(seed: int, *, scale: float = 1.5) -> torch.Tensor:
    """Return logits of a model whose next token depends on the last one alone."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, VOCAB, generator=source) * scale


TARGET, DRAFT = follows(1), follows(1) + follows(2, scale=0.7)


def sampler(asked: SamplingParams, rows: int) -> TokenSampler:
    one = TokenSampler(rows, VOCAB, "cpu")
    for row in range(rows):
        each = (
            asked
            if asked.seed is None
            else SamplingParams(
                temperature=asked.temperature,
                top_k=asked.top_k,
                frequency_penalty=asked.frequency_penalty,
                logit_bias=asked.logit_bias,
                seed=asked.seed + row,
            )
        )
        one.add_row(row, each, (0,))
        if asked.seed is None:
            # Repeatable, and still not asked for.
            one._wholes[row, 1] = 7919 * row + 1
    return one


def one_by_one(asked: SamplingParams, rows: int, length: int) -> torch.Tensor:
    one, last, tokens = sampler(asked, rows), torch.zeros(rows, dtype=torch.int64), []
    for _ in range(length):
        last = one.sample(TARGET[last], one.build_metadata(range(rows))).token_ids
        tokens.append(last)
    return torch.stack(tokens, 1)


def with_proposals(
    asked: SamplingParams,
    rows: int,
    length: int,
    *,
    most: int = 3,
    chances: bool = False,
    wrong: int = 0,
) -> tuple[torch.Tensor, float]:
    """Return the first tokens of each row, and the share of proposals that were taken."""
    one = sampler(asked, rows)
    answers: list[list[int]] = [[] for _ in range(rows)]
    taken = offered = 0
    while min(len(answer) for answer in answers) < length:
        last = torch.tensor([answer[-1] if answer else 0 for answer in answers])
        proposals = propose_with_model(
            lambda tokens, _: DRAFT[tokens],
            one,
            one.build_metadata(range(rows)),
            last,
            most,
            chances=chances,
        )
        tokens = (proposals.token_ids + wrong) % VOCAB
        inputs = torch.cat([last[:, None], tokens], 1).flatten()
        chances_LV = None
        if proposals.draft_probs is not None:
            padded = torch.cat([proposals.draft_probs, torch.zeros(rows, 1, VOCAB)], 1)
            chances_LV = padded.flatten(0, 1)
        lines = one.build_metadata(range(rows), [most + 1] * rows)
        checked = verify_draft_tokens(one, TARGET[inputs], lines, inputs, chances_LV=chances_LV)
        kept = checked.is_accepted.view(rows, -1)
        assert bool(kept[:, 0].all())
        taken += int(kept[:, 1:].sum())
        offered += rows * most
        for row, (line, keep) in enumerate(
            zip(checked.token_ids.view(rows, -1).tolist(), kept.tolist(), strict=True)
        ):
            answers[row] += [token for token, good in zip(line, keep, strict=True) if good]
    return torch.tensor([answer[:length] for answer in answers]), taken / offered


@pytest.mark.parametrize(
    "asked",
    [
        GREEDY,
        SamplingParams(seed=4),
        SamplingParams(seed=5, temperature=0.6, top_k=4),
        SamplingParams(seed=6, frequency_penalty=1.0, logit_bias={2: -1.0}),
    ],
    ids=["greedy", "seed", "cut", "penalised"],
)
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("chances", [False, True])
def test_a_seed_and_greedy_give_the_tokens_they_give_without_proposals(
    asked: SamplingParams, wrong: int, chances: bool
) -> None:
    alone = one_by_one(asked, 20, 12)
    together, share = with_proposals(asked, 20, 12, wrong=wrong, chances=chances)
    assert together.equal(alone)
    if asked.seed is not None and not wrong:
        assert share > 0.2


def exact_pairs(temperature: float = 1.0) -> torch.Tensor:
    """Return the probabilities of the first three tokens together."""
    each = (TARGET / temperature).softmax(1)
    return torch.einsum("a,ab,bc->abc", each[0], each, each).flatten()


@pytest.mark.parametrize("chances", [False, True])
def test_tokens_have_the_distribution_they_have_without_proposals(chances: bool) -> None:
    tokens, _ = with_proposals(SamplingParams(), 3000, 3, chances=chances)
    cells = tokens @ torch.tensor([VOCAB * VOCAB, VOCAB, 1])
    assert deviation(cells, exact_pairs()) < LIMIT


def test_rejection_takes_as_many_as_any_way_can() -> None:
    q, p = DRAFT.softmax(1), TARGET.softmax(1)
    one = sampler(SamplingParams(), 3000)
    last = torch.zeros(3000, dtype=torch.int64)
    shares = []
    for chances in (True, False):
        proposals = propose_with_model(
            lambda tokens, _: DRAFT[tokens],
            one,
            one.build_metadata(range(3000)),
            last,
            1,
            chances=True,
        )
        inputs = torch.stack([last, proposals.token_ids[:, 0]], 1).flatten()
        given = q[inputs] if chances else None
        lines = one.build_metadata(range(3000), [2] * 3000)
        kept = verify_draft_tokens(
            one, TARGET[inputs], lines, inputs, chances_LV=given
        ).is_accepted.view(-1, 2)
        shares.append(float(kept[:, 1].float().mean()))
    overlap = float(torch.minimum(p[0], q[0]).sum())
    assert abs(shares[0] - overlap) < 0.04
    # The same noise takes at least this much of it (Daliri, Musco, Suresh 2024).
    assert shares[1] > overlap / (2 - overlap) - 0.04


def test_rows_may_have_different_numbers_of_proposals() -> None:
    one = sampler(GREEDY, 3)
    best = TARGET.argmax(1)
    first, second = int(best[0]), int(best[best[0]])
    wrong = (first + 1) % VOCAB
    inputs = torch.tensor([0, 0, first, second, 0, wrong, 3])
    checked = verify_draft_tokens(
        one, TARGET[inputs], one.build_metadata([0, 1, 2], [1, 3, 3]), inputs
    )
    assert checked.is_accepted.tolist() == [True, True, True, True, True, False, False]
    assert checked.token_ids[:4].tolist() == [first, first, second, int(best[second])]
    assert one.row_params.num_sampled.tolist() == [1, 3, 1]


def test_log_probabilities_are_told_for_each_line() -> None:
    one = TokenSampler(1, VOCAB, "cpu")
    one.add_row(0, SamplingParams(temperature=0, logprobs=1, logit_bias={1: 0.5}), (0,))
    inputs = torch.tensor([0, 2])
    checked = verify_draft_tokens(one, TARGET[inputs], one.build_metadata([0], [2]), inputs)
    assert checked.logprobs is not None
    exact = TARGET[inputs].log_softmax(1).gather(1, checked.token_ids[:, None]).squeeze(1)
    torch.testing.assert_close(checked.logprobs.token_logprobs, exact)
