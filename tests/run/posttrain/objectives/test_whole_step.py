"""A step's loss and gradient are the same however it is cut up, padded, packed or shared out."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest

pytest.importorskip("torch", reason="objectives are functions of torch's tensors")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.run.posttrain.objectives import (
    importance_correction,
    kl_penalty,
    loss_weights,
    policy_loss,
    preference_loss,
    token_advantages,
)
from meshwright.run.posttrain.objectives.choices import CorrectionLevel, LossAggregation
from meshwright.run.posttrain.objectives.loss_weights import StepTotals
from meshwright.run.posttrain.objectives.masked_tokens import (
    MaskedTokens,
    packed_tokens,
    padded_tokens,
)

CONTEXTS, WORDS, LONGEST = 7, 5, 9


class Answer(NamedTuple):
    """A sequence: in which context each token is drawn, and everything known of it."""

    context: torch.Tensor
    word: torch.Tensor
    mask: torch.Tensor
    old: torch.Tensor
    sampled: torch.Tensor
    reference: torch.Tensor
    advantage: float


class Cut(NamedTuple):
    """A way through a step: which answers come together, and whether each lot is packed."""

    order: list[int]
    sizes: list[int]
    packed: list[bool]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Answer], Cut]:
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    answers = []
    for length in lengths:
        numbers = torch.randn(4, length, generator=generator, dtype=torch.float64)
        answers.append(
            Answer(
                torch.randint(CONTEXTS, (length,), generator=generator),
                torch.randint(WORDS, (length,), generator=generator),
                torch.rand(length, generator=generator) < 0.8,
                numbers[0] / 5 - 1.6,
                numbers[1] / 5 - 1.6,
                numbers[2] / 5 - 1.6,
                float(numbers[3, 0]),
            )
        )
    order = draw(st.permutations(range(len(answers))))
    sizes, left = [], len(answers)
    while left:
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    return answers, Cut(order, sizes, draw(st.lists(st.booleans(), min_size=7, max_size=7)))


class Lot(NamedTuple):
    """A microbatch."""

    tokens: MaskedTokens
    context: torch.Tensor
    word: torch.Tensor
    old: torch.Tensor
    sampled: torch.Tensor
    reference: torch.Tensor
    advantage: torch.Tensor


def lot(answers: list[Answer], *, packs: bool) -> Lot:
    """Lay answers out, with rubbish in the padding."""

    def laid(values: list[torch.Tensor], rubbish: float) -> torch.Tensor:
        if packs:
            return torch.cat(values)
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=rubbish)

    mask = laid([each.mask for each in answers], 0.0)
    tokens = (
        packed_tokens(mask, [len(each.mask) for each in answers]) if packs else padded_tokens(mask)
    )
    bad = float("nan")
    advantage = torch.tensor([each.advantage for each in answers], dtype=torch.float64)
    return Lot(
        tokens,
        laid([each.context for each in answers], 0),
        laid([each.word for each in answers], 0),
        laid([each.old for each in answers], bad),
        laid([each.sampled for each in answers], bad),
        laid([each.reference for each in answers], bad),
        tokens.broadcast_to_tokens(advantage),
    )


def lots(answers: list[Answer], cut: Cut) -> list[Lot]:
    out, order = [], list(cut.order)
    for size, packs in zip(cut.sizes, cut.packed, strict=False):
        out.append(lot([answers[i] for i in order[:size]], packs=packs))
        del order[:size]
    return out


Losses = Callable[[torch.Tensor, Lot], torch.Tensor]


def of_policy(kind: str) -> Losses:
    def losses(logp: torch.Tensor, part: Lot) -> torch.Tensor:
        given_ = (logp, part.old, part.advantage, part.tokens)
        if kind == "cispo":
            return policy_loss.cispo_loss(*given_, clip_ratio_high=0.5).losses
        if kind == "reinforce":
            return policy_loss.reinforce_loss(logp, part.advantage, part.tokens).losses
        level: policy_loss.RatioLevel = "sequence" if kind == "gspo" else "token"
        found = policy_loss.ppo_clip_loss(*given_, clip_ratio_high=0.28, level=level, most=3.0)
        if kind != "ppo and kl":
            return found.losses
        ratio = policy_loss.log_ratio(logp, part.old, part.tokens).exp()
        clean = part.tokens.zero_masked
        both = (clean(logp), clean(part.reference))
        return found.losses + kl_penalty.kl_loss(*both, strength=0.1, kind="k3", ratio=ratio)

    return losses


def step(
    parts: list[Lot],
    losses: Losses,
    mode: LossAggregation,
    span: CorrectionLevel,
) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of a table of logits, summed over microbatches."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(CONTEXTS, WORDS, generator=generator, dtype=torch.float64).requires_grad_()
    of = sum((loss_weights.sum_step_totals([part.tokens]) for part in parts), StepTotals(0, 0))
    total = 0.0
    for part in parts:
        logp = table.log_softmax(-1)[part.context, part.word]
        weight = loss_weights.compute_token_weights(
            part.tokens, of, mode, longest=LONGEST, dtype=torch.float64
        )
        weight = weight * importance_correction.truncated_importance_weights(
            part.old, part.sampled, part.tokens, span=span
        )
        loss = loss_weights.weighted_sum(losses(logp, part), weight)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    assert table.grad is not None
    return total, table.grad


@pytest.mark.parametrize("kind", ["ppo", "ppo and kl", "gspo", "cispo", "reinforce"])
@settings(max_examples=25)
@given(
    steps(),
    st.sampled_from(["token", "sequence", "constant"]),
    st.sampled_from(["token", "sequence", "mean"]),
)
def test_policy_losses_add_up(
    kind: str,
    drawn: tuple[list[Answer], Cut],
    mode: LossAggregation,
    span: CorrectionLevel,
) -> None:
    answers, cut = drawn
    loss, slope = step([lot(answers, packs=False)], of_policy(kind), mode, span)
    again, other = step(lots(answers, cut), of_policy(kind), mode, span)
    assert again == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(other, slope, atol=1e-6, rtol=0)


@given(steps(), st.sampled_from(["token", "sequence", "constant"]))
def test_weights_of_a_step_add_up_to_its_meaning(
    drawn: tuple[list[Answer], Cut], mode: LossAggregation
) -> None:
    answers, cut = drawn
    parts = lots(answers, cut)
    of = loss_weights.sum_step_totals(part.tokens for part in parts)
    found = sum(
        loss_weights.compute_token_weights(
            part.tokens, of, mode, longest=LONGEST, dtype=torch.float64
        )
        .sum()
        .item()
        for part in parts
    )
    counts = [int(each.mask.sum()) for each in answers]
    want = {
        "token": 1.0 if sum(counts) else 0.0,
        "sequence": sum(each > 0 for each in counts) / len(counts),
        "constant": sum(counts) / (LONGEST * len(counts)),
    }
    assert found == pytest.approx(want[mode])


@settings(max_examples=25)
@given(steps())
def test_preferences_and_whitening_add_up(drawn: tuple[list[Answer], Cut]) -> None:
    answers, cut = drawn

    def kto(parts: list[Lot]) -> tuple[float, torch.Tensor, token_advantages.WhiteningMoments]:
        table = torch.zeros(CONTEXTS, WORDS, dtype=torch.float64).requires_grad_()
        of = loss_weights.sum_step_totals(part.tokens for part in parts)
        total, seen = 0.0, token_advantages.WhiteningMoments(0, 0, 0)
        for part in parts:
            logp = table.log_softmax(-1)[part.context, part.word]
            gain = part.tokens.sum_per_sequence(logp - part.reference)
            # Of the same answer in every layout: its advantage says whether it is wanted.
            mean = part.tokens.mean_per_sequence(part.advantage)
            loss = preference_loss.kto_loss(gain, mean > 0, baseline=0.3).sum() / of.sequences
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            seen += token_advantages.compute_whitening_stats(part.old, part.tokens)
        assert table.grad is not None
        return total, table.grad, seen

    loss, slope, seen = kto([lot(answers, packs=False)])
    again, other, also = kto(lots(answers, cut))
    assert again == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close(other, slope, atol=1e-9, rtol=0)
    assert also.count == seen.count
    assert also.sum == pytest.approx(seen.sum)
    assert also.sum_of_squares == pytest.approx(seen.sum_of_squares)


def _next(sums: Iterator[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    return next(sums)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@settings(max_examples=25)
@given(steps(), st.integers(1, LONGEST))
def test_sequences_shared_between_two_ranks_add_up(
    kind: str, drawn: tuple[list[Answer], Cut], at: int
) -> None:
    answers, _ = drawn
    whole = lot(answers, packs=False)
    loss, slope = step([whole], of_policy(kind), "sequence", "mean")

    width = whole.tokens.mask.shape[1]
    sides = [slice(0, min(at, width)), slice(min(at, width), width)]
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(CONTEXTS, WORDS, generator=generator, dtype=torch.float64).requires_grad_()
    of = loss_weights.sum_step_totals([whole.tokens])
    total = 0.0
    logp = table.log_softmax(-1)[whole.context, whole.word]
    # Each rank meets the sums of whole sequences, in the order in which the functions ask.
    asked: list[torch.Tensor] = []

    def remember(value: torch.Tensor) -> torch.Tensor:
        asked.append(value)
        return value

    def run(part: Lot, logp_part: torch.Tensor) -> torch.Tensor:
        weight = loss_weights.compute_token_weights(
            part.tokens, of, "sequence", dtype=torch.float64
        )
        weight = weight * importance_correction.truncated_importance_weights(
            part.old, part.sampled, part.tokens, span="mean"
        )
        return loss_weights.weighted_sum(of_policy(kind)(logp_part, part), weight)

    with torch.no_grad():
        tokens = whole.tokens
        run(
            whole._replace(
                tokens=MaskedTokens(tokens.mask, tokens.sequence_ids, len(answers), remember)
            ),
            logp,
        )
    for side in sides:
        sums = iter(asked)
        tokens = MaskedTokens(
            whole.tokens.mask[:, side],
            whole.tokens.sequence_ids[:, side],
            len(answers),
            partial(_next, sums),
        )
        rest = (each[:, side] for each in whole[1:])
        part_loss = run(Lot(tokens, *rest), logp[:, side])
        part_loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        total += part_loss.item()
        assert next(sums, None) is None
    assert total == pytest.approx(loss, abs=1e-6)
    assert table.grad is not None
    torch.testing.assert_close(table.grad, slope, atol=1e-6, rtol=0)
