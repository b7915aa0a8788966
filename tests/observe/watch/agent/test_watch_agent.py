"""The agent with a torch of its own making: captures as asked, and no fault that gets out."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.observe.watch.agent import watch_agent
from meshwright.observe.watch.agent.capture_timeout import MainThreadTimer
from meshwright.observe.watch.agent.error_log import MAX_BYTES, ErrorLog
from meshwright.observe.watch.agent.profiler_guard import keep_cupti_for_graphs
from meshwright.observe.watch.agent.shared_pages import (
    CAPTURES_OFF,
    ENDED,
    PROFILES_ITSELF,
    CaptureCommand,
    ControlPage,
)
from meshwright.observe.watch.agent.stack_signal import find_free_signal
from meshwright.observe.watch.agent.watch_agent import WatchAgent
from meshwright.observe.watch.step_page_reader import StepPageReader
from meshwright.observe.watch.watch_folder import WatchFolder, create_watch_folder


@pytest.mark.parametrize(
    ("cuda", "ours", "said"),
    [("12.4", True, "0"), ("11.8", True, "0"), ("12.6", True, "1"), ("12.4", False, "1")],
)
def test_graphs_that_do_not_stand_it_keep_the_driver(
    monkeypatch: pytest.MonkeyPatch, cuda: str, ours: bool, said: str
) -> None:
    class CUDAGraph:
        def capture_begin(self, pool: int) -> int:
            return pool

    torch = SimpleNamespace(
        cuda=SimpleNamespace(graphs=SimpleNamespace(CUDAGraph=CUDAGraph)),
        version=SimpleNamespace(cuda=cuda),
    )
    monkeypatch.setenv("TEARDOWN_CUPTI", "1")
    if ours:
        monkeypatch.setenv("MESHWRIGHT_WATCH_TEARDOWN", "1")
    keep_cupti_for_graphs(torch)
    assert CUDAGraph().capture_begin(7) == 7
    assert os.environ["TEARDOWN_CUPTI"] == said


class Profiler:
    """As much of torch as the agent touches; `said` is what it was asked to do."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.broken = False
        self.autograd = SimpleNamespace(
            _profiler_enabled=lambda: False,
            profiler=SimpleNamespace(
                _prepare_profiler=lambda: None,
                _enable_profiler=lambda: None,
                _disable_profiler=lambda: None,
            ),
        )
        self.profiler = SimpleNamespace(
            ProfilerActivity=SimpleNamespace(CPU="cpu"),
            profile=self._profile,
            record_function=self._mark,
        )
        self.cuda = SimpleNamespace(is_available=lambda: False)
        self.distributed = SimpleNamespace(is_available=lambda: False)

    def _profile(self, **_: Any) -> Any:
        return SimpleNamespace(
            start=self._start,
            stop=lambda: self.said.append("stop"),
            export_chrome_trace=lambda path: Path(path).write_text("{}"),
        )

    def _start(self) -> None:
        if self.broken:
            raise RuntimeError("no profiler today")
        self.autograd.profiler._enable_profiler()
        self.said.append("start")

    def _mark(self, name: str) -> Any:
        return SimpleNamespace(
            __enter__=lambda: self.said.append(name), __exit__=lambda *_: self.said.append("end")
        )


@pytest.fixture
def folder(tmp_path: Path) -> WatchFolder:
    return create_watch_folder(tmp_path / "w", {"record_shapes": True})


@pytest.fixture
def control(folder: WatchFolder) -> ControlPage:
    return ControlPage(str(folder.control), writes=True)


@pytest.fixture
def torch() -> Profiler:
    return Profiler()


@pytest.fixture
def watched(folder: WatchFolder, control: ControlPage, torch: Profiler) -> WatchAgent:
    return WatchAgent(str(folder.path), torch, ErrorLog(str(folder.log)))


def reader(folder: WatchFolder) -> StepPageReader:
    return StepPageReader(folder.agents / f"{os.getpid()}.steps")


def test_asked_steps_are_captured_and_counted(
    watched: WatchAgent, control: ControlPage, torch: Profiler, folder: WatchFolder
) -> None:
    watched.on_optimizer_step(1)
    control.write(CaptureCommand(1, first_step=4, num_steps=2))
    for _ in range(7):
        watched.on_optimizer_step(1)
    marks = ["ProfilerStep#4", "end", "ProfilerStep#5", "end"]
    assert torch.said == ["start", *marks, "stop"]
    head = reader(folder).read_header()
    assert (head.num_steps, head.num_captures, head.last_answered_request) == (8, 1, 1)
    assert head.overhead_ns >= head.capture_cost_ns > 0
    assert [path.name for path in folder.incoming.iterdir()] == [f"000001-{os.getpid()}--1.json"]
    # The captured steps are no measure of what is usual.
    assert set(reader(folder).read_step_durations(100).step_number.tolist()) == {2, 3, 6, 7, 8}


