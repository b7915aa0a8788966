"""Figures travel with the step they belong to."""

import time

import pytest
import torch

from meshwright.run.train.async_metrics import AsyncMetricReader, DeviceTimestamp


def test_scalars_come_back_by_name_and_exactly() -> None:
    figures = AsyncMetricReader({"loss": torch.tensor(0.1), "count": torch.tensor(2**40 + 1)})
    assert figures.read() == {"loss": float(torch.tensor(0.1)), "count": 2.0**40 + 1}


def test_numbers_that_are_none_stay_none() -> None:
    read = AsyncMetricReader({"loss": torch.tensor(float("nan"))}).read()
    assert read["loss"] != read["loss"]


def test_later_changes_do_not_reach_what_was_queued() -> None:
    loss = torch.tensor(1.0)
    figures = AsyncMetricReader({"loss": loss})
    loss.zero_()
    assert figures.read() == {"loss": 1.0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_reading_waits_for_its_own_step_only() -> None:
    first = AsyncMetricReader({"loss": torch.tensor(3.0, device="cuda")})
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    assert first.read() == {"loss": 3.0}
    assert not torch.cuda.current_stream().query()


def test_moments_are_as_far_apart_as_what_was_done_between() -> None:
    first = DeviceTimestamp(torch.device("cpu"))
    time.sleep(0.02)
    figures = AsyncMetricReader({"loss": torch.tensor(0.0)})
    time.sleep(0.1)  # the host looks late
    figures.read()
    looked = DeviceTimestamp(torch.device("cpu"))
    taken_s = figures.done_timestamp.elapsed_since_s(first)
    assert 0.02 <= taken_s <= looked.elapsed_since_s(first) - 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moments_of_a_gpu_are_its_own() -> None:
    first = DeviceTimestamp(torch.device("cuda"))
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    last = DeviceTimestamp(torch.device("cuda"))
    time.sleep(0.3)
    last.wait()
    assert 0.005 < last.elapsed_since_s(first) < 0.2
