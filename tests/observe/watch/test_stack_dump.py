import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.observe.watch.process_table import ProcessAnnouncement, WatchedProcess
from meshwright.observe.watch.stack_dump import (
    ProcessStacks,
    format_stacks,
    group_by_position,
    parse_faulthandler,
    request_stacks,
)
from meshwright.observe.watch.watch_folder import create_watch_folder

WRITTEN = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f0000000002 [python] (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/c10d.py", line 2810 in all_reduce
  File "/jobs/train.py", line 42 in reduce
  File "/jobs/train.py", line 90 in <module>
"""


def test_main_thread_comes_first_and_its_newest_own_line_is_the_place() -> None:
    stacks = parse_faulthandler(WRITTEN, main_thread=0x7F0000000002)
    assert [len(one.frames) for one in stacks] == [3, 1]
    place = ProcessStacks(0, 1, stacks, "").position_text
    assert place == "/jobs/train.py:42 in reduce, then c10d.py:2810 in all_reduce"


def test_last_thread_is_taken_for_the_main_one_where_none_is_known() -> None:
    assert parse_faulthandler(WRITTEN)[0].thread == 0x7F0000000002


def test_what_is_no_stack_is_none() -> None:
    assert parse_faulthandler("nonsense\n  File without a thread") == ()
    assert ProcessStacks(3, 1, (), "is gone").position_text == "is gone"


def test_ranks_in_one_place_stand_together_the_most_first() -> None:
    here = parse_faulthandler(WRITTEN)
    standings = [ProcessStacks(rank, rank, here, "") for rank in (0, 1, 3)]
    standings.append(ProcessStacks(2, 2, (), "did not answer"))
    groups = group_by_position(standings)
    assert [ranks for ranks, _ in groups] == [[0, 1, 3], [2]]
    assert "rank 2 (pid 2) did not answer" in format_stacks(standings)


def test_what_this_python_writes_is_understood() -> None:
    code = "import faulthandler, sys\ndef f():\n    faulthandler.dump_traceback()\nf()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (stack,) = parse_faulthandler(done.stderr)
    assert [(frame.line, frame.function) for frame in stack.frames] == [(3, "f"), (4, "<module>")]


@pytest.mark.parametrize("number", [None, 0, -3, int(signal.SIGINT), int(signal.SIGRTMAX)])
def test_a_signal_is_sent_only_where_it_can_be_for_stacks(
    tmp_path: Path, number: int | None
) -> None:
    folder = create_watch_folder(tmp_path / "w", {})
    (folder.agents / f"{os.getpid()}.stacks").touch()
    # This process handles SIGINT, which would interrupt it, and no real-time signal.
    (standing,) = request_stacks(
        folder, [WatchedProcess(ProcessAnnouncement(os.getpid(), signal=number))]
    )
    assert standing.missing_reason.startswith("has no handler")
