"""A sampler gives each row what its request asks for, whatever the others ask."""

import pytest

pytest.importorskip("torch", reason="sampling works on torch tensors")

from typing import get_args

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.triton_compat import HAS_TRITON, KernelBackend
from meshwright.run.serve.sampling.sampler import TokenSampler
from meshwright.run.serve.sampling_params import GREEDY, SamplingParams, StructuredOutputsParams

VOCAB = 40
EOS = 2


def sampler(rows: int = 6) -> TokenSampler:
    return TokenSampler(rows, VOCAB, "cpu", eos=[EOS])


def logits(lines: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(lines, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def tokens_of(
    asked: SamplingParams,
    *,
    beside: tuple[SamplingParams, ...] = (),
    row: int = 0,
    steps: int = 8,
    prompt: tuple[int, ...] = (5, 6, 7),
    resumed_at: int | None = None,
    choice: int = 0,
) -> list[int]:
    """Return what a row draws from logits that follow from the step alone."""
    one = sampler()
    others = [other for other in range(6) if other != row][: len(beside)]
    one.add_row(row, asked, prompt, choice=choice)
    for other, sampling in zip(others, beside, strict=True):
        one.add_row(other, sampling, (1, 2, 3))
    tokens: list[int] = []
    for step in range(steps):
        if step == resumed_at:
            one.remove_row(row)
            one.add_row(row, asked, prompt, tokens, choice=choice)
        order = [*others[:1], row, *others[1:]]
        lines = logits(len(order), seed=100 + step)
        lines[order.index(row)] = logits(1, seed=step)
        drawn = one.sample(lines, one.build_metadata(order))
        tokens.append(int(drawn.token_ids[order.index(row)]))
    return tokens


MANY = (
    SamplingParams(temperature=0.9, top_k=5),
    SamplingParams(frequency_penalty=1.5, logit_bias={3: 4.0}),
    GREEDY,
    SamplingParams(min_tokens=5, logprobs=2),
)


@pytest.mark.parametrize(
    "asked",
    [
        GREEDY,
        SamplingParams(seed=3),
        SamplingParams(seed=3, temperature=0.7, top_k=6, top_p=0.9, min_p=0.01),
        SamplingParams(seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
        SamplingParams(seed=6, logit_bias={4: 3.0, EOS: 9.0}, min_tokens=4),
    ],
    ids=range(5),
)
def test_a_seed_draws_the_same_tokens_in_any_batch_and_after_a_preemption(
    asked: SamplingParams,
) -> None:
    alone = tokens_of(asked)
    assert tokens_of(asked, beside=MANY, row=4) == alone
    assert tokens_of(asked, resumed_at=3) == alone


def test_without_a_seed_requests_differ_and_so_do_choices_of_one_seed() -> None:
    hot = SamplingParams(temperature=5.0)
    assert tokens_of(hot, steps=12) != tokens_of(hot, steps=12)
    seeded = SamplingParams(temperature=5.0, seed=1)
    assert tokens_of(seeded, choice=1) != tokens_of(seeded)
    assert tokens_of(seeded, choice=1) == tokens_of(seeded, choice=1)


def test_a_greedy_row_takes_what_torch_takes() -> None:
    wanted = [int(logits(1, seed=step).argmax()) for step in range(8)]
    assert tokens_of(GREEDY) == wanted
    assert tokens_of(SamplingParams(temperature=1e-7), beside=MANY) == wanted


def changed(
    asked: SamplingParams, line: torch.Tensor, prompt: tuple[int, ...], output: tuple[int, ...]
) -> torch.Tensor:
    one = sampler()
    one.add_row(0, asked, prompt, output)
    return one.process_logits(line.clone(), one.build_metadata([0]))[0]


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    steps = pytest.importorskip("transformers.generation.logits_process")
    line, prompt, output = logits(1), (5, 6, 5), (9, 6, 11)
    penalty = steps.RepetitionPenaltyLogitsProcessor(1.7)
    wanted = penalty(torch.tensor([[*prompt, *output]]), line.clone())[0]
    got = changed(SamplingParams(repetition_penalty=1.7), line, prompt, output)
    torch.testing.assert_close(got, wanted)


def test_presence_and_frequency_count_the_answer_alone() -> None:
    line = logits(1)
    got = changed(
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), line, (5, 6), (9, 9, 6)
    )
    wanted = line[0].clone()
    wanted[9] -= 0.5 + 2 * 0.25
    wanted[6] -= 0.5 + 0.25
    torch.testing.assert_close(got, wanted)


def test_tokens_are_counted_as_they_are_drawn() -> None:
    one = sampler()
    one.add_row(1, SamplingParams(temperature=0, frequency_penalty=2.0), (3,))
    line = torch.zeros(1, VOCAB)
    line[0, 7], line[0, 8] = 3.0, 2.0
    drawn = [int(one.sample(line.clone(), one.build_metadata([1])).token_ids[0]) for _ in range(4)]
    assert drawn == [7, 8, 7, 0]


def test_ends_are_banned_until_enough_was_said() -> None:
    line = torch.zeros(1, VOCAB)
    line[0, EOS], line[0, 9], line[0, 4] = 9.0, 8.0, 1.0
    for extra, wanted in (
        (SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(9,)), [4, 4, EOS]),
        (
            SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(9,), ignore_eos=True),
            [EOS] * 3,
        ),
        (SamplingParams(temperature=0), [EOS] * 3),
    ):
        one = sampler()
        one.add_row(0, extra, (1,))
        got = [
            int(one.sample(line.clone(), one.build_metadata([0])).token_ids[0]) for _ in range(3)
        ]
        assert got == wanted


