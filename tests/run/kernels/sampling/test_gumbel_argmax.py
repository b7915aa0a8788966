"""Tokens are drawn with the probabilities of softmax, alike in every batch and on both backends."""

import pytest

pytest.importorskip("torch", reason="sampling works on torch tensors")

import torch

from meshwright.run.kernels.sampling.gumbel_argmax import sample_gumbel_argmax
from meshwright.run.kernels.sampling.gumbel_noise import (
    PROPOSED,
    TOKEN,
    derive_noise_keys_reference,
    uniform_noise_reference,
)
from meshwright.run.kernels.sampling.row_params import LogitRows, RowSamplingTensors
from meshwright.run.kernels.sampling.top_k_top_p import compute_logit_thresholds
from meshwright.run.kernels.triton_compat import HAS_TRITON, KernelBackend
from tests.run.serve.sampling.goodness import LIMIT, deviation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton_too = pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="no Triton here")),
    ],
)


def settings(
    rows: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    seed: int = 7,
) -> RowSamplingTensors:
    def real(value: float) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.float32, device=DEVICE)

    def whole(value: int) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.int64, device=DEVICE)

    drawn, unseeded = torch.arange(rows, device=DEVICE), whole(0)
    return RowSamplingTensors(
        real(temperature), real(top_p), real(min_p), whole(top_k), whole(seed), drawn, unseeded
    )


def every_row(rows: int) -> LogitRows:
    index = torch.arange(rows, device=DEVICE)
    return LogitRows(index, torch.zeros_like(index))


def logits(lines: int, vocab: int, *, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(lines, vocab, generator=source) * scale).to(DEVICE)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_have_the_probabilities_of_softmax(temperature: float) -> None:
    many = 10_000
    line = logits(1, 50)
    tokens = sample_gumbel_argmax(
        line.expand(many, -1), every_row(many), settings(many, temperature=temperature)
    )
    assert deviation(tokens, (line[0] / temperature).softmax(0)) < LIMIT


def test_rows_of_different_seeds_draw_independently() -> None:
    many = 10_000
    each = torch.arange(many, device=DEVICE)
    with_seeds = settings(many)._replace(seed=each, num_sampled=torch.zeros_like(each))
    line = logits(1, 20)
    tokens = sample_gumbel_argmax(line.expand(many, -1), every_row(many), with_seeds)
    assert deviation(tokens, line[0].softmax(0)) < LIMIT
    pairs = tokens[0::2] * 20 + tokens[1::2]
    assert deviation(pairs, torch.outer(line[0].softmax(0), line[0].softmax(0)).flatten()) < LIMIT


def test_streams_of_one_position_are_independent() -> None:
    many = 10_000
    line, rows, asked = logits(1, 12), every_row(many), settings(many)
    first = sample_gumbel_argmax(line.expand(many, -1), rows, asked, stream=TOKEN)
    second = sample_gumbel_argmax(line.expand(many, -1), rows, asked, stream=PROPOSED)
    each = line[0].softmax(0)
    assert deviation(first * 12 + second, torch.outer(each, each).flatten()) < LIMIT


def test_uniform_numbers_fill_their_interval_evenly_and_never_reach_its_ends() -> None:
    positions = torch.arange(400)
    keys = derive_noise_keys_reference(torch.full((400,), 2**61 + 5), positions, TOKEN)
    drawn = uniform_noise_reference(
        (keys[0][:, None], keys[1][:, None]), torch.arange(1000)
    ).flatten()
    assert float(drawn.min()) > 0
    assert float(drawn.max()) < 1
    cells = (drawn * 256).long()
    assert deviation(cells, torch.full((256,), 1 / 256)) < LIMIT


@triton_too
def test_a_greedy_line_takes_the_first_of_the_largest(backend: KernelBackend) -> None:
    lines = torch.tensor([[1.0, 5.0, 5.0, 2.0], [-3.0, -3.0, -9.0, -4.0]], device=DEVICE)
    tokens = sample_gumbel_argmax(
        lines, every_row(2), settings(2, temperature=0.0), backend=backend
    )
    assert tokens.tolist() == [1, 0]


