"""Eight-bit moments keep what Adam needs of them."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")

import torch

from meshwright.run.kernels.optimizer.block_quantization import (
    BLOCK_ELEMENTS,
    block_scales_reference,
    dequantize_blocks,
    quantize_blocks,
    requantize_blocks,
)
from meshwright.run.kernels.optimizer.stochastic_rounding import (
    generate_random_bits_reference,
    make_rounding_keys_reference,
    make_tensor_key,
)


def _coded(values: torch.Tensor, kind: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values after a round trip through codes."""
    chance = torch.randint(0, 1 << 24, values.shape, generator=torch.Generator().manual_seed(seed))
    return _through(values, kind, chance)


def _through(values: torch.Tensor, kind: torch.dtype, chance: torch.Tensor) -> torch.Tensor:
    scales = block_scales_reference(values)
    return dequantize_blocks(quantize_blocks(values, scales, chance, kind), scales)


@pytest.mark.parametrize("number", [1, 256, 257, 1000])
def test_a_scale_is_the_largest_magnitude_of_its_block(number: int) -> None:
    values = torch.randn(number)
    scales = block_scales_reference(values)
    assert len(scales) == -(-number // BLOCK_ELEMENTS)
    assert float(scales[-1]) == float(values[(len(scales) - 1) * BLOCK_ELEMENTS :].abs().max())


def test_values_across_four_decades_keep_their_sign_and_size() -> None:
    values = torch.logspace(-4, 0, 256) * torch.tensor([1.0, -1.0]).repeat(128)
    for kind, given in ((torch.int8, values), (torch.uint8, values.abs())):
        error = (_coded(given, kind) / given - 1).abs()
        assert float(error.max()) < 1 / 8  # a last place of the mantissa


def test_the_largest_of_a_block_is_exact() -> None:
    values = torch.randn(256)
    largest = values.abs().argmax()
    for kind, given in ((torch.int8, values), (torch.uint8, values.abs())):
        assert torch.allclose(_coded(given, kind)[largest], given[largest], rtol=1e-6)


@pytest.mark.parametrize("size", [2e-38, 1e-30, 3e-5, 7e4, 1e20, 1e37])
@pytest.mark.parametrize("chance", [0, (1 << 24) - 1])
def test_no_chance_turns_the_largest_into_another_sign_or_size(size: float, chance: int) -> None:
    values = torch.linspace(0.001, 1, 256) * size * torch.tensor([1.0, -1.0]).repeat(128)
    for kind, given in ((torch.int8, values), (torch.uint8, values.abs())):
        scales = block_scales_reference(given)
        codes = quantize_blocks(given, scales, torch.full((256,), chance), kind)
        error = (dequantize_blocks(codes, scales) / given - 1).abs()
        assert float(error.max()) < 1 / 8 + 1e-5


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    values = torch.cat([torch.tensor([1.0]), torch.full((255,), 1e-38)])
    coded = _coded(values, torch.uint8)
    assert (coded > 0).all()
    assert (coded[1:] < 1e-9).all()


def test_a_first_moment_of_zero_stays_zero_whatever_its_neighbours() -> None:
    values = torch.randn(256)
    values[::2] = 0
    assert not _coded(values, torch.int8)[::2].any()


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_a_block_of_zeros_stays_zero(kind: torch.dtype) -> None:
    assert not _coded(torch.zeros(300), kind).any()


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_rounding_is_right_on_average(kind: torch.dtype) -> None:
    # 0.31 lies between two codes; the largest keeps the scale where it is.
    values = torch.full((256,), 0.31)
    values[0] = 1.0
    coded = torch.stack([_coded(values, kind, seed)[1:] for seed in range(100)])
    assert len(set(coded.flatten().tolist())) == 2
    assert float(coded.mean()) == pytest.approx(0.31, rel=2e-3)


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
    [(1.0, 0.95, 0.12), (1.0, 0.999, 0.15), (2.5, 0.999, 0.35)],
)
def test_updates_with_coded_moments_stay_near_those_with_exact_ones(
    spread: float, beta2: float, error: float
) -> None:
    torch.manual_seed(0)
    number, steps = 1024, 300 if beta2 < 0.99 else 1500
    places, key = torch.arange(number), make_tensor_key("w", 0)
    sizes = torch.exp(torch.randn(number) * spread)
    m = v = coded_m = coded_v = torch.zeros(number)
    for step in range(1, steps + 1):
        g = (torch.randn(number) + 0.1) * sizes
        m, coded_m = m + (g - m) * 0.1, coded_m + (g - coded_m) * 0.1
        v, coded_v = v + (g * g - v) * (1 - beta2), coded_v + (g * g - coded_v) * (1 - beta2)
        chances = generate_random_bits_reference(make_rounding_keys_reference(key, step), places)
        coded_m = _through(coded_m, torch.int8, chances.first_moment)
        coded_v = _through(coded_v, torch.uint8, chances.second_moment)
    exact, coded = m / v.sqrt(), coded_m / coded_v.sqrt()
    assert float((coded - exact).norm() / exact.norm()) < error
    # What lies below the smallest code counts as that code; the others are right on average.
    reached = v > 2**-29 * block_scales_reference(v).repeat_interleave(BLOCK_ELEMENTS)
    assert float((coded_v / v)[reached].sqrt().mean()) == pytest.approx(1, abs=0.05)
    assert (coded_v >= 0.1 * v).all()