def test_a_bias_counts_before_everything_else() -> None:
    line = logits(1)
    got = changed(SamplingParams(logit_bias={3: -100.0, 8: 2.5}), line, (1,), ())
    wanted = line[0].clone()
    wanted[3] -= 100
    wanted[8] += 2.5
    torch.testing.assert_close(got, wanted)


def test_warming_up_changes_nothing() -> None:
    one = sampler()
    one.add_row(0, SamplingParams(seed=1), (1,))
    one.warm_up(logits(3).bfloat16())
    other = sampler()
    other.add_row(0, SamplingParams(seed=1), (1,))
    drawn = [
        each.sample(logits(1), each.build_metadata([0])).token_ids.tolist() for each in (one, other)
    ]
    assert drawn[0] == drawn[1]


def test_half_precision_logits_of_a_plain_step_are_not_copied() -> None:
    one = sampler()
    one.add_row(0, SamplingParams(seed=1), (1,))
    line = logits(1).bfloat16()
    assert one.process_logits(line, one.build_metadata([0])) is line


def test_log_probabilities_are_of_the_model_before_anything_else() -> None:
    one = sampler()
    one.add_row(0, SamplingParams(logprobs=3, logit_bias={1: 50.0}, temperature=0.1), (4,))
    one.add_row(1, GREEDY, (4,))
    one.add_row(2, SamplingParams(logprobs=0, temperature=0), (4,))
    lines = logits(3)
    exact = lines.log_softmax(1)
    plan = one.build_metadata([0, 1, 2])
    drawn = one.sample(lines.clone(), plan)
    assert plan.logprob_rows == (0, 2)
    assert drawn.logprobs is not None
    assert drawn.token_ids[0] == 1
    torch.testing.assert_close(
        drawn.logprobs.token_logprobs, torch.stack([exact[0, 1], exact[2].max()])
    )
    torch.testing.assert_close(drawn.logprobs.top_logprobs[0], exact[0].topk(3).values)
    assert drawn.logprobs.top_token_ids[0].tolist() == exact[0].topk(3).indices.tolist()


