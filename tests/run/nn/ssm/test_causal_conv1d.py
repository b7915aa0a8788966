"""The short convolution over tokens."""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from meshwright.run.nn.ssm.causal_conv1d import (
    CausalConv1d,
    causal_conv1d,
    make_golden_ratio_sequence,
)


def test_a_token_sees_itself_through_the_last_tap_and_those_before_through_the_others() -> None:
    x_BTC = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 4, 1)
    taps, bias = torch.tensor([[4.0, 3.0, 2.0]]), torch.tensor([0.5])
    found = causal_conv1d(x_BTC, taps, bias)
    assert found.flatten().tolist() == [2.5, 23.5, 234.5, 2340.5]


def test_no_tap_reaches_into_another_document() -> None:
    torch.manual_seed(0)
    x_BTC, taps, bias = torch.randn(1, 9, 3), torch.randn(3, 4), torch.randn(3)
    documents_BT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2, 3]])
    packed = causal_conv1d(x_BTC, taps, bias, documents_BT)
    alone = [causal_conv1d(part, taps, bias) for part in x_BTC.split([2, 5, 1, 1], 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def test_first_taps_are_spread_as_evenly_as_random_ones() -> None:
    taps = CausalConv1d(500, 4, bias=True).get_initial_values()["weight"]
    assert isinstance(taps, torch.Tensor)
    assert taps.shape == (500, 4)
    assert taps.abs().max() <= 0.5
    assert taps.mean().abs() < 0.01
    # The deviation of even numbers in ±1/2.
    torch.testing.assert_close(taps.std(), torch.tensor(12**-0.5), atol=0.01, rtol=0)


def test_spread_numbers_leave_no_gap() -> None:
    gaps = make_golden_ratio_sequence(1000).sort().values.diff()
    assert gaps.max() < 3 / 1000