class TestRecoded:
    """Codes whose elements come to lie in other blocks."""

    @staticmethod
    def coded(kind: torch.dtype, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(number)
        spread = torch.randn(number, generator=made).mul(3).exp()
        values = torch.randn(number, generator=made) * spread
        values = values if kind == torch.int8 else values.square()
        scales = block_scales_reference(values)
        chance = torch.randint(0, 1 << 24, values.shape, generator=made)
        return quantize_blocks(values, scales, chance, kind), scales

    @pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
    def test_elements_of_one_block_keep_every_bit(self, kind: torch.dtype) -> None:
        codes, scales = self.coded(kind, 1000)
        blocks = torch.arange(1000) // BLOCK_ELEMENTS
        # All of them, and the second half of a block with the whole ones behind it.
        for some in (slice(0, 1000), slice(256, 700), slice(512, 640)):
            found, of_blocks = requantize_blocks(codes[some], scales, blocks[some])
            assert torch.equal(found, codes[some])
            assert torch.equal(of_blocks, scales[some.start // 256 :][: len(of_blocks)])

    @pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
    def test_others_move_by_half_a_code_at_most(self, kind: torch.dtype) -> None:
        codes, scales = self.coded(kind, 4096)
        blocks = torch.arange(4096) // BLOCK_ELEMENTS
        order = torch.arange(4096).view(64, 64).t().reshape(-1)  # columns one after the other
        before = dequantize_blocks(codes, scales)[order]
        found, of_blocks = requantize_blocks(codes[order], scales, blocks[order])
        after = dequantize_blocks(found, of_blocks)
        largest = of_blocks.repeat_interleave(BLOCK_ELEMENTS)
        least = 2**-18 if kind == torch.int8 else 2**-31
        most = torch.maximum(before.abs() / 16, least * largest) * 1.00001
        assert bool(((after - before).abs() <= most).all())
        assert not torch.equal(after, before)

    def test_zeros_stay_zeros_and_no_second_moment_becomes_one(self) -> None:
        first, second = torch.zeros(300, dtype=torch.int8), torch.zeros(300, dtype=torch.uint8)
        blocks, scales = torch.arange(300) % 2, torch.zeros(2)
        for codes in (first, second):
            found, of_blocks = requantize_blocks(codes, scales, blocks)
            assert not of_blocks.any()
            assert not dequantize_blocks(found, of_blocks).any()
        found, of_blocks = requantize_blocks(second, torch.tensor([0.0, 1e9]), blocks)
        assert bool((dequantize_blocks(found, of_blocks) > 0).all())
