import errno
import os
from pathlib import Path

import pytest

from meshwright.observe.watch.agent.shared_pages import (
    CAPACITY,
    CAPTURED,
    ENDED,
    PLAIN,
    CaptureCommand,
    ControlPage,
    StepPage,
)
from meshwright.observe.watch.step_pace import StepPace, summarize_step_times
from meshwright.observe.watch.step_page_reader import StepPageReader

MS = 1_000_000


@pytest.fixture
def page(tmp_path: Path) -> StepPage:
    return StepPage(str(tmp_path / "1.steps"), pid=1, rank=3, started_ns=0)


@pytest.fixture
def reader(page: StepPage, tmp_path: Path) -> StepPageReader:
    return StepPageReader(tmp_path / "1.steps")


def test_a_page_that_has_no_place_on_the_disk_is_refused_rather_than_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        StepPage(str(tmp_path / "1.steps"), pid=1, rank=3, started_ns=0)
    assert not list(tmp_path.iterdir())


def test_a_page_stays_to_its_reader_when_its_number_is_used_again(
    page: StepPage, reader: StepPageReader, tmp_path: Path
) -> None:
    page.add(10 * MS, 0, PLAIN)
    StepPage(str(tmp_path / "1.steps"), pid=1, rank=3, started_ns=0)
    assert reader.read_header().num_steps == 1
    assert StepPageReader(tmp_path / "1.steps").file != reader.file


def test_times_leave_out_the_agent_and_captured_steps(
    page: StepPage, reader: StepPageReader
) -> None:
    for ended_ms, own_ms, mark in (
        (10, 0, PLAIN),
        (20, 5, PLAIN),
        (35, 0, CAPTURED),
        (50, 0, PLAIN),
    ):
        page.add(ended_ms * MS, own_ms * MS, mark)
    times = reader.read_step_durations(100)
    assert times.step_number.tolist() == [2, 4]
    assert times.step_s.tolist() == pytest.approx([0.010, 0.015])
    assert reader.read_last_step_end_ns() == 50 * MS
    head = reader.read_header()
    assert (head.rank, head.num_steps, head.overhead_ns) == (3, 4, 5 * MS)


def test_ring_keeps_the_newest_steps(page: StepPage, reader: StepPageReader) -> None:
    for number in range(CAPACITY + 10):
        page.add((number + 1) * MS, 0, PLAIN)
    times = reader.read_step_durations(10**9)
    assert times.step_number[-1] == CAPACITY + 10
    assert times.step_number.size == CAPACITY - 2
    assert set(times.step_s.round(6).tolist()) == {0.001}


def test_head_tells_captures_and_the_end(page: StepPage, reader: StepPageReader) -> None:
    page.record_capture(cost_ns=9, beyond_ns=4, answered=2)
    page.set_state(ENDED, True)
    head = reader.read_header()
    assert (
        head.num_captures,
        head.capture_cost_ns,
        head.overhead_ns,
        head.last_answered_request,
    ) == (1, 9, 4, 2)
    assert head.state == ENDED


def test_only_the_owner_can_read_a_page(page: StepPage, tmp_path: Path) -> None:
    assert (tmp_path / "1.steps").stat().st_mode & 0o777 == 0o600


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    writer = ControlPage(path, writes=True)
    reader = ControlPage(path)
    assert reader.read().number == 0
    writer.write(CaptureCommand(4, 128, 2))
    assert reader.read() == CaptureCommand(4, 128, 2)


def test_another_file_is_no_page(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * 4096)
    with pytest.raises(ValueError, match="no page of steps"):
        StepPageReader(tmp_path / "x")


def test_pace_tells_a_slowdown_once_and_its_end(page: StepPage, reader: StepPageReader) -> None:
    pace, now = StepPace(0.10), 0
    rises, ends = [], []
    for number in range(1, 200):
        now += (300 if 80 < number <= 120 else 200) * MS
        page.add(now, 0, PLAIN)
        over = pace.find_recovery(reader)
        if over is not None:
            ends.append(over)
        rise = pace.check(reader)
        if rise is not None:
            rises.append(rise)
    assert [(rise.step, rise.before_s, rise.after_s) for rise in rises] == [(81, 0.2, 0.3)]
    assert len(ends) == 1
    assert abs(ends[0] - 121) <= 4


def test_figures_of_steps(page: StepPage, reader: StepPageReader) -> None:
    assert summarize_step_times(reader.read_step_durations(10).step_s) is None
    for ended_ms in (0, 10, 20, 31, 50):
        page.add(ended_ms * MS, 0, PLAIN)
    found = summarize_step_times(reader.read_step_durations(10).step_s)
    assert found is not None
    assert (found.median_s, found.slowest_s) == pytest.approx((0.0105, 0.019))


def test_the_pace_is_the_mean_of_steps_sent_off_and_waited_for(
    page: StepPage, reader: StepPageReader
) -> None:
    at = 0
    for step in range(1, 101):
        at += 91 * MS if step % 10 == 0 else MS
        page.add(at, 0, PLAIN)
    assert reader.measure_recent_step_s(at) == pytest.approx(0.010)
    assert reader.measure_recent_step_s(at, most=40) == pytest.approx(0.010)
    # A wait that goes on counts.
    assert reader.measure_recent_step_s(at + 1000 * MS, most=50) == pytest.approx(0.030)
