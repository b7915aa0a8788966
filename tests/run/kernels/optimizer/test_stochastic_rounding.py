"""Random bits are repeatable and unrelated; rounding by them is right on average."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")

import torch

from meshwright.run.kernels.optimizer.stochastic_rounding import (
    RandomBits,
    generate_random_bits_reference,
    make_rounding_keys_reference,
    make_tensor_key,
    stochastic_round_bf16_reference,
)


def _bits(number: int, *, name: str = "weight", step: int = 1, seed: int = 0) -> RandomBits:
    return generate_random_bits_reference(
        make_rounding_keys_reference(make_tensor_key(name, seed), step), torch.arange(number)
    )


def _shares(bits: RandomBits) -> torch.Tensor:
    """Return all three uses as numbers from 0 to 1."""
    words = torch.stack([bits.weight >> 8, bits.first_moment, bits.second_moment])
    assert int(words.min()) >= 0
    assert int(words.max()) < 1 << 24
    return words.double() / (1 << 24)


def test_same_name_seed_step_and_place_give_the_same_bits() -> None:
    assert torch.equal(_shares(_bits(1000)), _shares(_bits(1000)))


@pytest.mark.parametrize("other", [{"name": "bias"}, {"step": 2}, {"seed": 1}])
def test_bits_of_another_tensor_step_or_seed_are_unrelated(other: dict[str, int]) -> None:
    mine, others = _bits(20_000), _bits(20_000, **other)  # type: ignore[arg-type]
    agreeing = [mine.weight ^ others.weight, (mine.first_moment ^ others.first_moment) << 8]
    if "step" not in other:  # second moments go on from step to step
        agreeing.append((mine.second_moment ^ others.second_moment) << 8)
    for word in agreeing:
        ones = torch.stack([(word >> place) & 1 for place in range(16, 32)]).double().mean(1)
        assert (ones - 0.5).abs().max() < 0.02


def test_bits_of_an_element_are_unrelated_from_step_to_step() -> None:
    found = torch.stack([_shares(_bits(4, step=step))[:2] for step in range(1, 4001)])
    for series in found.flatten(1).T:
        assert abs(float(series.mean()) - 0.5) < 0.03
        assert abs(float(torch.corrcoef(torch.stack([series[:-1], series[1:]]))[0, 1])) < 0.06


def test_second_moments_see_all_of_chance_evenly_within_a_hundred_steps() -> None:
    found = torch.stack([_shares(_bits(50, step=step))[2] for step in range(1, 101)])
    gaps = found.sort(0).values.diff(dim=0)
    assert float(gaps.max()) < 0.03  # of 100 numbers drawn apart, some gap is near 0.05


def test_neighbouring_elements_get_unrelated_bits() -> None:
    for shares in _shares(_bits(20_000)):
        assert abs(float(shares.mean()) - 0.5) < 0.01
        assert abs(float(torch.corrcoef(torch.stack([shares[:-1], shares[1:]]))[0, 1])) < 0.03


def test_the_three_uses_of_an_element_are_unrelated() -> None:
    correlation = torch.corrcoef(_shares(_bits(20_000))) - torch.eye(3)
    assert correlation.abs().max() < 0.03


@pytest.mark.parametrize("value", [1.001, -1.001, 3e-20, -7.77e8])
def test_rounding_goes_to_one_of_two_neighbours_and_is_right_on_average(value: float) -> None:
    values = torch.full((20_000,), value)
    rounded = stochastic_round_bf16_reference(values, _bits(20_000).weight)
    low, high = rounded.min(), rounded.max()
    assert ((rounded == low) | (rounded == high)).all()
    step = float(high - low)
    assert step > 0
    assert abs(float(rounded.double().mean()) - float(values[0])) < 0.015 * step


def test_what_bfloat16_holds_exactly_stays() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf])
    rounded = stochastic_round_bf16_reference(values, torch.full((6,), 0xFFFFFFFF))
    assert torch.equal(rounded.float(), values)


def test_nan_stays_nan_whatever_its_bits() -> None:
    patterns = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32)
    rounded = stochastic_round_bf16_reference(
        patterns.view(torch.float32), torch.full((3,), 0xFFFFFFFF)
    )
    assert rounded.isnan().all()