def test_masks_leave_only_what_they_allow() -> None:
    one = sampler()
    one.add_row(0, SamplingParams(seed=0, temperature=5.0), (1,))
    mask = torch.zeros(1, 2, dtype=torch.int32)
    mask[0, 0] = -(2**31)
    mask[0, 1] = 1 << 3
    plan = one.build_metadata([0])
    drawn = {
        int(one.sample(torch.zeros(1, VOCAB), plan, mask_RW=mask).token_ids) for _ in range(40)
    }
    assert drawn == {31, 35}


def test_after_proposed_tokens_penalties_count_them() -> None:
    one = sampler()
    one.add_row(0, SamplingParams(temperature=0, frequency_penalty=1.0), (3,))
    one.add_row(1, GREEDY, (3,))
    plan = one.build_metadata([1, 0], [1, 3])
    lines = torch.zeros(4, VOCAB)
    inputs = torch.tensor([20, 21, 22, 22])
    got = one.process_logits(lines, plan, inputs_L=inputs)
    assert got[1].abs().sum() == 0
    assert got[2].nonzero().flatten().tolist() == [22]
    assert got[3, 22] == -2
    # Only two of the three lines were kept.
    one.count_accepted(plan, torch.tensor([1, 22, 30, 30]), torch.tensor([True, True, True, False]))
    after = one.process_logits(torch.zeros(1, VOCAB), one.build_metadata([0]))[0]
    assert after.nonzero().flatten().tolist() == [22, 30]
    assert one.row_params.num_sampled[:2].tolist() == [2, 1]


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton here")
def test_the_kernel_penalises_as_plain_torch_does() -> None:
    wide, lines = 2100, torch.randn(5, 2100, generator=torch.Generator().manual_seed(3))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = lines.to(device)
    lines[4] = lines[3]
    found = []
    for backend in get_args(KernelBackend)[1:]:
        one = TokenSampler(3, wide, device, backend=backend)
        prompt, output = range(0, wide, 7), [*range(0, wide, 5), *range(0, wide, 35)]
        one.add_row(
            0, SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3), prompt, output
        )
        one.add_row(2, SamplingParams(presence_penalty=-0.7), prompt, output)
        plan = one.build_metadata([2, 1, 0], [1, 1, 3])
        inputs = torch.tensor([0, 0, 0, 11, 11], device=device)
        found.append(one.process_logits(lines.clone(), plan, inputs_L=inputs))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(found[0][4, 11], found[0][3, 11] - 0.3)
    assert found[0][1].equal(lines[1])


def test_probabilities_are_those_of_the_draws() -> None:
    one = sampler()
    one.add_row(0, SamplingParams(seed=1, temperature=0.5, top_k=3), (1,))
    one.add_row(1, GREEDY, (1,))
    lines = logits(2)
    exact = one.compute_probs(lines, one.build_metadata([0, 1]))
    largest = lines[0].topk(3)
    wanted = (largest.values / 0.5).softmax(0)
    torch.testing.assert_close(exact[0, largest.indices], wanted)
    torch.testing.assert_close(exact.sum(1), torch.ones(2))
    assert exact[1].max() == 1


def test_what_cannot_be_done_is_refused() -> None:
    one = sampler()
    wrong = SamplingParams(
        logit_bias={VOCAB: 1.0},
        stop_token_ids=(-1,),
        min_tokens=3,
        structured_outputs=StructuredOutputsParams(kind="json_object"),
    )
    with pytest.raises(InputError) as refused:
        one.add_row(0, wrong, (1,))
    where = [problem.where for problem in refused.value.problems]
    assert where == ["logit_bias", "stop_token_ids", "min_tokens"]


def test_places_of_counted_rows_are_used_again() -> None:
    one = sampler(3)
    counted = SamplingParams(temperature=0, presence_penalty=1.0)
    for time in range(30):
        one.add_row(time % 3, counted, (time,), (time % 5,))
    assert one._counts.counts.shape[0] == 8
