"""The loss scale backs off at once and grows after a while."""

import pytest

pytest.importorskip("torch", reason="the scale is a torch tensor")

import torch

from meshwright.run.train.optimizer.grad_scaler import DynamicGradScaler
from meshwright.run.train.optimizer.optimizer_config import GradScalerConfig


def _after(*sound: bool, first: float = 8.0) -> float:
    scale = DynamicGradScaler.create(
        GradScalerConfig(init_scale=first, growth_interval=3), torch.device("cpu")
    )
    for each in sound:
        scale.update_(torch.tensor(each))
    return float(scale.scale)


def test_it_halves_with_every_infinite_gradient() -> None:
    assert _after(False) == 4.0
    assert _after(False, False) == 2.0


def test_it_doubles_after_enough_sound_steps_in_a_row() -> None:
    assert _after(True, True) == 8.0
    assert _after(True, True, True) == 16.0
    assert _after(True, True, True, True, True) == 16.0


def test_an_infinite_gradient_starts_the_count_anew() -> None:
    assert _after(True, True, False, True, True) == 4.0


def test_it_does_not_fall_below_one() -> None:
    assert _after(False, False, first=1.5) == 1.0
