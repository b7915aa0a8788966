"""Preference losses and distillation, against their papers' formulas and properties."""

import math

import pytest

pytest.importorskip("torch", reason="objectives are functions of torch's tensors")

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.posttrain.objectives import preference_loss
from meshwright.run.posttrain.objectives.distillation_loss import top_k_divergence
from meshwright.run.posttrain.objectives.token_logprobs import compute_token_logprobs

gains = st.floats(-5, 5, allow_nan=False)


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@given(gains, gains)
def test_pairs_written_out(chosen: float, rejected: float) -> None:
    both = (one(chosen), one(rejected))
    gap = chosen - rejected
    assert preference_loss.dpo_loss(*both, beta=0.3).item() == pytest.approx(
        -math.log(sigmoid(0.3 * gap))
    )
    smooth = -0.9 * math.log(sigmoid(0.3 * gap)) - 0.1 * math.log(sigmoid(-0.3 * gap))
    assert preference_loss.dpo_loss(*both, beta=0.3, label_smoothing=0.1).item() == pytest.approx(
        smooth
    )
    assert preference_loss.ipo_loss(*both, beta=0.25).item() == pytest.approx((gap - 2) ** 2)
    judged = preference_loss.bradley_terry_loss(
        *both, margin_P=one(0.5), center_rewards_coefficient=0.01
    ).item()
    drift = 0.01 * (chosen + rejected) ** 2
    assert judged == pytest.approx(-math.log(sigmoid(gap - 0.5)) + drift)


@given(gains, st.booleans(), st.floats(0, 3))
def test_kto_written_out(gain: float, wanted: bool, baseline: float) -> None:
    found = preference_loss.kto_loss(
        one(gain),
        torch.tensor([wanted]),
        baseline=baseline,
        beta=0.2,
        desirable_weight=1.0,
        undesirable_weight=1.33,
    )
    sign, weight = (1, 1.0) if wanted else (-1, 1.33)
    assert found.item() == pytest.approx(weight * (1 - sigmoid(sign * 0.2 * (gain - baseline))))


def test_large_margins_stay_finite() -> None:
    found = preference_loss.dpo_loss(torch.tensor([-1e6]), torch.tensor([1e6]), beta=1.0)
    assert found.item() == pytest.approx(2e6)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="beta is 0"):
        preference_loss.dpo_loss(one(0), one(0), beta=0.0)
    with pytest.raises(InputError, match="less than a half"):
        preference_loss.dpo_loss(one(0), one(0), label_smoothing=0.5)


def both_sides(seed: int, words: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 4, words, generator=generator, dtype=torch.float64) * 2
    return student.log_softmax(-1), teacher.log_softmax(-1)


def rest_of(logp: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return log p of all words that are not given."""
    return logp.scatter(-1, words, -math.inf).logsumexp(-1)


def full(student: torch.Tensor, teacher: torch.Tensor, direction: str) -> torch.Tensor:
    p, q = (teacher, student) if direction == "forward" else (student, teacher)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@given(seed=st.integers(0, 200), count=st.integers(1, 8))
def test_likeliest_words_never_tell_more_than_all(seed: int, count: int, direction: str) -> None:
    student, teacher = both_sides(seed)
    likeliest = teacher.topk(count, -1).indices
    found = top_k_divergence(
        student.gather(-1, likeliest),
        rest_of(student, likeliest),
        teacher.gather(-1, likeliest),
        direction,  # type: ignore[arg-type]
    )
    whole = full(student, teacher, direction)
    assert (found <= whole + 1e-5).all()
    assert (found >= -1e-12).all()
    if count == 8:
        torch.testing.assert_close(found, whole)


def test_any_other_is_a_word_of_its_own() -> None:
    student, teacher = one(0.25).log().view(1, 1), one(0.5).log().view(1, 1)
    given_ = (student, one(0.75).log(), teacher)
    want = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert top_k_divergence(*given_).item() == pytest.approx(want)
    back = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert top_k_divergence(*given_, "reverse").item() == pytest.approx(back)


def test_shorter_lists_are_filled_up_without_a_trace() -> None:
    student, teacher = both_sides(5)
    rest = rest_of(student, torch.arange(3).expand(4, 3))
    short = top_k_divergence(student[:, :3], rest, teacher[:, :3])
    longer = teacher[:, :5].clone()
    longer[:, 3:] = -math.inf
    given_5 = student[:, :5].clone().requires_grad_()
    found = top_k_divergence(given_5, rest, longer)
    torch.testing.assert_close(found, short)
    (slope,) = torch.autograd.grad(found.sum(), given_5)
    assert torch.isfinite(slope).all()
    assert slope[:, 3:].eq(0).all()


def test_agreement_costs_nothing_and_pulls_nowhere() -> None:
    _, teacher = both_sides(2)
    logits = teacher.clone().requires_grad_()
    for direction in ("forward", "reverse"):
        student = logits.log_softmax(-1)
        rest = rest_of(student, torch.arange(3).expand(4, 3))
        found = top_k_divergence(student[:, :3], rest, teacher[:, :3], direction)
        (slope,) = torch.autograd.grad(found.sum(), logits)
        assert found.abs().max() < 1e-12
        assert slope.abs().max() < 1e-12


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("rest", [10.0**-power for power in range(3, 13)])
def test_what_is_hardly_left_to_any_other_pulls_as_over_the_whole_vocabulary(
    rest: float, direction: str
) -> None:
    tokens, vocab, words = 6, 50, torch.tensor([7, 0, 31])
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)
    others = torch.ones(vocab, dtype=torch.bool)
    others[words] = False
    logits[:, words] -= logits[:, words].logsumexp(-1, keepdim=True) - math.log1p(-rest)
    logits[:, others] -= logits[:, others].logsumexp(-1, keepdim=True) - math.log(rest)
    student = logits.float().requires_grad_()
    teacher = torch.tensor([0.6, 0.3, 0.05]).log().expand(tokens, 3)
    found = compute_token_logprobs(student, torch.eye(vocab), words.expand(tokens, 3), rest=True)
    assert found.other_logprobs is not None
    torch.testing.assert_close(found.other_logprobs.detach().exp(), torch.full((tokens,), rest))
    losses = top_k_divergence(found.logprobs, found.other_logprobs, teacher, direction)  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(losses.sum(), student)
    wide = student.detach().double().requires_grad_()
    logp = wide.log_softmax(-1)
    merged = torch.cat([logp[:, words], logp[:, others].logsumexp(-1, keepdim=True)], -1)
    told = teacher.double()
    told = torch.cat([told, (1 - told.exp().sum(-1, keepdim=True)).log()], -1)
    wanted = full(merged, told, direction)
    (want,) = torch.autograd.grad(wanted.sum(), wide)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-6)
    for columns in (words, others):
        torch.testing.assert_close(slope[:, columns].double(), want[:, columns], rtol=1e-4, atol=0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    student, teacher = both_sides(1)
    with pytest.raises(InputError, match=r"its rest \(4, 1\)"):
        top_k_divergence(student, student[:, :1], teacher)