@triton_too
def test_a_line_without_a_number_gives_no_token(backend: KernelBackend) -> None:
    lines = torch.tensor(
        [[-torch.inf] * 3, [torch.nan] * 3, [-torch.inf, 0.0, torch.nan]], device=DEVICE
    )
    for temperature in (0.0, 1.0):
        asked = settings(3, temperature=temperature)
        assert sample_gumbel_argmax(lines, every_row(3), asked, backend=backend).tolist() == [
            -1,
            -1,
            1,
        ]


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_draws_what_plain_torch_draws(dtype: torch.dtype) -> None:
    # Wider than a block and no multiple of it, in spans and in one.
    for lines, vocab in ((2, 5000), (9, 300)):
        line = logits(lines, vocab).to(dtype)
        rows = LogitRows(
            torch.arange(lines, device=DEVICE).flip(0), torch.arange(lines, device=DEVICE)
        )
        asked = settings(lines, temperature=0.8, seed=-(2**40) - 3)
        asked.temperature[::3] = 0
        floor = line.float().quantile(0.5, dim=1) if lines == 2 else None
        plain = sample_gumbel_argmax(line, rows, asked, floor, backend="torch")
        assert (
            sample_gumbel_argmax(line, rows, asked, floor, backend="triton").tolist()
            == plain.tolist()
        )


def test_a_row_draws_the_same_in_any_batch() -> None:
    line = logits(8, 300)
    asked = settings(8, temperature=1.3)
    asked.seed[:] = torch.arange(8) * 1001
    whole = sample_gumbel_argmax(line, every_row(8), asked)
    for row in range(8):
        alone = LogitRows(torch.tensor([row], device=DEVICE), torch.tensor([0], device=DEVICE))
        assert sample_gumbel_argmax(line[row : row + 1], alone, asked).tolist() == [int(whole[row])]


CUTS: list[dict[str, float]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {},
]


def left_by_transformers(line: torch.Tensor, temperature: float, cut: dict[str, float]) -> set[int]:
    """Return the tokens that transformers' own steps leave."""
    steps = pytest.importorskip("transformers.generation.logits_process")
    scores = line[None].float().cpu() / temperature
    if "top_k" in cut:
        scores = steps.TopKLogitsWarper(int(cut["top_k"]))(None, scores)
    if "top_p" in cut:
        scores = steps.TopPLogitsWarper(cut["top_p"])(None, scores)
    if "min_p" in cut:
        scores = steps.MinPLogitsWarper(cut["min_p"])(None, scores)
    return set(torch.nonzero(scores[0] > -torch.inf).flatten().tolist())


@triton_too
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_what_is_left_is_what_transformers_leaves(
    cut: dict[str, float], backend: KernelBackend
) -> None:
    line = logits(3, 600, seed=4)
    line[1] -= 40
    line[2, 5:] = -1e30
    asked = settings(3, temperature=0.9, **cut)  # type: ignore[arg-type]
    floor = compute_logit_thresholds(line, every_row(3), asked, backend=backend)
    for row in range(3):
        left = set(torch.nonzero(line[row] >= floor[row]).flatten().tolist())
        wanted = left_by_transformers(line[row], 0.9, cut)
        if row == 2:
            # Sums leave open whether tokens that weigh nothing are in.
            left, wanted = left & set(range(5)), wanted & set(range(5))
        assert left == wanted


@triton_too
def test_equal_logits_stay_or_go_together(backend: KernelBackend) -> None:
    line = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]], device=DEVICE)
    floor = compute_logit_thresholds(line, every_row(1), settings(1, top_k=2), backend=backend)
    assert floor.tolist() == [2.0]


@triton_too
def test_masked_logits_and_greedy_lines_have_no_part_in_a_cut(backend: KernelBackend) -> None:
    line = torch.full((1, 40), -torch.inf, device=DEVICE)
    line[0, 3:6] = torch.tensor([1.0, 0.0, 2.0])
    asked = settings(1, top_k=5, top_p=0.99)
    floor = compute_logit_thresholds(line, every_row(1), asked, backend=backend)
    assert (line >= floor[:, None]).sum() == 3
    cold = settings(1, temperature=0.0, top_k=1)
    assert compute_logit_thresholds(line, every_row(1), cold, backend=backend).tolist() == [
        -torch.inf
    ]
    nothing = torch.full((1, 40), -torch.inf, device=DEVICE)
    compute_logit_thresholds(nothing, every_row(1), asked, backend=backend)


def test_cut_draws_have_the_probabilities_that_are_left() -> None:
    many = 10_000
    line = logits(1, 80, scale=1.0)
    asked = settings(many, temperature=0.7, top_k=30, top_p=0.8)
    lines = line.expand(many, -1)
    tokens = sample_gumbel_argmax(
        lines, every_row(many), asked, compute_logit_thresholds(lines, every_row(many), asked)
    )
    kept = sorted(left_by_transformers(line[0], 0.7, {"top_k": 30, "top_p": 0.8}))
    exact = torch.zeros(80, device=DEVICE)
    exact[kept] = (line[0, kept] / 0.7).softmax(0)
    assert deviation(tokens, exact) < LIMIT