def test_a_profiler_that_fails_costs_captures_but_no_steps(
    watched: WatchAgent, control: ControlPage, torch: Profiler, folder: WatchFolder
) -> None:
    torch.broken = True
    watched.on_optimizer_step(1)
    for number in range(1, 6):
        control.write(CaptureCommand(number, 1, 1))
        watched.on_optimizer_step(1)
    head = reader(folder).read_header()
    assert (head.num_steps, head.num_captures, head.last_answered_request) == (6, 0, 5)
    assert head.state & CAPTURES_OFF
    assert folder.log.read_text().count("RuntimeError: no profiler today") == watch_agent.MAX_ERRORS


def test_a_job_that_profiles_itself_goes_first(
    watched: WatchAgent, control: ControlPage, torch: Profiler, folder: WatchFolder
) -> None:
    watched.on_optimizer_step(1)
    control.write(CaptureCommand(1, 1, 1))
    watched.on_optimizer_step(1)
    assert torch.said[-1] == "ProfilerStep#3"
    torch.autograd.profiler._prepare_profiler()
    assert torch.said[-2:] == ["end", "stop"]
    control.write(CaptureCommand(2, 1, 1))
    watched.on_optimizer_step(1)
    head = reader(folder).read_header()
    assert (head.num_captures, head.last_answered_request) == (0, 2)
    assert head.state & PROFILES_ITSELF
    torch.autograd.profiler._disable_profiler()
    control.write(CaptureCommand(3, 1, 1))
    for _ in range(2):
        watched.on_optimizer_step(1)
    assert reader(folder).read_header().num_captures == 1


def test_a_step_that_does_not_end_is_not_recorded_to_its_end(
    watched: WatchAgent,
    control: ControlPage,
    torch: Profiler,
    folder: WatchFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_agent, "MIN_CAPTURE_TIMEOUT_S", 0.05)
    watched.on_optimizer_step(1)
    control.write(CaptureCommand(1, 1, 1))
    watched.on_optimizer_step(1)
    assert _within_s(5, lambda: torch.said[-1] == "stop")
    watched.on_optimizer_step(1)
    head = reader(folder).read_header()
    assert (head.num_steps, head.num_captures, head.last_answered_request) == (3, 0, 1)


def test_an_end_is_written_down_and_a_child_begins_anew(
    watched: WatchAgent, folder: WatchFolder
) -> None:
    watched.on_optimizer_step(1)
    watched.on_exit()
    assert reader(folder).read_header().state & ENDED
    watched.on_fork()
    watched.on_optimizer_step(1)
    assert reader(folder).read_header().num_steps == 1


def test_a_page_that_cannot_be_written_ends_the_watch_and_not_the_job(
    watched: WatchAgent, folder: WatchFolder
) -> None:
    folder.agents.rmdir()
    watched.on_optimizer_step(1)
    watched.on_optimizer_step(1)
    assert folder.log.read_text().count("cannot write step") == 1


def test_an_alarm_rings_in_the_main_thread_unless_it_is_cleared() -> None:
    rang: list[threading.Thread] = []
    alarm = MainThreadTimer(lambda: rang.append(threading.current_thread()))
    alarm.set(0.02)
    assert _within_s(5, lambda: bool(rang))
    assert rang == [threading.main_thread()]
    alarm.set(0.05)
    alarm.clear()
    assert not _within_s(0.2, lambda: len(rang) > 1)


def test_the_log_is_bounded_and_a_log_that_cannot_be_is_none(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"x" * MAX_BYTES)
    ErrorLog(str(path)).write("more")
    assert path.stat().st_size == MAX_BYTES
    ErrorLog(str(tmp_path / "not" / "there")).write("nowhere")


def test_the_signal_for_stacks_is_one_that_nothing_handles() -> None:
    number = find_free_signal()
    assert number is not None
    assert number > 34


def _within_s(most_s: float, true: Callable[[], bool]) -> bool:
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        if true():
            return True
        time.sleep(0.005)
    return False
