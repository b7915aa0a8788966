"""The watcher on pages written by hand: restarts, full disks, traces that come too late."""

import shutil
from pathlib import Path

import pytest

from meshwright.observe.watch.agent.shared_pages import PLAIN, StepPage
from meshwright.observe.watch.background_worker import BackgroundWorker
from meshwright.observe.watch.capture_requester import CaptureRequester
from meshwright.observe.watch.watch_config import WatchConfig
from meshwright.observe.watch.watch_folder import WatchFolder, create_watch_folder
from meshwright.observe.watch.watch_status import read_status
from meshwright.observe.watch.watcher import Watcher

MS = 1_000_000
NO_SUCH_PID = 2**22 + 1
"""One more than Linux counts to."""


@pytest.fixture
def folder(tmp_path: Path) -> WatchFolder:
    return create_watch_folder(tmp_path / "w", {})


def _watcher(folder: WatchFolder) -> Watcher:
    return Watcher(folder, WatchConfig(), "train", None)


def _steps(folder: WatchFolder, pid: int, *lengths_ms: int) -> None:
    page = StepPage(str(folder.agents / f"{pid}.steps"), pid, 0, 0)
    at = 0
    for length in lengths_ms:
        at += length * MS
        page.add(at, 0, PLAIN)


def test_a_job_that_was_started_again_is_watched_for_slowdowns_from_its_first_step(
    folder: WatchFolder,
) -> None:
    watcher = _watcher(folder)
    _steps(folder, NO_SUCH_PID, *[200] * 60, *[400] * 10)
    watcher.tick()
    _steps(folder, NO_SUCH_PID + 1, *[200] * 40, *[500] * 10)
    watcher.tick()
    found = watcher.build_status().slowdowns
    assert [round(one.after_ms) for one in found] == [400, 500]


def test_a_process_that_begins_anew_under_its_number_is_seen(folder: WatchFolder) -> None:
    watcher = _watcher(folder)
    _steps(folder, NO_SUCH_PID, 200, 200, 200)
    watcher.tick()
    _steps(folder, NO_SUCH_PID, 200)
    watcher.tick()
    assert watcher.build_status().steps == 1


def test_the_exit_code_comes_through_where_nothing_can_be_written(folder: WatchFolder) -> None:
    watcher = _watcher(folder)
    shutil.rmtree(folder.path)
    watcher.on_job_start(1)
    watcher.tick()
    assert watcher.on_job_exit(3).exit_code == 3


def test_the_end_is_on_disk_before_slow_work_is_waited_for_and_whatever_cuts_that_short(
    folder: WatchFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int | None] = []

    def interrupted(_self: BackgroundWorker, _within_s: float) -> None:
        codes.append(read_status(folder.status).exit_code)
        raise KeyboardInterrupt

    monkeypatch.setattr(BackgroundWorker, "drain", interrupted)
    assert _watcher(folder).on_job_exit(3).exit_code == 3
    assert codes == [3]


def test_traces_that_nobody_waits_for_any_more_are_removed(folder: WatchFolder) -> None:
    asking = CaptureRequester(folder)
    (folder.incoming / "000001-5-0.json").write_text("{}")
    left = []
    for _ in range(7):
        asking.request(10, 1, "routine", now_ns=0, wait_s=1)
        left.append(len(list(folder.incoming.iterdir())))
    assert left == [1, 1, 1, 1, 1, 0, 0]
