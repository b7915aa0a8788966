"""What others use of a machine is told apart from what ranks use, and ranks keep apart."""

import os
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="is a part of the trainer")

from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.train.profiling import host_load
from meshwright.run.train.profiling.collective_timing import MESSAGE_BYTES, time_collectives
from meshwright.run.train.profiling.cpu_affinity import (
    count_available_cores,
    make_timing_clock,
    pin_rank_to_cores,
    select_cores_of_rank,
)
from meshwright.run.train.profiling.host_load import HostLoadMeter


def test_cores_of_others_are_what_ranks_did_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy = iter((10.0, 14.0)), iter((100.0, 107.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    monkeypatch.setattr(host_load, "read_total_busy_s", lambda: next(busy))
    # Of 7 busy seconds ranks took 5: others had 2 in 4 seconds.
    assert HostLoadMeter().measure_other_cores(5.0) == pytest.approx(0.5)


def test_nothing_is_said_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_load, "read_total_busy_s", lambda: None)
    assert HostLoadMeter().measure_other_cores(0.0) is None


def test_ranks_get_as_many_cores_each_or_take_turns_on_too_few() -> None:
    assert [select_cores_of_rank([1, 3, 4, 6, 7], rank, 2) for rank in range(2)] == [[1, 3], [4, 6]]
    assert [select_cores_of_rank([1, 3], rank, 4) for rank in range(4)] == [[1], [3], [1], [3]]
    assert select_cores_of_rank([], 0, 2) == []


def test_the_time_of_a_core_counts_where_ranks_share_one() -> None:
    assert make_timing_clock(count_available_cores()) is time.perf_counter
    assert make_timing_clock(count_available_cores() + 1) is time.process_time


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads Linux's list of threads")
def test_threads_that_are_there_already_keep_to_the_cores_too() -> None:
    before, over = os.sched_getaffinity(0), threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        pin_rank_to_cores(0, count_available_cores())
        first = {min(before)}
        assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id or 0) == first
    finally:
        for each in Path("/proc/self/task").iterdir():  # others of this process, too
            os.sched_setaffinity(int(each.name), before)
        over.set()
        thread.join()


@pytest.mark.slow
def test_the_last_of_three_ranks_times_no_messages() -> None:
    first, second, third = spawn_ranks(3, time_collectives, 3)
    assert first.message_times[-1][1] > 0
    assert len(second.message_times) == len(MESSAGE_BYTES)
    assert len(first.send_recv_times) == len(first.message_cpu_times) == len(MESSAGE_BYTES)
    assert third.message_times == third.send_recv_times == third.message_cpu_times == ()
    assert set(third.collectives) == {
        f"{op} 3" for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    }
