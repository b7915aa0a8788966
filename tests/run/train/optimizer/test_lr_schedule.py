"""Learning rates follow from the step alone."""

import pytest

pytest.importorskip("torch", reason="holds rates against those of torch")

import torch

from meshwright.run.train.optimizer.lr_schedule import compute_learning_rate
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig, ScheduleType

SHAPES: tuple[ScheduleType, ...] = ("constant", "linear", "cosine", "wsd")


def _rates(total: int, **settings: object) -> list[float]:
    chosen = OptimizerConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    return [compute_learning_rate(step, total, chosen) for step in range(total)]


@pytest.mark.parametrize("schedule", SHAPES)
def test_rate_rises_in_a_line_and_is_full_at_the_end_of_warmup(schedule: ScheduleType) -> None:
    rates = _rates(100, schedule=schedule, warmup_steps=4)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_rate_falls_to_the_final_share_at_the_last_step(schedule: ScheduleType) -> None:
    rates = _rates(50, schedule=schedule, warmup_steps=5, min_lr_factor=0.2)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[5:] == sorted(rates[5:], reverse=True)


@pytest.mark.parametrize("total", [1, 2, 3, 50])
@pytest.mark.parametrize("schedule", SHAPES)
def test_without_warmup_the_first_step_has_the_full_rate(
    schedule: ScheduleType, total: int
) -> None:
    rates = _rates(total, schedule=schedule, warmup_steps=0, decay_ratio=1.0, min_lr_factor=0.0)
    assert rates[0] == 1.0
    assert rates == _rates(
        total, schedule=schedule, warmup_steps=1, decay_ratio=1.0, min_lr_factor=0.0
    )


def test_a_cosine_without_warmup_is_that_of_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
    for rate in _rates(10, schedule="cosine", warmup_steps=0, min_lr_factor=0.0):
        assert rate == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_constant_rate_stays() -> None:
    assert set(_rates(50, schedule="constant", warmup_steps=0)) == {1.0}


def test_cosine_is_half_way_in_the_middle() -> None:
    rates = _rates(101, schedule="cosine", warmup_steps=0, min_lr_factor=0.0)
    assert rates[50] == pytest.approx(0.5)


def test_wsd_stays_until_its_last_share() -> None:
    rates = _rates(100, schedule="wsd", warmup_steps=10, decay_ratio=0.2, min_lr_factor=0.0)
    assert rates[9:80] == [1.0] * 71
    assert rates[89] == pytest.approx(0.5)


def test_wsd_may_fall_as_one_minus_the_root() -> None:
    rates = _rates(
        100, schedule="wsd", warmup_steps=0, decay_ratio=0.5, decay_type="sqrt", min_lr_factor=0.0
    )
    # A quarter of 50 steps is not a whole number; 0.16 of them is.
    assert rates[57] == pytest.approx(1 - 0.4)


@pytest.mark.parametrize("schedule", SHAPES)
def test_runs_shorter_than_their_warmup_work(schedule: ScheduleType) -> None:
    assert _rates(2, schedule=schedule, warmup_steps=100) == [0.5, 1.0]


@pytest.mark.parametrize("schedule", SHAPES)
def test_steps_after_the_planned_end_keep_the_last_rate(schedule: ScheduleType) -> None:
    settings = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=1)
    assert compute_learning_rate(500, 20, settings) == compute_learning_rate(19, 20, settings)
