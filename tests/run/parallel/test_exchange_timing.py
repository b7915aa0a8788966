"""An exchange is timed by its slowest rank, and its result is checked."""

import pytest

torch = pytest.importorskip("torch", reason="exchanges are torch's")

from meshwright.run.parallel.exchange_timing import (  # noqa: E402
    MIN_SAMPLES,
    ExchangeCase,
    _samples,
    sample_exchanges,
)
from meshwright.run.parallel.flight_recorder import FlightRecorder  # noqa: E402
from meshwright.run.parallel.group_coordinator import GroupCoordinator  # noqa: E402
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks  # noqa: E402

CPU = torch.device("cpu")


def alone() -> GroupCoordinator:
    return GroupCoordinator("world", (0,), 0, None, FlightRecorder())


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_right_result_is_timed(op: str) -> None:
    found = _samples(ExchangeCase(op, 4096), alone(), CPU, 0.001)
    assert len(found) >= MIN_SAMPLES
    assert min(found) > 0


def test_a_wrong_result_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    group = alone()
    monkeypatch.setattr(group, "all_gather", lambda part: part + 1)
    with pytest.raises(RuntimeError, match="all_gather of 4,096 bytes: 1,024 elements are wrong"):
        _samples(ExchangeCase("all_gather", 4096), group, CPU, 0.001)


@pytest.mark.slow
def test_time_that_is_up_is_up_for_all() -> None:
    asked = [ExchangeCase("all_reduce", 1024), ExchangeCase("one_way", 8)]
    assert spawn_ranks(2, sample_exchanges, asked, 2, 0.0) == [[(), ()], [(), ()]]
