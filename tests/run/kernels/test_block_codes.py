"""Eight-bit moments keep what Adam needs of them."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")

import torch

from meshwright.run.kernels.block_codes import (
    BLOCK_ELEMENTS,
    plain_decode,
    plain_encode,
    plain_scales,
)


def _coded(values: torch.Tensor, kind: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values after a round trip through codes."""
    scales = plain_scales(values)
    chance = torch.randint(0, 65536, values.shape, generator=torch.Generator().manual_seed(seed))
    return plain_decode(plain_encode(values, scales, chance, kind), scales)


@pytest.mark.parametrize("number", [1, 256, 257, 1000])
def test_a_scale_is_the_largest_magnitude_of_its_block(number: int) -> None:
    values = torch.randn(number)
    scales = plain_scales(values)
    assert len(scales) == -(-number // BLOCK_ELEMENTS)
    assert float(scales[-1]) == float(values[(len(scales) - 1) * BLOCK_ELEMENTS :].abs().max())


def test_values_across_four_decades_keep_their_sign_and_size() -> None:
    values = torch.logspace(-4, 0, 256) * torch.tensor([1.0, -1.0]).repeat(128)
    error = (_coded(values, torch.int8) / values - 1).abs()
    assert float(error.max()) < 0.25
    unsigned = (_coded(values.abs(), torch.uint8) / values.abs() - 1).abs()
    assert float(unsigned.max()) < 0.13


def test_the_largest_of_a_block_is_exact() -> None:
    values = torch.randn(256)
    largest = values.abs().argmax()
    assert torch.allclose(_coded(values, torch.int8)[largest], values[largest], rtol=1e-6)


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    values = torch.cat([torch.tensor([1.0, 0.0]), torch.full((254,), 1e-38)])
    coded = _coded(values, torch.uint8)
    assert (coded[2:] > 0).all()
    assert float(coded[1]) == 0


def test_a_block_of_zeros_stays_zero() -> None:
    assert not _coded(torch.zeros(300), torch.int8).any()


def test_a_change_far_smaller_than_a_code_shows_on_average() -> None:
    # The largest element keeps the scale where it is.
    values = torch.full((256,), 0.5)
    values[0] = 1.0
    moved = values * torch.cat([torch.ones(1), torch.full((255,), 0.999)])
    means = [
        torch.stack([_coded(each, torch.uint8, seed)[1:].mean() for seed in range(200)]).mean()
        for each in (values, moved)
    ]
    assert float(means[1] / means[0]) == pytest.approx(0.999, abs=3e-4)


@pytest.mark.parametrize(
    ("spread", "beta2", "error"),
    [(1.0, 0.95, 0.13), (2.5, 0.999, 0.35)],
)
def test_updates_with_coded_moments_stay_near_those_with_exact_ones(
    spread: float, beta2: float, error: float
) -> None:
    torch.manual_seed(0)
    number, steps = 1024, 300
    sizes = torch.exp(torch.randn(number) * spread)
    m = v = coded_m = coded_v = torch.zeros(number)
    for step in range(steps):
        g = (torch.randn(number) + 0.1) * sizes
        m, coded_m = m + (g - m) * 0.1, coded_m + (g - coded_m) * 0.1
        v, coded_v = v + (g * g - v) * (1 - beta2), coded_v + (g * g - coded_v) * (1 - beta2)
        coded_m = _coded(coded_m, torch.int8, 2 * step)
        coded_v = _coded(coded_v, torch.uint8, 2 * step + 1)
    exact, coded = m / v.sqrt(), coded_m / coded_v.sqrt()
    assert float((coded - exact).norm() / exact.norm()) < error
    assert float((coded_v / v).sqrt().mean()) == pytest.approx(1, abs=0.1)
